"""Classes of options: pydantic dataclasses, whose mistakes are one sentence each.

    @checked(group="optim.")
    class OptimConfig:
        lr: Positive = 2e-3

    OptimConfig(lr=0)       UserError: optim.lr must be above 0, not 0.

Types are strict: neither "3" nor true passes for a number, though a whole number may stand for any number.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, replace
from functools import wraps
from os import PathLike, fspath
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from unifmoe_dist.errors import UserError, listed

Count = Annotated[int, Field(ge=1)]
CountOrNull = Annotated[int | None, Field(ge=1)]  # not Count | None, which help would show as it is
Whole = Annotated[int, Field(ge=0)]
WholeOrNull = Annotated[int | None, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
WeightOrNull = Annotated[float | None, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrNull = Annotated[float | None, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
SeedOrNull = Annotated[int | None, Field(ge=0, le=2**32 - 1)]
A_LIST = BeforeValidator(lambda value: list(value) if isinstance(value, tuple) else value)
A_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

Options = TypeVar("Options")

_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_RANGE = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number"}
_WORDS = {int: "a whole number", float: "a number", str: "a text", type(None): "null"}


@dataclass_transform(field_specifiers=(field,))
def checked(*, group: str = "", frozen: bool = False) -> Callable[[type[Options]], type[Options]]:
    """A dataclass whose fields are checked when it is made; `group` stands before their names in messages.

    Its `__init__` takes a path for a text, and raises UserError, with one sentence.
    """

    def decorate(cls: type[Options]) -> type[Options]:
        settings = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        made: Any = dataclass(config=settings, frozen=frozen)(cls)
        check = made.__init__

        @wraps(check)
        def __init__(self: Any, *values: Any, **options: Any) -> None:
            options = {name: fspath(v) if isinstance(v, PathLike) else v for name, v in options.items()}
            try:
                check(self, *values, **options)
            except ValidationError as error:
                raise UserError(_sentence(made, group, values, options, error)) from None

        made.__init__ = __init__
        return made

    return decorate


def checked_again(options: Options) -> Options:
    """A copy that is checked, groups of options in it too, for what was assigned since it was made.

    Raises:
        UserError: a value does not fit.
    """
    groups = {name: checked_again(value) for name, value in vars(options).items() if is_dataclass(value)}
    return replace(options, **groups)  # type: ignore[type-var]


def words_of(kind: Any) -> list[str]:
    """What a value of a type may be, each in words."""
    return list(dict.fromkeys(_values(kind)))


def _values(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from (str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(kind))
    elif get_origin(kind) in (Union, types.UnionType):
        for part in get_args(kind):
            yield from _values(part)
    elif kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) in (list, tuple):
        plural = " or ".join(_values(get_args(kind)[0])).removeprefix("a ") + "s"
        yield f"{len(get_args(kind))} {plural}" if get_origin(kind) is tuple else f"a list of {plural}"
    else:
        yield _WORDS.get(kind, f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}")


def _limits(kind: Any) -> Iterator[str]:
    """The range of a type's numbers, in words, each limit once."""
    for part in get_args(kind):
        for limit in part.metadata if isinstance(part, FieldInfo) else ():
            yield from (f"{word} {getattr(limit, sign)}" for sign, word in _LIMITS.items() if hasattr(limit, sign))
        yield from _limits(part)


def _sentence(cls: Any, group: str, values: Sequence[Any], options: Mapping[str, Any], error: ValidationError) -> str:
    """The first mistake that pydantic found."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # a sentence of the class itself
    names = [field.name for field in fields(cls)]
    in_order = [field.name for field in fields(cls) if not field.kw_only]
    place = first["loc"][0]
    if isinstance(place, int) and place >= len(in_order):
        return f"{cls.__name__} takes at most {len(in_order)} values without a name, not {len(values)}."
    name = in_order[place] if isinstance(place, int) else place
    if name not in names:
        return f"there is no option {group}{name}; choose from {', '.join(names)}."
    if first["type"] == "multiple_argument_values":
        return f"{group}{name} is given twice, by its place and by its name; leave one out."
    given = {**dict(zip(in_order, values, strict=False)), **options}
    if name not in given:
        return f"{group}{name} must be given."
    words = words_of(get_type_hints(cls)[name])
    if first["type"] in _RANGE:
        limits = list(dict.fromkeys(_limits(get_type_hints(cls, include_extras=True)[name])))
        if first["type"] == "finite_number":
            limits = ["finite", *limits]
        words = [" and ".join(limits), *(word for word in words if "number" not in word)]
    return f"{group}{name} must be {listed(words, 'or')}, not {given[name]!r}."
