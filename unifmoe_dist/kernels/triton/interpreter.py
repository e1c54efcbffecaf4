"""Triton's interpreter made quicker, where it runs kernels on a machine without a card."""

# The interpreter's functions have no types.
# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np


def quicken() -> None:
    """Have the interpreter prepare its language once for each module, and not for every call of every function in it.

    What it puts in place stays anyway, but for a kernel's own module: nobody takes the rest back. Sums of integers are
    not computed a second time in 64 bits: at sizes that an interpreter bears, nothing overflows. Types, of which every
    operation made several, are made once each.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_get_np_dtype", "_patch_lang", "_LangPatchScope")):
        return  # another Triton: only slower
    prepare, prepared = interpreter._patch_lang, set()

    def prepare_once(function):
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return interpreter._LangPatchScope()  # with nothing to take back

    interpreter._patch_lang = prepare_once
    numbers = functools.cache(interpreter._get_np_dtype)  # it made its table for every operation

    def numpy_type(kind):
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else numbers(kind.scalar)

    interpreter._get_np_dtype = numpy_type
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    from triton.language import core

    _share_block_types(core.block_type)
    _share_what_types_say(core.tensor)
    _know_constants_by_their_type(core)


def _share_block_types(block_type) -> None:
    """One object for each type of block: they do not change, and making one took a tenth of a millisecond."""
    made, initialise = {}, block_type.__init__

    def new(cls, element_ty=None, shape=()):
        if element_ty is None:  # a copy, which is filled in afterwards
            return object.__new__(cls)
        sizes = tuple(getattr(size, "value", size) for size in shape)
        space = getattr(element_ty, "address_space", None)
        key = cls, type(element_ty), getattr(element_ty, "name", None), space, sizes
        if key not in made:
            made[key] = object.__new__(cls)
        return made[key]

    def initialise_once(self, element_ty, shape):
        if vars(self):
            return
        try:
            initialise(self, element_ty, shape)
        except Exception:
            vars(self).clear()  # refused again the next time
            raise

    block_type.__new__, block_type.__init__ = new, initialise_once


def _share_what_types_say(tensor) -> None:
    """A tensor is its values and what its type says of it, which is worked out for the first one of the type."""
    initialise = tensor.__init__

    def initialise_by_type(self, handle, kind):
        if "of_tensors" not in vars(kind):
            initialise(self, handle, kind)
            kind.of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
        vars(self).update(kind.of_tensors, handle=handle)

    tensor.__init__ = initialise_by_type


def _know_constants_by_their_type(core) -> None:
    """What holds no `constexpr` is known as it is by its type alone, and a type equals itself."""
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    bare = frozenset({int, bool, float, type(None), core.dtype, core.block_type, core.pointer_type})
    core._unwrap_if_constexpr = lambda value: value if type(value) in bare else unwrap(value)
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
