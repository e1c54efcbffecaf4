"""A small RTE in GLUE's official layout."""

from __future__ import annotations

from pathlib import Path

import torch

from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.runtime.ranks import Ranks


def write_rte(folder: Path, train: int = 10, dev: int = 5) -> None:
    """Write train.tsv and dev.tsv; odd rows are entailments, and half a pair of quotes is part of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", train), ("dev", dev)):
        labels = ["entailment" if i % 2 else "not_entailment" for i in range(size)]
        rows = [f'{i}\tYes {i}.\tNo "{i}.\t{label}' for i, label in enumerate(labels)]
        (folder / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")


TINY_ENCODER = Encoder(TINY, "none")
ALONE = Ranks(0, 1, torch.device("cpu"))


def write(path: Path, *lines: str, end: str = "\n", start: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((start + "".join(line + end for line in lines)).encode())


# -- files ----------------------------------------------------------------------------------------------------------

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2\tlabel1"
)


def mnli(label: str, first: str, second: str, *votes: str) -> str:
    return "\t".join(
        ["0", "31193", "31193n", "government", "( a )", "( b )", "(ROOT a)", "(ROOT b)", first, second, *votes, label]
    )


def write_official(root: Path) -> None:
    """Every task in the layout of GLUE's archives, with what trips CSV readers."""
    write(
        root / "CoLA/train.tsv",
        'gj04\t1\t\t"They drank the pub.',
        'gj04\t0\t*\tThey drank the pub dry" .',
        "ks08\t1\t\tNA",
    )
    write(root / "CoLA/dev.tsv", "gj04\t1\t\tThe sailors rode the breeze\x85 clear.", "", "rhl07\t0\t*\t'\"'")
    write(
        root / "MRPC/train.tsv",
        MRPC_HEADER,
        '1\t702876\t702977\tHe said "so.\tHe said it.',
        '0\t1\t2\tYes\u2028no\tNo" .',
        end="\r\n",
        start="\ufeff",
    )
    write(root / "MRPC/dev.tsv", MRPC_HEADER, "1\t3\t4\ta\tb", start="\ufeff")
    header = "index\tquestion\tsentence\tlabel"
    write(root / "QNLI/train.tsv", header, '0\tWho said "go?\tHe said go.\tentailment', '1\tWho?\t"\tnot_entailment')
    write(root / "QNLI/dev.tsv", header, "0\tWho ran?\tNobody.\tnot_entailment")
    write(
        root / "MNLI/train.tsv",
        f"{MNLI_HEADER}\tgold_label",
        mnli("neutral", 'He "did', "He did", "neutral"),
        mnli("-", "x", "y", "neutral"),
        mnli("contradiction", "a", "b", "neutral"),
    )
    votes = ["neutral"] * 5
    write(
        root / "MNLI/dev_matched.tsv",
        f"{MNLI_HEADER}\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
        mnli("entailment", "The new", "rights", *votes),
        mnli("-", "no", "consensus", *votes),
    )
    write(root / "MNLI/dev_mismatched.tsv", "not to be read")
    header = "index\tsentence1\tsentence2\tlabel"
    write(
        root / "RTE/train.tsv", header, "0\tNo weapons.\tWeapons.\tnot_entailment", '1\tA place.\tA "place.\tentailment'
    )
    write(root / "RTE/dev.tsv", header, "0\tDana.\tChristopher.\tnot_entailment")


OFFICIAL = {
    "cola": (
        [('"They drank the pub.', 1), ('They drank the pub dry" .', 0), ("NA", 1)],
        [("The sailors rode the breeze\x85 clear.", 1), ("'\"'", 0)],
    ),
    "mrpc": ([('He said "so.', "He said it.", 1), ("Yes\u2028no", 'No" .', 0)], [("a", "b", 1)]),
    "qnli": ([('Who said "go?', "He said go.", 0), ("Who?", '"', 1)], [("Who ran?", "Nobody.", 1)]),
    "mnli": ([('He "did', "He did", 1), ("a", "b", 2)], [("The new", "rights", 0)]),
    "rte": ([("No weapons.", "Weapons.", 1), ("A place.", 'A "place.', 0)], [("Dana.", "Christopher.", 1)]),
}
