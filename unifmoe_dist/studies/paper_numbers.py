"""The paper's own numbers, as its tables print them: reports put them beside measurements, estimates rest on them.

A score is `(mean, standard deviation)`; the deviation is None where the paper gives none. A missing entry is one that
the paper leaves out. Means are those of the main tables, deviations those of the appendix.
"""

from __future__ import annotations

Score = tuple[float, float | None]

AVERAGE = "average"
"""Key of a row's mean over data sets."""

DOMAINBED: dict[str, dict[str, Score]] = {
    "dense": {
        "pacs": (86.2, 0.1),
        "vlcs": (79.7, 0.0),
        "officehome": (72.2, 0.4),
        "terraincognita": (42.0, 0.8),
        "domainnet": (47.3, 0.2),
        AVERAGE: (65.5, None),
    },
    "gmoe": {
        "pacs": (88.1, 0.1),
        "vlcs": (80.2, 0.2),
        "officehome": (74.2, 0.4),
        "terraincognita": (48.5, 0.4),
        "domainnet": (48.7, 0.2),
        AVERAGE: (67.9, None),
    },
    "emoe": {"pacs": (87.8, 0.2), "vlcs": (79.5, 0.4), "officehome": (73.1, 0.2), "terraincognita": (45.9, 0.3)},
    "emoe-learn": {"pacs": (87.2, 0.4), "vlcs": (79.6, 0.2), "officehome": (72.5, 0.2), "terraincognita": (46.1, 0.4)},
    "lfme": {
        "pacs": (88.7, 0.2),
        "vlcs": (79.7, 0.1),
        "officehome": (73.1, 0.2),
        "terraincognita": (53.4, 0.4),
        "domainnet": (47.5, 0.0),
        AVERAGE: (68.5, None),
    },
    "dmda": {
        "pacs": (88.1, None),
        "vlcs": (79.4, None),
        "officehome": (69.4, None),
        "terraincognita": (49.5, None),
        "domainnet": (45.8, None),
        AVERAGE: (66.4, None),
    },
    "pcmoe": {
        "pacs": (89.4, None),
        "vlcs": (80.0, None),
        "officehome": (74.1, None),
        "terraincognita": (49.9, None),
        "domainnet": (48.5, None),
        AVERAGE: (68.4, None),
    },
    "dynmoe": {
        "pacs": (88.4, None),
        "vlcs": (80.3, None),
        "officehome": (73.6, None),
        "terraincognita": (48.9, 0.5),
        "domainnet": (48.2, None),
        AVERAGE: (67.9, None),
    },
    "mass": {"pacs": (88.7, None), "vlcs": (81.1, None), "officehome": (73.8, None), "terraincognita": (47.5, None)},
    "unif": {
        "pacs": (89.6, 0.1),
        "vlcs": (81.7, 0.3),
        "officehome": (74.2, 0.2),
        "terraincognita": (52.6, 0.3),
        "domainnet": (49.4, 0.1),
        AVERAGE: (69.5, None),
    },
}
"""Out-of-domain accuracy (%), tables domainbed-main and appendix-domainbed-std, by method and data set. DynMoE's entry
for TerraIncognita was reproduced by the paper's authors."""

STANDARD_AVERAGE, STANDARD_BEST = "standard-average", "standard-best"
"""Rows over the fixed top-k methods: mean over k, and the best k of each task."""

