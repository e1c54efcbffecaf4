"""Texts by domain: from a folder of .txt and .jsonl files, a data set on the Hugging Face hub, or Brown's genres."""

import json
from collections.abc import Iterator
from pathlib import Path

from unifmoe_dist.data.brown import GENRES, INDEX, find_brown, read_brown
from unifmoe_dist.errors import UserError

TEXT, DOMAIN = "text", "domain"
"""Fields of a line of .jsonl, and columns of a data set: the text, and where there is one, its domain."""

KINDS = (".txt", ".jsonl")

Domains = dict[str, list[str]]
"""Documents by domain."""


def domain_names(root: str | None) -> tuple[str, ...]:
    """Names of the domains that `read_domains` gives; of folders no file is opened.

    Raises:
        UserError: as of `read_domains`.
    """
    if _is_brown(root):
        return GENRES
    assert root is not None
    return tuple(_files(Path(root))) if Path(root).exists() else tuple(_from_hub(root))


def read_domains(root: str | None) -> Domains:
    """All documents by domain.

    Args:
        root: A folder, in which sub-folders are domains, and files beside them too, each of its own: a .txt file is one
            document, a .jsonl file one per line, an object with the field "text". Or the name of a data set on the
            hub, whose training split has a column "text", and perhaps one called "domain"; a colon leads to one of its
            configurations. Or Brown's folder or archive. None finds Brown.

    Raises:
        UserError: there is no such place, or a file is unreadable or empty of text.
    """
    if _is_brown(root):
        return read_brown(Path(root) if root else find_brown())
    assert root is not None
    if not Path(root).exists():
        return _from_hub(root)
    found = {name: [text for file in files for text in _documents(file)] for name, files in _files(Path(root)).items()}
    for name, documents in found.items():
        if not documents:
            raise UserError(f"the domain {name} of data.root {root} holds no text; fill its files or take them away.")
    return found


def _is_brown(root: str | None) -> bool:
    return root is None or root.endswith(".tgz") or (Path(root) / INDEX).is_file()


def _files(root: Path) -> dict[str, list[Path]]:
    """Files of every domain, in the order of their names."""
    if root.is_file():
        raise UserError(f"data.root {root} is a file; give the folder that it lies in.")
    found: dict[str, list[Path]] = {}
    for place in sorted(root.iterdir()):
        if place.name.startswith("."):
            continue
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        if texts := [file for file in files if file.suffix in KINDS and file.is_file()]:
            found.setdefault(place.name if place.is_dir() else place.stem, []).extend(texts)
    if not found:
        raise UserError(
            f"data.root {root} holds no {' or '.join(KINDS)} file; give a folder of texts, in which sub-folders or "
            "files are domains."
        )
    return found


def _documents(file: Path) -> Iterator[str]:
    try:
        content = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".txt":
            lines = [content]
        else:
            lines = [json.loads(line)[TEXT] for line in content.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{file} cannot be read ({reason}); .txt is text in UTF-8, and every line of .jsonl an object with the "
            f'field "{TEXT}".'
        ) from error
    for text in lines:
        if not isinstance(text, str):
            raise UserError(f'{file} holds {text!r} in the field "{TEXT}", which must be text; write it as text.')
        if text.strip():
            yield text


def _from_hub(name: str) -> Domains:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    place, _, configuration = name.partition(":")
    try:
        rows = load_dataset(place, configuration or None, split="train")
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"data.root {name} is no folder, and cannot be had from the Hugging Face hub ({reason}); check the name "
            "and the network, or give a folder of .txt or .jsonl files."
        ) from error
    if TEXT not in rows.column_names:
        raise UserError(
            f'the data set {name} has no column "{TEXT}" (it has {", ".join(rows.column_names)}); rename one, or write '
            "the texts into a folder of .txt files."
        )
    domains = rows[DOMAIN] if DOMAIN in rows.column_names else [place.rpartition("/")[2]] * len(rows)
    found: Domains = {}
    for domain, text in zip(domains, rows[TEXT], strict=True):
        if text.strip():
            found.setdefault(str(domain), []).append(text)
    return found
