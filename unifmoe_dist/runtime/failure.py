"""How a failing job ends: the true cause said once, first, and no rank left waiting.

The rank that fails says why, tells the others over the watchdog and leaves. The others leave with one short line each,
even from inside a collective that will never end. Before the ranks have joined there is no watchdog; then, and when
all ranks meet the same error, a lock file shared by the ranks of a node lets one of them speak.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import lock
from unifmoe_dist.runtime.extras import explained
from unifmoe_dist.runtime.watchdog import Notice, Watchdog

USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130
NEWS_SECONDS = 2.0  # how long a rank whose collective broke waits to hear whose fault that is
GRACE_SECONDS = 3.0  # how long a rank may go on after another has failed, to end by itself
LINGER_SECONDS = 1.5  # launchers report the rank that exits first, and poll once a second: let that be the cause

_SIGNS_OF_SILENCE = ("timed out", "timeout", "unreachable", "no route")
_SIGNS_OF_COMMUNICATION = ("gloo", "nccl", "connection", "broken pipe", "process group", "tcpstore", "socket")

_watchdog: Watchdog | None = None  # a process belongs to one job
_silence = 0  # seconds after which a host that does not answer counts as lost
_speaking = threading.Lock()  # taken by the thread that speaks last; the process exits with it held


@contextmanager
def watched(ranks: Any, silence: int) -> Iterator[None]:
    """Tie this process to the other ranks of its job; collective. A failure keeps the tie, for `leave_for`.

    `silence` is for how many seconds a host may not answer before its ranks count as lost.
    """
    global _watchdog, _silence
    _silence = silence
    if ranks.world_size == 1:
        yield
        return
    try:
        _watchdog = Watchdog(ranks.rank, ranks.world_size, silence, ranks.share, _leave_after_grace)
    except OSError as error:
        print(
            f"warning: rank {ranks.rank} cannot watch the other ranks ({error}); if one fails, this one may wait "
            "for the backend's timeout.",
            file=sys.stderr,
            flush=True,
        )
    ranks.barrier()
    yield
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None


def in_job() -> bool:
    """Whether this process is tied to other ranks, which would wait for it."""
    return _watchdog is not None


def leave_for(error: BaseException) -> NoReturn:
    """Say why this rank leaves, unless another is the cause, and exit the process at once."""
    error = explained(error)
    watchdog = _watchdog
    notice = None if watchdog is None else watchdog.wait(_seconds_for_news(error))
    if notice is not None:
        _leave_with(notice)
    status, message = _describe(error)
    rank = _from_environment("RANK", 0)
    earlier = _claim(rank, message) if _from_environment("WORLD_SIZE", 1) > 1 else None
    _speaking.acquire()
    if earlier is None:
        whole = message if isinstance(error, (UserError, KeyboardInterrupt)) else f"rank {rank} failed: {message}"
        _say(whole)
        if watchdog is not None:
            watchdog.tell(status)
        _exit(status)
    if earlier["message"] != message:
        own = "" if _is_communication(error) else f" (and this one: {type(error).__name__}: {error})"
        _say(f"rank {rank} stops because rank {earlier['rank']} failed{own}")
    time.sleep(LINGER_SECONDS)
    _exit(status)


def _from_environment(name: str, default: int) -> int:
    """A launcher's variable; that it is no number may be the very mistake to tell of."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UserError):
        return USER_ERROR_STATUS, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS, "interrupted"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        return code or 1, f"it left the job early, with exit status {error.code}"
    return 1, "".join(["\n", *traceback.format_exception(error)]).rstrip()


def _is_communication(error: BaseException) -> bool:
    """Whether an error may be the echo of another rank's end."""
    text = str(error).lower()
    dist = sys.modules.get("torch.distributed")  # not imported for this: then no rank can have failed in it
    return (dist is not None and isinstance(error, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_COMMUNICATION)
    )


def _seconds_for_news(error: BaseException) -> float:
    """How long to wait for another rank's end that this error may be the echo of."""
    if not _is_communication(error):
        return 0.0
    text = str(error).lower()  # a backend may notice a silent host before the watchdog does
    return NEWS_SECONDS + (_silence if any(sign in text for sign in _SIGNS_OF_SILENCE) else 0)


def _leave_after_grace(notice: Notice) -> None:
    time.sleep(GRACE_SECONDS)  # most ranks fail in their next collective, and leave by themselves
    _leave_with(notice)


def _leave_with(notice: Notice) -> NoReturn:
    _speaking.acquire()
    rank = os.environ.get("RANK", "0")
    gone, there = notice.rank, f" on {notice.host}" if notice.host != socket.gethostname() else ""
    why = {
        "silent": f"rank {gone}{there} no longer answers: its host is down, or the network between the hosts is cut; "
        "once that is mended, the same command with --resume continues the run",
        "lost": f"rank {gone} was lost{there}: its process ended without a message (killed, out of memory, or crashed)",
        "failed": f"rank {gone} failed{there}",
    }
    _say(f"rank {rank} stops because {why[notice.how]}")
    time.sleep(LINGER_SECONDS)
    _exit(notice.status)


def _say(text: str) -> None:
    """In one write, so that ranks that speak at once keep lines of their own in the log that they share."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def _exit(status: int) -> NoReturn:
    # Not sys.exit: interpreter shutdown with a live process group can abort, or wait for ranks that never come.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # nobody may read it any more, or it was never open
            stream.flush()
    os._exit(status)


def _claim(rank: int, message: str) -> dict[str, Any] | None:
    """Become the one rank of this node that speaks, or learn which rank that is and what it said.

    Ranks of a node have the same parent, the launcher. A claim from before this process began is another job's.
    """
    import psutil

    path = Path(tempfile.gettempdir()) / f"unifmoe-failure-{os.getuid()}-{os.getppid()}"
    try:
        _remove_old(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+") as handle:
            lock(handle)
            try:
                earlier = json.load(handle)
                if earlier["time"] > psutil.Process().create_time():
                    return earlier
            except (ValueError, KeyError, TypeError):
                pass  # new, or not ours
            handle.seek(0)
            handle.truncate()
            json.dump({"rank": rank, "message": message, "time": time.time()}, handle)
    except OSError:
        pass  # better said twice than never
    return None


def _remove_old(path: Path) -> None:
    """Remove the claims of launchers that have ended."""
    import psutil

    stem = path.name.rpartition("-")[0]
    for old in path.parent.glob(f"{stem}-*"):
        launcher = old.name.rpartition("-")[2]
        if launcher.isdecimal() and not psutil.pid_exists(int(launcher)):
            with suppress(OSError):
                old.unlink()