GLUE: dict[str, dict[str, Score]] = {
    "dense": {
        "cola": (64.03, 0.54),
        "mrpc": (89.36, 0.09),
        "qnli": (92.46, 0.09),
        "mnli": (86.61, 0.26),
        "rte": (74.37, 0.78),
        AVERAGE: (81.37, None),
    },
    "top1": {
        "cola": (63.63, 0.20),
        "mrpc": (89.81, 0.30),
        "qnli": (92.39, 0.21),
        "mnli": (86.63, 0.17),
        "rte": (74.01, 0.29),
        AVERAGE: (81.29, None),
    },
    "top2": {
        "cola": (64.71, 1.21),
        "mrpc": (90.18, 1.33),
        "qnli": (92.53, 0.07),
        "mnli": (86.73, 0.43),
        "rte": (72.32, 3.54),
        AVERAGE: (81.29, None),
    },
    "top4": {
        "cola": (64.12, 1.42),
        "mrpc": (89.74, 0.40),
        "qnli": (92.65, 0.09),
        "mnli": (86.59, 0.16),
        "rte": (75.33, 0.95),
        AVERAGE: (81.69, None),
    },
    "top8": {
        "cola": (64.37, 1.14),
        "mrpc": (90.35, 0.68),
        "qnli": (92.49, 0.11),
        "mnli": (86.51, 0.20),
        "rte": (73.53, 2.21),
        AVERAGE: (81.45, None),
    },
    STANDARD_AVERAGE: {
        "cola": (64.21, 0.45),
        "mrpc": (90.02, 0.29),
        "qnli": (92.52, 0.11),
        "mnli": (86.62, 0.09),
        "rte": (73.80, 1.24),
        AVERAGE: (81.43, None),
    },
    STANDARD_BEST: {
        "cola": (64.71, 1.21),
        "mrpc": (90.35, 0.68),
        "qnli": (92.65, 0.09),
        "mnli": (86.73, 0.43),
        "rte": (75.33, 0.95),
        AVERAGE: (81.95, None),
    },
    "dynmoe": {
        "cola": (65.17, 0.26),
        "mrpc": (90.64, 0.26),
        "qnli": (92.59, 0.08),
        "mnli": (86.37, 0.13),
        "rte": (73.41, 1.96),
        AVERAGE: (81.64, None),
    },
    "mass": {
        "cola": (65.62, 1.25),
        "mrpc": (90.58, 0.45),
        "qnli": (92.62, 0.13),
        "mnli": (86.74, 0.07),
        "rte": (75.33, 1.12),
        AVERAGE: (82.19, None),
    },
    "unif": {
        "cola": (66.83, 0.19),
        "mrpc": (91.57, 0.26),
        "qnli": (93.10, 0.12),
        "mnli": (86.84, 0.07),
        "rte": (75.47, 0.91),
        AVERAGE: (82.76, None),
    },
}
"""GLUE task scores (%), tables glue-main and appendix-glue-std, by method and task."""

GLUE_COSINE = {f"gmoe-{name}": GLUE[name] for name in ("top1", "top2", "top4", "top8")}
"""The rows of GLUE that the layers with a cosine gate are to be compared with (methods/registry.py, VARIANTS)."""

ABLATION: dict[str, dict[str, float]] = {
    "unif-fixed-alpha": {"domainbed": 68.20, "domainbed C_B": 14.17, "glue": 81.73, "glue C_B": 78.33},
    "unif-top2": {"domainbed": 68.90, "domainbed C_B": 13.41, "glue": 82.07, "glue C_B": 66.74},
    "unif-prefix": {"domainbed": 68.80, "domainbed C_B": 13.06, "glue": 81.95, "glue C_B": 60.14},
    "unif": {"domainbed": 69.50, "domainbed C_B": 11.41, "glue": 82.76, "glue C_B": 47.61},
}
"""Table mechanism-ablation: mean accuracy (%) and mean C_B over the data sets of each benchmark."""

COST: dict[str, dict[str, float]] = {
    "N": {"dense": 20.66, "gmoe": 32.12, "emoe": 20.70, "dynmoe": 36.45, "unif": 34.19},
    "N_A": {"dense": 20.66, "gmoe": 23.11, "emoe": 18.81, "dynmoe": 24.14, "unif": 21.01},
    "FLOPs": {"dense": 8.57, "gmoe": 10.37, "emoe": 7.92, "dynmoe": 14.63, "unif": 8.70},
    "T-TPS": {"dense": 0.23, "gmoe": 1.23, "emoe": 1.19, "dynmoe": 3.32, "unif": 1.23},
    "I-TPS": {"dense": 0.04, "gmoe": 0.31, "emoe": 0.30, "dynmoe": 1.06, "unif": 0.17},
    "T-RTM": {"dense": 6.81, "gmoe": 8.38, "emoe": 7.15, "dynmoe": 11.80, "unif": 8.84},
    "I-RTM": {"dense": 0.29, "gmoe": 0.55, "emoe": 0.39, "dynmoe": 0.99, "unif": 0.26},
}
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
