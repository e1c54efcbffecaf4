"""The registry of methods: what `model.moe` can be, one line each, and their rows in the paper's tables.

A line says where a method's layer is defined, which options it reads and what it is called. It names the layer and does
not import it: options are read and checked without PyTorch, and `config` asks here. How the layer is made of the
options is said in its file, by its `ExpertLayerConfig`.

A row is a method as tables and sweeps have it: `model.moe` with values of its options. UniF-MoE's parameter studies are
rows with a number: unif-lambda-0.1, unif-blocks-16, unif-experts-12. At the base configuration's own value such a study
is the row `unif`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unifmoe_dist.algorithms.registry import PLAIN
from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.errors import UserError

Family = Literal["dense", "static", "algorithm", "dynamic", "unif", "ablation", "combined", "study"]
_ORDER: tuple[Family, ...] = ("dense", "static", "algorithm", "dynamic", "unif", "ablation", "combined")


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        name: Word on command lines and in folder names.
        label: Name for readers.
        family: dense; static and dynamic MoE layers; training algorithms on the dense backbone; UniF-MoE, its
            ablations, UniF-MoE trained by those algorithms, and studies of one of its parameters.
        options: What it changes in a base configuration, by dotted name, and nothing else.
    """

    name: str
    label: str
    family: Family
    options: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, environments: int, language: bool) -> bool:
        """Whether a task with so many environments, of texts or of images, can have its training algorithm."""
        algorithm = ALGORITHMS[self.options.get("algorithm.name", PLAIN.name)]
        return algorithm.plain or (environments > 0 and not (algorithm.features and language))


EVERY_LAYER = ("num_experts", "num_blocks", "hidden_dropout")
"""Options that every layer reads."""


