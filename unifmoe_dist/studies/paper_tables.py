"""The paper's tables as data, and this project's own: which data sets, methods and seeds each needs."""

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
        pairs: Methods to compare run by run, each with the one that it is compared with.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()


_DECISIONS = ("unif-fixed-alpha", "unif-top2", "unif-prefix")
_VISION = ("gmoe", "emoe", "emoe-learn", "lfme", "dmda", "pcmoe", "dynmoe", "mass")
_STANDARD = ("top1", "top2", "top4", "top8")
_COSINE = tuple(f"gmoe-{name}" for name in _STANDARD)
_LAMBDAS = ("unif-lambda-0", "unif-lambda-0.001", "unif", "unif-lambda-0.1")
_BLOCKS = ("unif-blocks-4", "unif", "unif-blocks-16", "unif-blocks-32")
_EXPERTS = ("unif-experts-2", "unif-experts-4", "unif-experts-12")
_DIGITS = ("dense", *_STANDARD[:3], *_VISION, "unif", *_DECISIONS, *_LAMBDAS, *_BLOCKS, *_EXPERTS)
EVIDENCE = ("digit-sources", "acceptability", "emoji", "genres")
"""Tasks with a shift that is real, or with pretrained weights, that need no hub."""
_OTHERS = ("dense-wide", "top1", "top2", "gmoe", "emoe", "dynmoe", "mass")
_TRAINED_OTHERWISE = ("lfme", "dmda", "unif-lfme", "unif-dmda")
_EVIDENCE = (*_OTHERS, "unif", *_DECISIONS, *_TRAINED_OTHERWISE)
_PAIRS = (
    *((method, "dense") for method in _EVIDENCE),
    *(("unif", method) for method in (*_OTHERS, *_DECISIONS)),
    *((f"unif-{method}", method) for method in _TRAINED_OTHERWISE[:2]),
)

TABLES: dict[str, PaperTable] = {
    table.name: table
    for table in (
        PaperTable("domainbed", "Out-of-domain accuracy (%) on DomainBed", DOMAINBED, ("dense", *_VISION, "unif")),
        PaperTable("glue", "GLUE task scores (%)", GLUE, ("dense", *_STANDARD, "dynmoe", "mass", "unif")),
        PaperTable("glue-cosine", "GLUE task scores (%) of the top-k layers with a cosine gate", GLUE, _COSINE),
        PaperTable("ablation", "Ablating the three adaptive decisions", (*DOMAINBED, *GLUE), (*_DECISIONS, "unif")),
        PaperTable("diversity", "Weight of the diversity loss on GLUE", GLUE, _LAMBDAS),
        PaperTable("coactivation", "Without and with the Gram loss", ("pacs",), ("unif-lambda-0", "unif")),
        PaperTable("blocks", "Blocks per expert on DomainBed", DOMAINBED, _BLOCKS),
        PaperTable("digits", "Every method and ablation on rotated digits", ("digits",), tuple(dict.fromkeys(_DIGITS))),
        PaperTable("evidence", "Held-out scores, paired", EVIDENCE, ("dense", *_EVIDENCE), _PAIRS),
    )
}
"""A study's default value (λ = 0.01, B = 8, K = 6) is the method `unif`, so tables share those runs."""
