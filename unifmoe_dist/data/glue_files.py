"""GLUE's labelled splits from wherever they are: official TSV files, a `datasets` or parquet folder, or the hub.

The official files are tab-separated with no quoting: a `"` is a character like any other, often without a partner, and
only a line feed ends a row. So they are cut at tabs and line feeds, by no CSV reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from unifmoe_dist.data.language import Examples
from unifmoe_dist.errors import UserError

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueFormat:
    """How one task is stored.

    Attributes:
        name: The task, as the hub spells it.
        folder: The task, as the official archives spell it.
        classes: Labels of the official files in the order of the class numbers (which the hub stores).
        columns: Columns of the one or two texts in the official files.
        label: Column of the label in the official files.
        hub_columns: Columns of the texts on the hub.
        header: Names of the columns where the official files have no header line.
        split: Suffix of the names of the validation split.
        undecided: Label of rows that GLUE leaves out, since annotators did not agree.
        by_microsoft: Whether Microsoft's own archive is read too.
    """

    name: str
    folder: str
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    label: str
    hub_columns: tuple[str, ...]
    header: tuple[str, ...] | None = None
    split: str = ""
    undecided: str | None = None
    by_microsoft: bool = False


_BINARY, _ENTAILED = ("0", "1"), ("entailment", "not_entailment")
_INFERRED = ("entailment", "neutral", "contradiction")
_ONE, _PAIR, _QUESTION, _PREMISE = (
    ("sentence",),
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
)
_COLA_HEADER = ("source", "label", "judgement", "sentence")

FORMATS = {
    task.name: task
    for task in (
        GlueFormat("cola", "CoLA", _BINARY, _ONE, "label", _ONE, header=_COLA_HEADER),
        GlueFormat("mrpc", "MRPC", _BINARY, ("#1 String", "#2 String"), "Quality", _PAIR, by_microsoft=True),
        GlueFormat("qnli", "QNLI", _ENTAILED, _QUESTION, "label", _QUESTION),
        GlueFormat("mnli", "MNLI", _INFERRED, _PAIR, "gold_label", _PREMISE, split="_matched", undecided="-"),
        GlueFormat("rte", "RTE", _ENTAILED, _PAIR, "label", _PAIR),
    )
}


def read_glue(name: str, root: str | Path | None) -> tuple[Examples, Examples]:
    """The official training and validation splits (matched, for MNLI).

    Args:
        name: A task of `FORMATS`.
        root: The task's folder or its parent; None reads the hub. The folder holds the official files (for MRPC
            train.tsv and dev.tsv, or msr_paraphrase_train.txt with dev_ids.tsv), or what `datasets.save_to_disk`
            wrote, or train*.parquet and validation*.parquet.

    Raises:
        UserError: naming the file (and line) that is missing or not as it should be, or why the hub gave nothing.
    """
    task = FORMATS[name]
    if root is None:
        return _from_hub(task)
    folder = _task_folder(task, Path(root))
    try:
        for read in (_from_tsv, _from_msr, _from_disk, _from_parquet):
            if (splits := read(task, folder)) is not None:
                return splits
    except OSError as error:
        raise UserError(f"data.root {folder} cannot be read ({error}); check the folder's files.") from error
    raise _no_data(task, folder)


def check_layout(name: str, root: str | Path) -> str:
    """Which layout of `read_glue` a folder has, in words. Reads no more than the first rows' names and labels.

    Raises:
        UserError: none of them, or its columns or splits are not the task's.
    """
    task = FORMATS[name]
    folder = _task_folder(task, Path(root))
    tables = [path for path in (folder / "train.tsv", folder / f"dev{task.split}.tsv") if path.is_file()]
    if len(tables) < 2 and task.by_microsoft:
        tables = [path for path in sorted(folder.glob("msr_paraphrase_t*.txt")) if path.is_file()]
    if len(tables) == 2:
        for path in tables:
            _examples(task, path, islice(_rows(task, path), 100))
        return "official files"
    if (folder / "dataset_dict.json").is_file():
        lacking = [n for n in ("train", f"validation{task.split}") if not (folder / n / "state.json").is_file()]
        if lacking:
            raise UserError(f"{folder} has no split {lacking[0]}; save it again with datasets.save_to_disk.")
        return "a folder of datasets.save_to_disk"
    if all(any(folder.glob(f"{split}*.parquet")) for split in ("train", f"validation{task.split}")):
        return "parquet files"
    raise _no_data(task, folder)


def _no_data(task: GlueFormat, folder: Path) -> UserError:
    return UserError(
        f"{folder} holds no {task.folder} data; data.root needs train.tsv and dev{task.split}.tsv of the official "
        f"archive, a folder of datasets.save_to_disk, or train*.parquet and validation{task.split}*.parquet."
    )


def _task_folder(task: GlueFormat, root: Path) -> Path:
    if not root.is_dir():
        raise UserError(f"data.root {root} is not a folder; give one with GLUE's files, or null to read the hub.")
    inside = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() == task.name]
    return inside[0] if inside else root


# -- official files -------------------------------------------------------------------------------------------------


def _from_tsv(task: GlueFormat, folder: Path) -> tuple[Examples, Examples] | None:
    train, validation = folder / "train.tsv", folder / f"dev{task.split}.tsv"
    if not train.is_file() or not validation.is_file():
        return None
    return _read_tsv(task, train), _read_tsv(task, validation)


def _from_msr(task: GlueFormat, folder: Path) -> tuple[Examples, Examples] | None:
    """MRPC as Microsoft ships it; GLUE's validation split is the part of its training file that dev_ids.tsv lists."""
    train, test = folder / "msr_paraphrase_train.txt", folder / "msr_paraphrase_test.txt"
    if not task.by_microsoft or not train.is_file():
        return None
    lists = [path for path in (folder / "dev_ids.tsv", folder / "mrpc_dev_ids.tsv") if path.is_file()]
    if lists:
        held = {tuple(line.split("\t")[:2]) for line in _lines(lists[0])}
        rows = list(_rows(task, train))
        kept, chosen = ([r for r in rows if (_ids(r[1]) in held) == inside] for inside in (False, True))
        return _examples(task, train, kept), _examples(task, train, chosen)
    if not test.is_file():
        return None
    warnings.warn(
        f"{folder} has no dev_ids.tsv, so GLUE's validation split of MRPC is unknown: all of {train.name} trains "
        f"and {test.name} validates; scores do not compare with GLUE's.",
        stacklevel=2,
    )
    return _read_tsv(task, train), _read_tsv(task, test)


