"""The paper's methods by name: which options turn a base configuration into each of them.

A method changes options of `TrainConfig`, by dotted name, and nothing else; the base configuration says the rest (data,
backbone, layers, K, B). UniF-MoE's parameter studies are names with a number: unif-lambda-0.1, unif-blocks-16,
unif-experts-12. At the base configuration's own value such a study is the method `unif`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.errors import UserError

Family = Literal["dense", "static", "dynamic", "algorithm", "unif", "ablation", "study"]


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Args:
        name: Word on command lines and in folder names.
        label: Name for readers.
        family: dense; static and dynamic MoE layers; training algorithms on the dense backbone; UniF-MoE, its
            ablations, and studies of one of its parameters.
        options: What it changes in a base configuration, by dotted name.
    """

    name: str
    label: str
    family: Family
    options: Mapping[str, Any]


def _standard(k: int) -> Method:
    return Method(f"top{k}", f"Standard MoE, top-{k}", "static", {"model.moe": "topk", "model.top_k": k})


# EMoE cuts the dense FFN itself into experts, on DomainBed 24 of which 4 are active (github.com/qiuzh20/EMoE). That
# agrees with the paper's cost table: 20/24 of two FFNs of 1.125 * 2^20 parameters less is 20.70 to 18.82.
_EMOE = {"model.num_experts": 24, "model.top_k": 4}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("dense", "Dense", "dense", {"model.moe": "none"}),
        *map(_standard, (1, 2, 4, 8)),
        Method("gmoe", "GMoE", "static", {"model.moe": "gmoe", "model.top_k": 2}),
        Method("emoe", "EMoE", "static", {"model.moe": "emoe", **_EMOE}),
        Method("emoe-learn", "EMoE-L", "static", {"model.moe": "emoe_learn", **_EMOE}),
        Method("lfme", "LFME", "algorithm", {"model.moe": "none", "algorithm.name": "lfme"}),
        Method("dmda", "DMDA", "algorithm", {"model.moe": "none", "algorithm.name": "dmda"}),
        Method("pcmoe", "PC-MoE", "algorithm", {"model.moe": "none", "algorithm.name": "pcmoe"}),
        Method("dynmoe", "DynMoE", "dynamic", {"model.moe": "dynmoe"}),
        Method("mass", "MASS", "dynamic", {"model.moe": "mass"}),
        Method("unif", "UniF-MoE", "unif", {"model.moe": "unif"}),
        Method(
            "unif-fixed-alpha", "UniF-MoE, fixed α = 0.4", "ablation", {"model.moe": "unif", "model.shared_demand": 0.4}
        ),
        Method("unif-top2", "UniF-MoE, top-2 experts", "ablation", {"model.moe": "unif", "model.fixed_experts": 2}),
        Method(
            "unif-prefix", "UniF-MoE, prefix blocks", "ablation", {"model.moe": "unif", "model.block_choice": "prefix"}
        ),
    )
}
"""Methods with a fixed name, in the order of the paper's tables."""


def _cosine(k: int) -> Method:
    return Method(f"gmoe-top{k}", f"Cosine gate, top-{k}", "static", {"model.moe": "gmoe", "model.top_k": k})


VARIANTS: dict[str, Method] = {method.name: method for method in map(_cosine, (1, 2, 4, 8))}
"""Other readings of rows of the paper.

Where the literature has rows of fixed top-k layers on GLUE, they have a cosine gate with noise, renormalised for k > 1,
and importance and load losses (the scripts of github.com/LINs-lab/DynMoE, EMoE/Language/scripts): gmoe-top1 to
gmoe-top8. The methods top1 to top8 are the layer that the paper's own equation describes. The paper does not say which
its GLUE rows "Standard MoE, top-k" are: on GLUE both are to be compared with the row of the same k.
"""


@dataclass(frozen=True)
class Study:
    """A parameter of UniF-MoE that is varied: methods are called unif-NAME-VALUE.

    Args:
        name: Word in the method's name.
        symbol: The paper's symbol.
        option: Dotted option.
        kind: Type of its values.
    """

    name: str
    symbol: str
    option: str
    kind: type[int] | type[float]


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study("lambda", "λ", "optim.lambda_div", float),
        Study("blocks", "B", "model.num_blocks", int),
        Study("experts", "K", "model.num_experts", int),
    )
}
_STUDY_NAME = re.compile(rf"unif-({'|'.join(STUDIES)})-(\d+(?:\.\d+)?(?:e-?\d+)?)")


def find_method(name: str) -> Method:
    """The method of this name.

    Raises:
        UserError: there is none.
    """
    if name in METHODS or name in VARIANTS:
        return METHODS.get(name) or VARIANTS[name]
    match = _STUDY_NAME.fullmatch(name)
    try:
        if match is None:
            raise ValueError
        study = STUDIES[match[1]]
        value = study.kind(match[2])
    except ValueError:
        forms = ", ".join(f"unif-{study}-NUMBER" for study in STUDIES)
        known = ", ".join([*METHODS, *VARIANTS])
        raise UserError(f"method {name!r} is not known; choose from {known}, {forms}.") from None
    return Method(name, f"UniF-MoE, {study.symbol} = {match[2]}", "study", {"model.moe": "unif", study.option: value})


def in_order(names: set[str]) -> list[str]:
    """Names of methods in the tables' order: fixed ones, variants, then studies by parameter and value."""
    fixed = [*METHODS, *VARIANTS]

    def place(name: str) -> tuple[int, str, float]:
        if name in fixed:
            return fixed.index(name), "", 0.0
        kind, _, value = name.removeprefix("unif-").partition("-")
        return len(fixed), kind, float(value)

    return sorted(names, key=place)


def with_options(config: TrainConfig, options: Mapping[str, Any]) -> TrainConfig:
    """A copy of a configuration with options changed by dotted name.

    Raises:
        KeyError: an option does not exist.
    """
    result = config
    for dotted, value in options.items():
        result = _changed(result, dotted.split("."), value)
    return result


def _changed(node: Any, path: list[str], value: Any) -> Any:
    name = path[0]
    if not hasattr(node, name):
        raise KeyError(name)
    return replace(node, **{name: value if len(path) == 1 else _changed(getattr(node, name), path[1:], value)})
