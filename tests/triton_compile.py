"""Compile what host code launches, for a device that is not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One kernel with its compile-time choices; shared_memory in bytes."""

    name: str
    choices: str
    shared_memory: int


def compiled_launches(
    function: Callable[[], None], architecture: int, monkeypatch: pytest.MonkeyPatch
) -> list[Compiled]:
    """Call `function` on CPU tensors with every Triton launch recorded in place of run, then compile each once.

    Of several configurations that tuning would try, the first is compiled. Uses the compiler and assembler that come
    with Triton; no device is needed.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launches = {}

    def record(self, *args, grid, warmup, **kwargs):
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value = given.pop(parameter.name)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32"
        key = str((self.__name__, signature, constants, given))
        launches.setdefault(key, (self, signature, constants, attributes, given))

    def first_config(self, *args, **kwargs):
        pruned = self.early_config_prune(self.configs, dict(zip(self.arg_names, args, strict=False)), **kwargs)
        self.fn.run(*args, **kwargs, **pruned[0].all_kwargs())

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(Autotuner, "run", first_config)
        function()
    result = []
    for kernel, signature, constants, attributes, given in launches.values():
        options = {name: given[name] for name in ("num_warps", "num_stages") if given.get(name) is not None}
        binary = triton.compile(
            ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", architecture, 32), options
        )
        assert binary.asm["cubin"]
        result.append(Compiled(kernel.__name__, f"{constants} {options}", binary.metadata.shared))
    return result
