"""Say that an extension of DeepSpeed is being compiled, or that another process holds the lock of its build.

torch compiles an extension at its first use in an environment, which takes about a minute, and says nothing. Other
processes wait meanwhile for the file `lock` in its folder. Up to torch 2.10 the file's presence is the lock: a process
that was killed leaves it, and then others wait for ever. Later the file stays, and the kernel knows who holds it.
"""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

CPU_ADAM = "cpu_adam"
"""What an offloaded optimiser needs."""

PATIENCE_SECONDS = 10.0  # before a wait for another process is worth a line
AGAIN_SECONDS = 60.0
TOGETHER_SECONDS = 5.0  # ranks of a job begin so close to one another: an older lock is another job's
_POLL_SECONDS = 0.2


@contextmanager
def announced(name: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Watch the build of an extension while the context lasts, and say what keeps it.

    Args:
        name: Of the extension.
        say: Takes each line; None prints on standard error, on the first rank of each host.
    """
    if say is None:
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        say = partial(print, file=sys.stderr, flush=True) if first else lambda line: None
    over = threading.Event()
    lock = _lock(name)
    watch = threading.Thread(target=_watch, args=(lock, _is_anothers(lock), over, say), name="compiling", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(lock: Path, foreign: bool, over: threading.Event, say: Callable[[str], None]) -> None:
    name, started, next_line = lock.parent.name, time.monotonic(), PATIENCE_SECONDS
    while not over.wait(_POLL_SECONDS):
        if not _is_held(lock):
            foreign = False
        elif not foreign and not lock.with_name(f"{name}.so").exists() and next_line == PATIENCE_SECONDS:
            say(f"compiling DeepSpeed's {name}: once per environment, about a minute")
            next_line = PATIENCE_SECONDS + AGAIN_SECONDS
        elif time.monotonic() - started >= next_line:
            seconds = time.monotonic() - started
            who = "another process" if foreign else "the process"
            say(f"waiting for {seconds:.0f} s for {who} that compiles DeepSpeed's {name} ({_state(lock)})")
            next_line = seconds + AGAIN_SECONDS


def _lock(name: str) -> Path:
    """The lock of an extension's build by this torch: others keep theirs in folders of their own."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False)) / "lock"


def _kernel_keeps_locks() -> bool:
    """Whether this torch locks the file, or else takes its presence for the lock."""
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileLock")


def _is_held(lock: Path) -> bool:
    if not _kernel_keeps_locks():
        return lock.exists()
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file yet
        pass
    return False


def _is_anothers(lock: Path) -> bool:
    """Whether a process that is no rank of this job builds: ranks have one parent, and begin together."""
    if not _is_held(lock):
        return False
    holder = _holder(lock)
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()[1])
        return holder != os.getpid() and parent != os.getppid()
    try:
        return time.time() - lock.stat().st_mtime > TOGETHER_SECONDS
    except OSError:
        return False


def _holder(lock: Path) -> int | None:
    """The process that holds a lock, where it is one that this user may see."""
    with suppress(OSError):
        target = lock.stat()
        if _kernel_keeps_locks():
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()  # 1: FLOCK ADVISORY WRITE pid device:device:inode first last
                if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(target.st_ino) and int(words[4]) > 0:
                    return int(words[4])
        else:
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if any(os.path.samestat(entry.stat(), target) for entry in (process / "fd").iterdir()):
                        return int(process.name)
    return None


def _state(lock: Path) -> str:
    """What is known about a lock that is held: by whom, or that it may be removed."""
    if holder := _holder(lock):
        return f"process {holder} is at it; its lock is {lock}"
    if _kernel_keeps_locks():
        return f"its lock is {lock}, held by a process that cannot be seen from here"
    return f"no process of yours on this host is at it: if none on another host is either, delete {lock}"
