"""Files that several processes share: whole or not there, locked by one of them, and their checksum."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name to write a file or a folder under, which takes its place at `path` when the context ends well.

    A reader sees what was there before or the whole, never a part, even after a power failure. What is left of a try
    that was killed goes with the next.
    """
    temporary = path.with_name(f".writing-{path.name}")
    _remove(temporary)
    try:
        yield temporary
        for inner in temporary.rglob("*") if temporary.is_dir() else ():
            flush(inner)
        publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


def publish(temporary: Path, path: Path) -> None:
    """Give a file or folder, whose content is flushed, its name in one step."""
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one step, in UTF-8 whatever the locale: reports hold Greek letters."""
    with appearing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that whoever may read other new files may read; the library's own are private."""
    from safetensors.torch import save_file  # imports PyTorch

    save_file(tensors, path, metadata)
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def user_cache(kind: str) -> Path:
    """Folder in ~/.cache/unifmoe_dist (`XDG_CACHE_HOME`) for files of a kind; it may not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unifmoe_dist" / kind


def sha256(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def lock(handle: IO[str], wait: bool = True) -> None:
    """Take the lock of a file that is open for writing; it goes with the process, however that dies.

    It is POSIX's, which holds over NFS and which child processes do not keep.

    Raises:
        OSError: the file system has no locks; without `wait`, another process has this one.
    """
    fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def take_lock(handle: IO[str]) -> bool:
    """Whether this process has the file's `lock` now. Where a file system has no locks, every process has it."""
    try:
        lock(handle, wait=False)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
