"""The paper's tables as data: which data sets, held-out environments, methods, seeds and learning rates each needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDS = (0, 1, 2)
"""Three independently seeded runs of everything."""


@dataclass(frozen=True)
class Benchmark:
    """What a data set adds to a sweep.

    Args:
        task: Value of data.task.
        title: Name for readers.
        config: Its base configuration, below configs/.
        environments: Environments that are held out in turn; none for language.
        learning_rates: Peak learning rates to choose from by validation; none keeps the base configuration's.
        method_options: Options that a method has here in place of its own, by method and dotted name.
    """

    task: str
    title: str
    config: str
    environments: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _glue(task: str, title: str, most_dynmoe: int = 16) -> Benchmark:
    # As the authors' GLUE scripts have it (github.com/LINs-lab/DynMoE, github.com/psmiz/MASS).
    dynmoe = {"model.num_experts": 8, "model.max_experts": most_dynmoe, "model.adapt_every": "epoch"}
    mass = {"model.num_experts": 8, "model.max_experts": 16, "model.mass_threshold": 0.5}
    return Benchmark(
        task,
        title,
        f"glue/{task}.yaml",
        learning_rates=(2e-5, 3e-5, 5e-5),
        method_options={"dynmoe": dynmoe, "mass": mass},
    )


def _domainbed(task: str, title: str, *environments: str) -> Benchmark:
    # From six experts to eight, as in the scripts of both: the cost table's 36.45 is DeiT-S's 20.66 and seven more
    # copies of two FFNs of 1.125.
    slots = {"model.num_experts": 6, "model.max_experts": 8}
    return Benchmark(
        task, title, f"domainbed/{task}.yaml", environments, method_options={"dynmoe": slots, "mass": slots}
    )


# EMoE's 24 experts do not divide an FFN 256 wide: 3 of 16, nearly the same share of it.
_DIGITS_EMOE = {"model.num_experts": 16, "model.top_k": 3}


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.task: benchmark
    for benchmark in (
        _domainbed("pacs", "PACS", "Art", "Cartoon", "Photo", "Sketch"),
        _domainbed("vlcs", "VLCS", "Caltech101", "LabelMe", "SUN09", "VOC2007"),
        _domainbed("officehome", "OfficeHome", "Art", "Clipart", "Product", "Real World"),
        _domainbed("terraincognita", "TerraInc.", "L100", "L38", "L43", "L46"),
        _domainbed("domainnet", "DomainNet", "Clipart", "Infograph", "Painting", "Quickdraw", "Real", "Sketch"),
        _glue("cola", "CoLA"),
        _glue("mrpc", "MRPC"),
        _glue("qnli", "QNLI", 10),
        _glue("mnli", "MNLI", 10),
        _glue("rte", "RTE"),
        Benchmark(
            "digits",
            "Digits",
            "digits-comparison.yaml",
            ("rot0", "rot15", "rot30", "rot45", "rot60", "rot75"),
            method_options={"emoe": _DIGITS_EMOE, "emoe-learn": _DIGITS_EMOE},
        ),
        Benchmark("acceptability", "Acceptability", "acceptability.yaml"),
    )
}

DOMAINBED = ("pacs", "vlcs", "officehome", "terraincognita", "domainnet")
GLUE = ("cola", "mrpc", "qnli", "mnli", "rte")


@dataclass(frozen=True)
class PaperTable:
    """Runs that one table or figure of the paper needs: every benchmark with every method, environment and seed.

    Args:
        name: Word on command lines and in file names.
        title: Caption.
        tasks: Benchmarks, by task.
        methods: Methods, by name.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]


_DECISIONS = ("unif-fixed-alpha", "unif-top2", "unif-prefix")
_LAMBDAS = ("unif-lambda-0", "unif-lambda-0.001", "unif-lambda-0.1")
_STANDARD = ("top1", "top2", "top4", "top8")
_COSINE = ("gmoe-top1", "gmoe-top2", "gmoe-top4", "gmoe-top8")
_VISION = ("gmoe", "emoe", "emoe-learn", "lfme", "dmda", "pcmoe", "dynmoe", "mass")

TABLES: dict[str, PaperTable] = {
    table.name: table
    for table in (
        PaperTable("domainbed", "Out-of-domain accuracy (%) on DomainBed", DOMAINBED, ("dense", *_VISION, "unif")),
        PaperTable("glue", "GLUE task scores (%)", GLUE, ("dense", *_STANDARD, "dynmoe", "mass", "unif")),
        PaperTable("glue-cosine", "GLUE task scores (%) of the top-k layers with a cosine gate", GLUE, _COSINE),
        PaperTable("ablation", "Ablating the three adaptive decisions", (*DOMAINBED, *GLUE), (*_DECISIONS, "unif")),
        PaperTable(
            "diversity",
            "Weight of the diversity loss on GLUE",
            GLUE,
            ("unif-lambda-0", "unif-lambda-0.001", "unif", "unif-lambda-0.1"),
        ),
        PaperTable(
            "blocks",
            "Blocks per expert on DomainBed",
            DOMAINBED,
            ("unif-blocks-4", "unif", "unif-blocks-16", "unif-blocks-32"),
        ),
        PaperTable(
            "digits",
            "Every method and ablation on rotated digits",
            ("digits",),
            (
                "dense",
                "top1",
                "top2",
                "top4",
                *_VISION,
                "unif",
                *_DECISIONS,
                *_LAMBDAS,
                "unif-blocks-4",
                "unif-blocks-16",
                "unif-blocks-32",
                "unif-experts-2",
                "unif-experts-4",
                "unif-experts-12",
            ),
        ),
    )
}
"""A study's default value (λ = 0.01, B = 8, K = 6) is the method `unif`, so tables share those runs."""
