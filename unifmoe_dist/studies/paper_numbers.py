"""The paper's own numbers, as its tables print them: reports put them beside measurements, estimates rest on them.

A score is `(mean, standard deviation)`; the deviation is None where the paper gives none. A missing entry (-) is one
that the paper leaves out. Means are those of the main tables, deviations those of the appendix.
"""

from __future__ import annotations

Score = tuple[float, float | None]

AVERAGE = "average"
"""Key of a row's mean over data sets."""


def _scores(printed: str) -> dict[str, dict[str, Score]]:
    """Scores by row and column of a table as it is printed, `mean±deviation`."""
    (_, *columns), *rows = (line.split() for line in printed.strip().splitlines())
    return {
        name: {
            column: (float(mean), float(deviation) if deviation else None)
            for column, (mean, _, deviation) in zip(columns, (word.partition("±") for word in words), strict=True)
            if mean != "-"
        }
        for name, *words in rows
    }


def _values(printed: str) -> dict[str, dict[str, float]]:
    """Values by row and column of a table without deviations."""
    return {name: {column: mean for column, (mean, _) in row.items()} for name, row in _scores(printed).items()}


DOMAINBED = _scores("""
    method      pacs      vlcs      officehome  terraincognita  domainnet  average
    dense       86.2±0.1  79.7±0.0  72.2±0.4    42.0±0.8        47.3±0.2   65.5
    gmoe        88.1±0.1  80.2±0.2  74.2±0.4    48.5±0.4        48.7±0.2   67.9
    emoe        87.8±0.2  79.5±0.4  73.1±0.2    45.9±0.3        -          -
    emoe-learn  87.2±0.4  79.6±0.2  72.5±0.2    46.1±0.4        -          -
    lfme        88.7±0.2  79.7±0.1  73.1±0.2    53.4±0.4        47.5±0.0   68.5
    dmda        88.1      79.4      69.4        49.5            45.8       66.4
    pcmoe       89.4      80.0      74.1        49.9            48.5       68.4
    dynmoe      88.4      80.3      73.6        48.9±0.5        48.2       67.9
    mass        88.7      81.1      73.8        47.5            -          -
    unif        89.6±0.1  81.7±0.3  74.2±0.2    52.6±0.3        49.4±0.1   69.5
""")
"""Out-of-domain accuracy (%), tables domainbed-main and appendix-domainbed-std, by method and data set. DynMoE's entry
for TerraIncognita was reproduced by the paper's authors."""

STANDARD_AVERAGE, STANDARD_BEST = "standard-average", "standard-best"
"""Rows over the fixed top-k methods: mean over k, and the best k of each task."""

GLUE = _scores("""
    method            cola        mrpc        qnli        mnli        rte         average
    dense             64.03±0.54  89.36±0.09  92.46±0.09  86.61±0.26  74.37±0.78  81.37
    top1              63.63±0.20  89.81±0.30  92.39±0.21  86.63±0.17  74.01±0.29  81.29
    top2              64.71±1.21  90.18±1.33  92.53±0.07  86.73±0.43  72.32±3.54  81.29
    top4              64.12±1.42  89.74±0.40  92.65±0.09  86.59±0.16  75.33±0.95  81.69
    top8              64.37±1.14  90.35±0.68  92.49±0.11  86.51±0.20  73.53±2.21  81.45
    standard-average  64.21±0.45  90.02±0.29  92.52±0.11  86.62±0.09  73.80±1.24  81.43
    standard-best     64.71±1.21  90.35±0.68  92.65±0.09  86.73±0.43  75.33±0.95  81.95
    dynmoe            65.17±0.26  90.64±0.26  92.59±0.08  86.37±0.13  73.41±1.96  81.64
    mass              65.62±1.25  90.58±0.45  92.62±0.13  86.74±0.07  75.33±1.12  82.19
    unif              66.83±0.19  91.57±0.26  93.10±0.12  86.84±0.07  75.47±0.91  82.76
""")
"""GLUE task scores (%), tables glue-main and appendix-glue-std, by method and task."""

GLUE_COSINE = {f"gmoe-{name}": GLUE[name] for name in ("top1", "top2", "top4", "top8")}
"""The rows of GLUE that the layers with a cosine gate are to be compared with."""

ABLATION: dict[str, dict[str, float]] = {
    "unif-fixed-alpha": {"domainbed": 68.20, "domainbed C_B": 14.17, "glue": 81.73, "glue C_B": 78.33},
    "unif-top2": {"domainbed": 68.90, "domainbed C_B": 13.41, "glue": 82.07, "glue C_B": 66.74},
    "unif-prefix": {"domainbed": 68.80, "domainbed C_B": 13.06, "glue": 81.95, "glue C_B": 60.14},
    "unif": {"domainbed": 69.50, "domainbed C_B": 11.41, "glue": 82.76, "glue C_B": 47.61},
}
"""Table mechanism-ablation: mean accuracy (%) and mean C_B over the data sets of each benchmark."""

COST = _values("""
    statistic  dense  gmoe   emoe   dynmoe  unif
    N          20.66  32.12  20.70  36.45   34.19
    N_A        20.66  23.11  18.81  24.14   21.01
    FLOPs      8.57   10.37  7.92   14.63   8.70
    T-TPS      0.23   1.23   1.19   3.32    1.23
    I-TPS      0.04   0.31   0.30   1.06    0.17
    T-RTM      6.81   8.38   7.15   11.80   8.84
    I-RTM      0.29   0.55   0.39   0.99    0.26
""")
"""Table legacy-cost, on VLCS and one RTX 3090: parameters and activated parameters (2^20), FLOPs per image (2^30),
seconds per training and inference step, and run-time memory of both (GiB)."""

DOMAINBED_SETTINGS: dict[str, tuple[float, float, int]] = {
    "pacs": (3e-5, 1e-6, 5001),
    "vlcs": (3e-5, 1e-6, 5001),
    "officehome": (1e-5, 1e-6, 5001),
    "terraincognita": (5e-5, 1e-4, 5001),
    "domainnet": (5e-5, 0.0, 15001),
}
"""Table appendix-domainbed-hparams: learning rate, weight decay and steps."""
