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
    not computed a second time in 64 bits: at sizes that an interpreter bears, nothing overflows.
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
