"""The paper's tables as data: which data sets, methods and seeds each needs."""

from __future__ import annotations

from dataclasses import dataclass

SEEDS = (0, 1, 2)
"""Three independently seeded runs of everything."""


DOMAINBED = ("pacs", "vlcs", "officehome", "terraincognita", "domainnet")
GLUE = ("cola", "mrpc", "qnli", "mnli", "rte")


@dataclass(frozen=True)
class PaperTable:
    """Runs that one table or figure of the paper needs: every data set with every method, environment and seed.

    Args:
        name: Word on command lines and in file names.
        title: Caption.
        tasks: Data sets, by name.
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
