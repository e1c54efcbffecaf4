"""Files that several processes share: their checksum, and a lock that names one process as the owner."""

from __future__ import annotations

import errno
import fcntl
import hashlib
from pathlib import Path
from typing import IO


def sha256(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def take_lock(handle: IO[str]) -> bool:
    """Whether this process has the file's lock now, which goes with the process however it dies.

    It is POSIX's, which holds over NFS and which child processes do not keep. Where a file system has no locks, every
    process has it.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