@dataclass(frozen=True)
class Method:
    """What `model.moe` can be.

    Args:
        name: Value of `model.moe`, and of `method` in `upcycle`.
        title: Name for readers, at the start of a sentence.
        layer: "module:class" of its layer, below unifmoe_dist; None leaves the model dense.
        options: Options that its layer reads besides `EVERY_LAYER`: fields of `ModelConfig`, and what a run sets. With
            max_experts among them, experts come and go in training; otherwise there are num_experts all along.
        rows: Its rows in tables, without `model.moe`; None is one row of its own name and title.
        variants: Other readings of rows of the paper, likewise.
        shared: Whether a shared expert comes on top of num_experts, as UniF-MoE has it: layers record what tokens
            share, and optim.lambda_div weighs their auxiliary loss.
        slices: Whether its experts are parts of the dense FFN, not copies of it.
    """

    name: str
    title: str
    layer: str | None
    options: tuple[str, ...] = ()
    rows: tuple[Row, ...] | None = None
    variants: tuple[Row, ...] = ()
    shared: bool = False
    slices: bool = False

    @property
    def word(self) -> str:
        """Its name in names of folders."""
        return self.name if self.layer else "dense"

    @property
    def grows(self) -> bool:
        """Whether experts come and go in training."""
        return "max_experts" in self.options

    def taken(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those options that its layer reads."""
        return {name: options[name] for name in (*EVERY_LAYER, *self.options) if name in options}


# EMoE cuts the dense FFN itself into experts, on DomainBed 24 of which 4 are active (github.com/qiuzh20/EMoE). That
# agrees with the paper's cost table: 20/24 of two FFNs of 1.125 * 2^20 parameters less is 20.70 to 18.82.
_EMOE = {"model.num_experts": 24, "model.top_k": 4}
_EMOE_LEARN = Row("emoe-learn", "EMoE-L", "static", _EMOE)
_GMOE = Row("gmoe", "GMoE", "static", {"model.top_k": 2})

# Where the literature has rows of fixed top-k layers on GLUE, they have a cosine gate with noise, renormalised for
# k > 1, and importance and load losses (the scripts of github.com/LINs-lab/DynMoE, EMoE/Language/scripts): gmoe-top1 to
# gmoe-top8. Rows top1 to top8 are the layer that the paper's own equation describes. The paper does not say which its
# GLUE rows "Standard MoE, top-k" are: on GLUE both are to be compared with the row of the same k.
_STANDARD = tuple(Row(f"top{k}", f"Standard MoE, top-{k}", "static", {"model.top_k": k}) for k in (1, 2, 4, 8))
_COSINE = tuple(Row(f"gmoe-top{k}", f"Cosine gate, top-{k}", "static", {"model.top_k": k}) for k in (1, 2, 4, 8))

_ABLATIONS = (
    Row("unif", "UniF-MoE", "unif"),
    Row("unif-fixed-alpha", "UniF-MoE, fixed α = 0.4", "ablation", {"model.shared_demand": 0.4}),
    Row("unif-top2", "UniF-MoE, top-2 experts", "ablation", {"model.fixed_experts": 2}),
    Row("unif-prefix", "UniF-MoE, prefix blocks", "ablation", {"model.block_choice": "prefix"}),
)
_COMBINED = tuple(
    Row(f"unif-{name}", f"UniF-MoE with {ALGORITHMS[name].title}", "combined", {"algorithm.name": name})
    for name in ("lfme", "dmda")
)
_WIDE = Row("dense-wide", "Dense, FFNs 1.5 times as wide", "dense", {"model.num_experts": 3})
_UNIF = ("capacity_factor", "shared_demand", "fixed_experts", "block_choice")
_NOISY = ("top_k", "load_loss")
_DYNMOE = ("max_experts", "adapt_every", "gate_temperature")
_MASS = ("max_experts", "mass_threshold", "expansion_steps", "mass_window", "mass_warmup", "mass_untried")

REGISTRY: dict[str, Method] = {
    method.name: method
    for method in (
        Method("unif", "UniF-MoE", "layer:UniFMoELayer", _UNIF, (*_ABLATIONS, *_COMBINED), shared=True),
        Method("none", "The dense model", None, rows=(Row("dense", "Dense", "dense"),)),
        Method("wide", "The wider dense model", "methods.wide:WideLayer", rows=(_WIDE,), slices=True),
        Method("topk", "The top-k MoE", "methods.topk:TopKLayer", ("top_k",), _STANDARD),
        Method("gmoe", "GMoE", "methods.gmoe:GMoELayer", _NOISY, (_GMOE,), _COSINE),
        Method("emoe", "EMoE", "methods.emoe:EMoELayer", _NOISY, (Row("emoe", "EMoE", "static", _EMOE),), slices=True),
        Method("emoe_learn", "EMoE-L", "methods.emoe:EMoELearnLayer", _NOISY, (_EMOE_LEARN,), slices=True),
        Method("dynmoe", "DynMoE", "methods.dynmoe:DynMoELayer", _DYNMOE),
        Method("mass", "MASS", "methods.mass:MASSLayer", _MASS),
    )
}
"""Methods, in the order of `model.moe`'s help."""

UNIF = REGISTRY["unif"]
"""The method of this package: what `upcycle` puts in when it is not told another."""


def method_of(name: str) -> Method:
    """The method whose `model.moe` this is.

    Raises:
        UserError: there is none.
    """
    if name not in REGISTRY:
        layers = ", ".join(method.name for method in REGISTRY.values() if method.layer)
        raise UserError(f"MoE method {name!r} is not known; choose one of {layers}.")
    return REGISTRY[name]


def _rows_of_methods() -> Iterator[Row]:
    for method in REGISTRY.values():
        own = (Row(method.name, method.title, "dynamic" if method.grows else "static"),)
        yield from _with_moe(method, own if method.rows is None else method.rows)
    for algorithm in ALGORITHMS.values():
        if not algorithm.plain:
            options = {"model.moe": "none", "algorithm.name": algorithm.name}
            yield Row(algorithm.name, algorithm.title, "algorithm", options)


def _with_moe(method: Method, rows: Iterable[Row]) -> Iterator[Row]:
    return (replace(row, options={"model.moe": method.name, **row.options}) for row in rows)


METHODS: dict[str, Row] = {row.name: row for row in sorted(_rows_of_methods(), key=lambda r: _ORDER.index(r.family))}
"""Rows with a fixed name, in the order of the paper's tables."""

VARIANTS: dict[str, Row] = {row.name: row for method in REGISTRY.values() for row in _with_moe(method, method.variants)}
"""Other readings of rows of the paper."""


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


def find_method(name: str) -> Row:
    """The row of this name.

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
    return Row(name, f"UniF-MoE, {study.symbol} = {match[2]}", "study", {"model.moe": UNIF.name, study.option: value})


def in_order(names: set[str]) -> list[str]:
    """Names of methods in the tables' order: fixed ones, variants, then studies by parameter and value."""
    fixed = [*METHODS, *VARIANTS]

    def place(name: str) -> tuple[int, str, float]:
        if name in fixed:
            return fixed.index(name), "", 0.0
        kind, _, value = name.removeprefix("unif-").partition("-")
        return len(fixed), kind, float(value)

    return sorted(names, key=place)