def _ids(row: dict[str, str]) -> tuple[str, str]:
    return row["#1 ID"], row["#2 ID"]


_Row = tuple[int, dict[str, str]]  # line number, and fields by column


def _read_tsv(task: GlueFormat, path: Path) -> Examples:
    return _examples(task, path, _rows(task, path))


def _lines(path: Path) -> list[str]:
    """Lines without their ends; other separators that str.splitlines knows are part of a text."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # MRPC's files begin with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); fetch the official file again.") from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def _rows(task: GlueFormat, path: Path) -> Iterable[_Row]:
    lines = _lines(path)
    header = task.header or tuple(lines[0].split("\t"))
    for name in (*task.columns, task.label):
        if name not in header:
            raise UserError(f"{path} has no column {name!r}; it is not the official file of {task.folder}.")
    for number, line in enumerate(lines, 1):
        if not line or task.header is None and number == 1:
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            raise UserError(
                f"{path} line {number} has {len(fields)} columns instead of {len(header)}; it is not the official file "
                f"of {task.folder}, or it is damaged."
            )
        yield number, dict(zip(header, fields, strict=True))


def _examples(task: GlueFormat, path: Path, rows: Iterable[_Row]) -> Examples:
    found = Examples([], [])
    for number, row in rows:
        if row[task.label] == task.undecided:
            continue
        if row[task.label] not in task.classes:
            raise UserError(
                f"{path} line {number} has the label {row[task.label]!r}; it must be one of {', '.join(task.classes)}."
            )
        found.texts.append(tuple(row[column] for column in task.columns))
        found.labels.append(task.classes.index(row[task.label]))
    return _filled(found, path)


def _filled(examples: Examples, place: object) -> Examples:
    if not examples.labels:
        raise UserError(f"{place} holds no examples; fetch the official files again.")
    return examples


# -- as the hub stores them -----------------------------------------------------------------------------------------


def _from_disk(task: GlueFormat, folder: Path) -> tuple[Examples, Examples] | None:
    if not (folder / "dataset_dict.json").is_file():
        return None
    from datasets import load_from_disk

    try:
        splits = load_from_disk(str(folder))
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a readable datasets folder ({error}); save it again.") from error
    names = ("train", f"validation{task.split}")
    for name in names:
        if name not in splits:
            raise UserError(f"{folder} has no split {name}; it holds {', '.join(splits)}.")
    first, second = (
        _of_columns(task, {c: splits[n][c] for c in splits[n].column_names}, f"{folder}/{n}") for n in names
    )
    return first, second


def _from_parquet(task: GlueFormat, folder: Path) -> tuple[Examples, Examples] | None:
    files = [sorted(folder.glob(f"{name}*.parquet")) for name in ("train", f"validation{task.split}")]
    if not all(files):
        return None
    import pyarrow
    import pyarrow.parquet

    splits = []
    for paths in files:
        try:
            table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in paths])
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{paths[0]} is not a readable parquet file ({error}); fetch it again.") from error
        splits.append(_of_columns(task, table.to_pydict(), paths[0]))
    return splits[0], splits[1]


def _from_hub(task: GlueFormat) -> tuple[Examples, Examples]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    names = ["train", f"validation{task.split}"]
    try:
        splits = load_dataset(HUB, task.name, split=names)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"GLUE's {task.folder} cannot be had from {HUB} on the Hugging Face hub ({reason}); check the network, or "
            "set data.root to a folder with the official files."
        ) from error
    first, second = (
        _of_columns(task, {c: split[c] for c in split.column_names}, f"{HUB} {task.name} {name}")
        for name, split in zip(names, splits, strict=True)
    )
    return first, second


def _of_columns(task: GlueFormat, columns: dict[str, Sequence[Any]], place: object) -> Examples:
    for name in (*task.hub_columns, "label"):
        if name not in columns:
            raise UserError(f"{place} has no column {name!r}; it is not GLUE's {task.folder} as the hub stores it.")
    labels = list(columns["label"])
    for label in labels:
        if isinstance(label, str) or label is None or label not in range(len(task.classes)):
            raise UserError(f"{place} has the label {label!r}; {task.folder} has 0 to {len(task.classes) - 1}.")
    for name in task.hub_columns:
        for row, cell in enumerate(columns[name], 1):
            if not isinstance(cell, str):
                raise UserError(
                    f"{place} holds {cell!r} in row {row} of the column {name!r}, which must be text; leave "
                    "the row out, or write it as text."
                )
    texts = list(zip(*(columns[name] for name in task.hub_columns), strict=True))
    return _filled(Examples(texts, [int(label) for label in labels]), place)
