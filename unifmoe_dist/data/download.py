"""Downloads that show their progress and go on where they were interrupted."""

import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import sha256

TRIES = 5
CHUNK = 1 << 20


def download(url: str, path: Path, checksum: str | None = None, progress: bool = True, pause: float = 2.0) -> None:
    """Fetch a file over HTTP; nothing happens if it is there already.

    What has arrived waits under `path` + ".part", and a later call goes on from there if the file on the server is
    still the same (its ETag or date, kept in ".part.version", says so). `checksum` is the whole's sha256, where one is
    known; before the first new try it waits `pause` seconds, then twice as long each time.

    Raises:
        UserError: the address is not one of the web; the server cannot be reached, refuses, keeps breaking off, or the
            checksum differs.
    """
    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url} is not an address that begins with https:// or http://.")
    if path.is_file():
        return _check(path, checksum, url)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for attempt in range(TRIES):
        try:
            _fetch(url, part, progress)
            break
        except (OSError, http.client.HTTPException) as error:  # no route, refused, broken off, timed out
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise UserError(f"{url} cannot be downloaded (the server says {error.code} {error.reason}).") from error
            if attempt + 1 == TRIES:
                raise UserError(
                    f"{url} cannot be downloaded ({error}); what has arrived is kept in {part}, and the same command "
                    "goes on from there."
                ) from error
        time.sleep(pause * 2**attempt)
    _check(part, checksum, url)
    os.replace(part, path)
    _version(part).unlink(missing_ok=True)


def _fetch(url: str, part: Path, progress: bool) -> None:
    """Fetch the rest of the file, or all of it if it changed or the server cannot send a part."""
    have, version = part.stat().st_size if part.is_file() else 0, _version(part)
    request = urllib.request.Request(url, headers={"User-Agent": "unifmoe-dist"})  # noqa: S310  `download` looked
    if have and version.is_file():
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", version.read_text())
    try:
        response = urllib.request.urlopen(request, timeout=60)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range", "") == f"bytes */{have}":
            return  # it had arrived whole
        raise
    with response:
        resumed = response.status == 206
        mark = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if not resumed:
            have = 0
            version.unlink(missing_ok=True)
            if mark and not mark.startswith("W/"):  # a weak tag does not promise the same bytes
                version.write_text(mark)
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with (
            part.open("ab" if resumed else "wb") as handle,
            tqdm(total=total, initial=have, desc=part.stem, unit="B", unit_scale=True, disable=not progress) as bar,
        ):
            while chunk := response.read(CHUNK):
                handle.write(chunk)
                bar.update(len(chunk))
        if total is not None and part.stat().st_size != total:
            raise OSError(f"broken off after {part.stat().st_size:,} of {total:,} bytes")


def _version(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _check(path: Path, checksum: str | None, url: str) -> None:
    if checksum is not None and (found := sha256(path)) != checksum:
        raise UserError(f"{path} has sha256 {found}, not {checksum}; delete it and download {url} again.")
