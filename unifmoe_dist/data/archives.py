"""Archives from elsewhere: their checksum, and unpacking that cannot write outside its folder."""

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from unifmoe_dist.errors import UserError

_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

MOST_GROWTH = 50
"""Unpacked bytes per packed byte beyond which an archive is taken for a bomb; images hardly shrink, so theirs is about
1."""
MOST_FILES = 5_000_000
SMALL = 1 << 28
"""Bytes that an archive may always unpack to."""


def unpack(archive: Path, folder: Path, progress: bool = True) -> None:
    """Unpack a zip or tar file, compressed or not, into `folder`.

    Raises:
        UserError: it is no archive, is damaged or encrypted, holds a link or a name that leads outside, or unpacks to
            more than `MOST_GROWTH` times its size, more than `MOST_FILES` files, or more than the disk has room for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder, progress)
        elif tarfile.is_tarfile(archive):
            _unpack_tar(archive, folder, progress)
        else:
            raise UserError(f"{archive} is neither a zip nor a tar file; download it again.")
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive} is damaged ({error}); download it again.") from error
    except RuntimeError as error:  # zipfile's word for encryption, and for compression that it does not know
        raise UserError(f"{archive} cannot be unpacked ({error}); get it from its official source.") from error
    except OSError as error:
        raise UserError(
            f"{archive} could not be unpacked into {folder} ({error}); free space or look at rights."
        ) from error


def _unpack_zip(archive: Path, folder: Path, progress: bool) -> None:
    budget = _Budget(archive, folder)
    with zipfile.ZipFile(archive) as source:
        members = source.infolist()
        for member in members:
            name = PurePosixPath(member.filename.replace("\\", "/"))
            if name.is_absolute() or ".." in name.parts or stat.S_ISLNK(member.external_attr >> 16):
                raise UserError(
                    f"{archive} holds {member.filename!r}, which leads outside; get it from its official source."
                )
            budget.take(member.file_size)  # zipfile writes no more than this, whatever is inside
        for member in tqdm(members, desc=archive.name, unit=" files", disable=not progress):
            source.extract(member, folder)


def _unpack_tar(archive: Path, folder: Path, progress: bool) -> None:
    budget = _Budget(archive, folder)
    with tarfile.open(archive) as source:  # one pass: a compressed tar has no index
        for member in tqdm(source, desc=archive.name, unit=" files", disable=not progress):
            # tarfile's own filter is missing before Python 3.11.4, and links can deceive it (CVE-2025-4517).
            if not (member.isreg() or member.isdir()) or ".." in PurePosixPath(member.name).parts:
                raise UserError(
                    f"{archive} holds {member.name!r}, a link or special file or what leads outside, which no data set "
                    "needs; get it from its official source."
                )
            budget.take(member.size)
            member.name = member.name.lstrip("/")
            source.extract(member, folder, set_attrs=False, **_FILTER)


class _Budget:
    """What an archive may still write."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.archive, self.folder = archive, folder
        self.files = MOST_FILES
        self.bytes = max(MOST_GROWTH * archive.stat().st_size, SMALL)
        self.room = shutil.disk_usage(folder).free

    def take(self, size: int) -> None:
        """Count a file of `size` bytes, before it is written."""
        self.files, self.bytes, self.room = self.files - 1, self.bytes - size, self.room - size
        if self.files < 0 or self.bytes < 0:
            raise UserError(
                f"{self.archive} unpacks to more than {MOST_GROWTH} times its size or {MOST_FILES:,} files, as no data "
                "set does; get it from its official source."
            )
        if self.room < 0:
            raise UserError(f"{self.archive} unpacks to more than the disk of {self.folder} has room for; free space.")
