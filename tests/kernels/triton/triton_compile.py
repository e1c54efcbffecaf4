"""List and compile what host code launches, for a device that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel with its compile-time choices; shared_memory in bytes."""

    name: str
    choices: str
    shared_memory: int


@contextmanager
def _recording(monkeypatch: pytest.MonkeyPatch, record: Callable) -> Iterator[None]:
    """Every Triton launch calls `record` in place of running, with the first of the tiles that tuning would try."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def first_config(self, *args, **kwargs):
        pruned = self.early_config_prune(self.configs, dict(zip(self.arg_names, args, strict=False)), **kwargs)
        self.fn.run(*args, **kwargs, **pruned[0].all_kwargs())

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(Autotuner, "run", first_config)
        yield


class _Operations(TorchDispatchMode):
    """Notes what torch itself would launch on a device: all but views, allocations and questions about sizes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if not function.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def launches(function: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Triton kernels and torch operations that `function` launches, in order; kernels do not run."""
    names: list[str] = []
    with _recording(monkeypatch, lambda self, *args, **kwargs: names.append(self.__name__)), _Operations(names):
        function()
    return names


@contextmanager
def unassembled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Compilation ends once shared memory is allocated: neither LLVM's optimiser nor the assembler runs.

    That is more than half of the time. What is made is no kernel, so it goes into a `cache` of its own.
    """
    from triton.backends.nvidia import compiler

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setattr(compiler.llvm, "optimize_module", lambda *args, **options: None)
        patch.setattr(
            compiler.CUDABackend, "make_ptx", lambda self, src, metadata, *rest: metadata.update(name="") or ""
        )
        patch.setattr(compiler.CUDABackend, "make_cubin", lambda self, src, metadata, *rest: b"none")
        yield


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

    found = {}

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
        found.setdefault(key, (self, signature, constants, attributes, given))

    with _recording(monkeypatch, record):
        function()
    result = []
    for kernel, signature, constants, attributes, given in found.values():
        options = {name: given[name] for name in ("num_warps", "num_stages") if given.get(name) is not None}
        binary = triton.compile(
            ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", architecture, 32), options
        )
        assert binary.asm["cubin"]
        result.append(Compiled(kernel.__name__, f"{constants} {options}", binary.metadata.shared))
    return result
