"""A wire between the ranks of a job over which each learns at once that another has failed or vanished.

Rank 0 keeps one TCP connection to every other rank. However a process dies, the kernel closes its sockets, so its end
shows within milliseconds on every rank, whatever these are waiting for. A host that loses its power or its network
closes nothing, so the kernels also probe each other (TCP keep-alive), and silence counts as the end. The backends
cannot do that: gloo reports a dead peer only to those that talk to it, NCCL to nobody before its timeout of minutes.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

CONNECT_SECONDS = 30.0
_CLOSED = (errno.ECONNRESET, errno.EPIPE)  # by the other kernel, which therefore lives


@dataclass(frozen=True)
class Notice:
    """That a rank is gone.

    It failed and said so; or was lost without a word: killed, out of memory, or crashed; or is silent: its host or the
    network to it is down.
    """

    rank: int  # that went first
    status: int  # its exit status
    how: Literal["failed", "lost", "silent"]
    host: str  # its name


class Watchdog:
    """This rank's end of the wire.

    Args:
        rank: This one, of `world_size`.
        silence: Whole seconds without an answer from a rank's host after which the rank counts as gone.
        share: `share(text)` gives rank 0's text on every rank; collective.
        on_notice: Called once, on a thread of its own, when another rank is gone.

    Raises:
        OSError: rank 0 cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        silence: int,
        share: Callable[[str | None], str],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self.rank, self._silence, self._on_notice = rank, silence, on_notice
        self._host = socket.gethostname()
        self.notice: Notice | None = None
        self._told = threading.Event()
        self._leaving = False
        self._lock = threading.Lock()
        self._links: dict[Connection, tuple[int, str]] = {}  # with the rank at the other end and its host
        self._gone: set[int] = set()  # ranks that left in peace
        server, token = _server(world_size) if rank == 0 else None, secrets.token_hex(16)
        here = server and (os.environ.get("MASTER_ADDR", "127.0.0.1"), server.getsockname()[1], token, self._host)
        place = json.loads(share(json.dumps(here) if rank == 0 else None))
        if place is None:
            raise OSError("rank 0 cannot open a port")
        address, port, token, name = place
        if server is not None:
            with server:
                self._accept(server, world_size, token)
        else:
            hub = self._joined(socket.create_connection((address, port), timeout=CONNECT_SECONDS))
            self._links[hub] = 0, name
            _send(hub, {"rank": rank, "token": token, "host": self._host})
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def tell(self, status: int) -> None:
        """Let all ranks know that this one fails and leaves with `status`. Say why first: they leave soon after."""
        self._pass_on(asdict(Notice(self.rank, status, "failed", self._host)))

    def wait(self, seconds: float) -> Notice | None:
        """News of another rank's end, waiting for it if there is none yet."""
        self._told.wait(seconds)
        return self.notice

    def close(self) -> None:
        """Leave in peace; every rank does, after its last collective."""
        self._leaving = True
        self._pass_on({"bye": self.rank})
        with self._lock:
            for end in self._links:
                with suppress(OSError), socket.fromfd(end.fileno(), socket.AF_INET, socket.SOCK_STREAM) as link:
                    link.shutdown(socket.SHUT_RDWR)  # wakes the listening thread, which closes it

    def _accept(self, server: socket.socket, world_size: int, token: str) -> None:
        """Wait for the other ranks: those that show the token."""
        limit = time.monotonic() + CONNECT_SECONDS
        while len(self._links) < world_size - 1 and (seconds := limit - time.monotonic()) > 0:
            server.settimeout(seconds)
            with suppress(OSError, EOFError, ValueError, KeyError, TypeError):  # too late, or not one of us
                end = self._joined(server.accept()[0])
                message = json.loads(end.recv_bytes(4096)) if end.poll(5) else {}
                if message["token"] == token:
                    self._links[end] = int(message["rank"]), str(message["host"])

    def _joined(self, end: socket.socket) -> Connection:
        end.settimeout(None)
        _limit_silence(end, self._silence)
        return Connection(end.detach())

    # -- the listening thread ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while self._links:
            for end in wait(list(self._links)):
                self._read(end)  # type: ignore[arg-type]

    def _read(self, end: Connection) -> None:
        rank, host = self._links[end]
        try:
            message = json.loads(end.recv_bytes())
        except (EOFError, OSError) as error:
            with self._lock:
                del self._links[end]
            end.close()
            silent = isinstance(error, OSError) and error.errno not in _CLOSED
            if rank not in self._gone and not self._leaving:
                self._hear(Notice(rank, 1, "silent" if silent else "lost", host))
            return
        if "bye" in message:
            self._gone.add(rank)
        else:
            self._hear(Notice(**message))

    def _hear(self, notice: Notice) -> None:
        if self._told.is_set():
            return  # only the first cause matters
        self.notice = notice
        self._told.set()
        if self.rank == 0:
            self._pass_on(asdict(notice))
        threading.Thread(target=self._on_notice, args=(notice,), daemon=True).start()

    def _pass_on(self, message: dict[str, Any]) -> None:
        with self._lock:
            for end in self._links:
                with suppress(OSError):  # it is gone itself
                    _send(end, message)


def _server(world_size: int) -> socket.socket | None:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both)
    except OSError:
        return None


def _limit_silence(end: socket.socket, seconds: int) -> None:
    """Have the kernel end a connection whose other side does not answer for so long, whether it is idle or sending."""
    interval = max(1, seconds // 5)
    options = {
        "TCP_KEEPIDLE": max(1, seconds - 3 * interval),
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * seconds,
    }
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(end: Connection, message: dict[str, Any]) -> None:
    end.send_bytes(json.dumps(message).encode())
