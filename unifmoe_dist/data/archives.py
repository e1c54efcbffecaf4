"""Archives from elsewhere: their checksum, and unpacking that cannot write outside its folder."""

from __future__ import annotations

import hashlib
import lzma
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from unifmoe_dist.errors import UserError


def sha256(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def unpack(archive: Path, folder: Path, progress: bool = True) -> None:
    """Unpack a zip or tar file, compressed or not, into `folder`.

    Raises:
        UserError: it is no archive, is damaged or encrypted, or holds a name or link that leads outside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder, progress)
        elif tarfile.is_tarfile(archive):
            _unpack_tar(archive, folder, progress)
        else:
            raise UserError(f"{archive} is neither a zip nor a tar file; download it again.")
    except tarfile.FilterError as error:
        raise UserError(
            f"{archive} holds what must not be unpacked ({error}); get it from its official source."
        ) from error
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive} is damaged ({error}); download it again.") from error
    except RuntimeError as error:  # zipfile's word for encryption, and for compression that it does not know
        raise UserError(f"{archive} cannot be unpacked ({error}); get it from its official source.") from error
    except OSError as error:
        raise UserError(
            f"{archive} could not be unpacked into {folder} ({error}); free space or look at rights."
        ) from error


def _unpack_zip(archive: Path, folder: Path, progress: bool) -> None:
    with zipfile.ZipFile(archive) as source:
        members = source.infolist()
        for member in members:
            name = PurePosixPath(member.filename.replace("\\", "/"))
            if name.is_absolute() or ".." in name.parts or stat.S_ISLNK(member.external_attr >> 16):
                raise UserError(
                    f"{archive} holds {member.filename!r}, which leads outside; get it from its official source."
                )
        for member in tqdm(members, desc=archive.name, unit=" files", disable=not progress):
            source.extract(member, folder)


def _unpack_tar(archive: Path, folder: Path, progress: bool) -> None:
    with tarfile.open(archive) as source:  # one pass: a compressed tar has no index
        for member in tqdm(source, desc=archive.name, unit=" files", disable=not progress):
            source.extract(member, folder, filter="data")
