"""A wire between the ranks of a job over which each learns at once that another has failed or vanished.

Rank 0 keeps one TCP connection to every other rank. However a process dies, the kernel closes its sockets, so its end
shows within milliseconds on every rank, whatever these are waiting for. A host that loses its power or its network
closes nothing, so the kernels also probe each other (TCP keep-alive), and silence counts as the end. The backends
cannot do that: gloo reports a dead peer only to those that talk to it, NCCL to nobody before its timeout of minutes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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
        self.rank, self._silence = rank, silence
        self._host = socket.gethostname()
        self.notice: Notice | None = None
        self._told = threading.Event()
        self._on_notice = on_notice
        self._leaving = False
        self._lock = threading.Lock()
        self._links: dict[socket.socket, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        place = json.loads(share(json.dumps(self._open(world_size)) if rank == 0 else None))
        if place is None:
            raise OSError("rank 0 cannot open a port")
        address, port, self._token, name = place
        if rank != 0:
            hub = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            self._add(hub, _Link(rank=0, host=name))
            _send(hub, {"rank": rank, "token": self._token, "host": self._host})
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
            for end in self._ends():
                with suppress(OSError):  # closed by the other side
                    end.shutdown(socket.SHUT_RDWR)  # wakes the listening thread, which closes all

    def _ends(self) -> list[socket.socket]:
        return [*self._links, *([self._listener] if self._listener else [])]

    def _open(self, world_size: int) -> tuple[str, int, str, str] | None:
        """Start to listen; returns where, the word that shows who belongs to the job, and this host's name."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._listener = socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both)
        except OSError:
            return None
        self._selector.register(self._listener, selectors.EVENT_READ)
        port = self._listener.getsockname()[1]
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), port, secrets.token_hex(16), self._host

    # -- the listening thread ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._leaving and self._selector.get_map():
            for key, _ in self._selector.select():
                end: Any = key.fileobj
                if end != self._listener:
                    self._read(end)
                    continue
                with suppress(OSError):  # closing
                    self._add(end.accept()[0], _Link())
        self._selector.close()
        for end in self._ends():
            end.close()

    def _add(self, end: socket.socket, link: _Link) -> None:
        end.settimeout(None)
        _limit_silence(end, self._silence)
        with self._lock:
            self._links[end] = link
        self._selector.register(end, selectors.EVENT_READ)

    def _read(self, end: socket.socket) -> None:
        link, silent = self._links[end], False
        try:
            data = end.recv(4096)
        except OSError as error:
            data, silent = b"", error.errno not in _CLOSED
        if data:
            *lines, link.rest = (link.rest + data).split(b"\n")
            for line in lines:
                self._understand(link, line)
            if link.trusted or len(link.rest) < 4096:
                return
        self._selector.unregister(end)
        with self._lock:
            del self._links[end]
        end.close()
        if link.trusted and not link.bye and not self._leaving:
            self._hear(Notice(link.rank, 1, "silent" if silent else "lost", link.host))

    def _understand(self, link: _Link, line: bytes) -> None:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # not one of us
            message = json.loads(line)
            if not link.trusted:
                link.rank = int(message["rank"]) if message.get("token") == self._token else -1
                link.host = str(message["host"])
            elif "bye" in message:
                link.bye = True
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
            for end, link in self._links.items():
                if link.trusted:
                    with suppress(OSError):  # it is gone itself
                        _send(end, message)


@dataclass
class _Link:
    """The other end of a connection: its rank, -1 until it has shown the token, and the name of its host."""

    rank: int = -1
    host: str = ""
    bye: bool = False
    rest: bytes = field(default=b"", repr=False)

    @property
    def trusted(self) -> bool:
        return self.rank >= 0


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


def _send(end: socket.socket, message: dict[str, Any]) -> None:
    end.sendall(json.dumps(message).encode() + b"\n")
