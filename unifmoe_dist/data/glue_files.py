"""GLUE's labelled splits from wherever they are: official TSV files, a `datasets` or parquet folder, or the hub.

The official files are tab-separated with no quoting: a `"` is a character like any other, often without a partner, and
only a line feed ends a row. So they are cut at tabs and line feeds, by no CSV reader.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
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
        name, folder: The task, as the hub and as the official archives spell it.
        classes: Labels of the official files in the order of the class numbers (which the hub stores).
        columns, label: Columns of the one or two texts and of the label; on the hub, of texts, `hub_columns`.
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
        return _layout(task, folder)[1](task, folder)
    except OSError as error:
        raise UserError(f"data.root {folder} cannot be read ({error}); check the folder's files.") from error


def check_layout(name: str, root: str | Path) -> str:
    """Which layout of `read_glue` a folder has, in words. Reads no more than the first rows' names and labels.

    Raises:
        UserError: none of them, or its columns or splits are not the task's.
    """
    task = FORMATS[name]
    folder = _task_folder(task, Path(root))
    words, read = _layout(task, folder)
    tables = _tables(task, folder) if read is _from_tables else _msr_tables(folder) if read is _from_msr else ()
    for path in filter(Path.is_file, tables):
        _examples(task, path, islice(_rows(task, path), 100))
    if read is _from_disk:
        for split in _splits(task):
            if not (folder / split / "state.json").is_file():
                raise UserError(f"{folder} has no split {split}; save it again with datasets.save_to_disk.")
    return words


Reader = Callable[[GlueFormat, Path], tuple[Examples, Examples]]


def _layout(task: GlueFormat, folder: Path) -> tuple[str, Reader]:
    """Which layout a folder has, in words, and what reads it."""
    train, test = _msr_tables(folder)
    if all(path.is_file() for path in _tables(task, folder)):
        return "official files", _from_tables
    if task.by_microsoft and train.is_file() and (_dev_ids(folder) or test.is_file()):
        return "official files", _from_msr
    if (folder / "dataset_dict.json").is_file():
        return "a folder of datasets.save_to_disk", _from_disk
    if all(any(folder.glob(f"{split}*.parquet")) for split in _splits(task)):
        return "parquet files", _from_parquet
    raise UserError(
        f"{folder} holds no {task.folder} data; data.root needs train.tsv and dev{task.split}.tsv of the official "
        f"archive, a folder of datasets.save_to_disk, or train*.parquet and validation{task.split}*.parquet."
    )


def _task_folder(task: GlueFormat, root: Path) -> Path:
    if not root.is_dir():
        raise UserError(f"data.root {root} is not a folder; give one with GLUE's files, or null to read the hub.")
    inside = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() == task.name]
    return inside[0] if inside else root


# -- official files -------------------------------------------------------------------------------------------------


def _tables(task: GlueFormat, folder: Path) -> tuple[Path, Path]:
    return folder / "train.tsv", folder / f"dev{task.split}.tsv"


def _msr_tables(folder: Path) -> tuple[Path, Path]:
    return folder / "msr_paraphrase_train.txt", folder / "msr_paraphrase_test.txt"


def _dev_ids(folder: Path) -> Path | None:
    return next((path for path in (folder / "dev_ids.tsv", folder / "mrpc_dev_ids.tsv") if path.is_file()), None)


def _from_tables(task: GlueFormat, folder: Path) -> tuple[Examples, Examples]:
    train, validation = (_examples(task, path, _rows(task, path)) for path in _tables(task, folder))
    return train, validation


def _from_msr(task: GlueFormat, folder: Path) -> tuple[Examples, Examples]:
    """MRPC as Microsoft ships it; GLUE's validation split is the part of its training file that dev_ids.tsv lists."""
    train, test = _msr_tables(folder)
    rows = list(_rows(task, train))
    if listed := _dev_ids(folder):
        held = {tuple(line.split("\t")[:2]) for line in _lines(listed)}
        kept, chosen = (
            [entry for entry in rows if ((entry[1]["#1 ID"], entry[1]["#2 ID"]) in held) == inside]
            for inside in (False, True)
        )
        return _examples(task, train, kept), _examples(task, train, chosen)
    warnings.warn(
        f"{folder} has no dev_ids.tsv, so GLUE's validation split of MRPC is unknown: all of {train.name} trains "
        f"and {test.name} validates; scores do not compare with GLUE's.",
        stacklevel=2,
    )
    return _examples(task, train, rows), _examples(task, test, _rows(task, test))


_Row = tuple[int, dict[str, str]]  # line number, and fields by column


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


def _splits(task: GlueFormat) -> tuple[str, str]:
    return "train", f"validation{task.split}"


def _from_disk(task: GlueFormat, folder: Path) -> tuple[Examples, Examples]:
    from datasets import load_from_disk

    try:
        splits = load_from_disk(str(folder))
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a readable datasets folder ({error}); save it again.") from error
    for name in _splits(task):
        if name not in splits:
            raise UserError(f"{folder} has no split {name}; it holds {', '.join(splits)}.")
    first, second = (_of_columns(task, splits[name].to_dict(), f"{folder}/{name}") for name in _splits(task))
    return first, second


def _from_parquet(task: GlueFormat, folder: Path) -> tuple[Examples, Examples]:
    import pyarrow
    import pyarrow.parquet

    splits = []
    for name in _splits(task):
        paths = sorted(folder.glob(f"{name}*.parquet"))
        try:
            table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in paths])
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{paths[0]} is not a readable parquet file ({error}); fetch it again.") from error
        splits.append(_of_columns(task, table.to_pydict(), paths[0]))
    return splits[0], splits[1]


def _from_hub(task: GlueFormat) -> tuple[Examples, Examples]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        splits = load_dataset(HUB, task.name, split=list(_splits(task)))
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"GLUE's {task.folder} cannot be had from {HUB} on the Hugging Face hub ({reason}); check the network, or "
            "set data.root to a folder with the official files."
        ) from error
    first, second = (
        _of_columns(task, split.to_dict(), f"{HUB} {task.name} {name}")
        for name, split in zip(_splits(task), splits, strict=True)
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
