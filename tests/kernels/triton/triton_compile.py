"""List and compile what host code launches, for a device that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from unifmoe_dist.studies.kernel_estimates.compiled import compiled, on_device, recorded, recording

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # bytes that a program may have


@dataclass(frozen=True)
class Fitting:
    """One kernel with its compile-time choices; shared_memory and stack in bytes, of a program and of a thread."""

    name: str
    choices: str
    shared_memory: int
    stack: int


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


def launches(function: Callable[[], None]) -> list[str]:
    """Names of the Triton kernels and torch operations that `function` launches, in order; kernels do not run."""
    names: list[str] = []
    with recording(lambda launch: names.append(launch.name)), _Operations(names):
        function()
    return names


@contextmanager
def unassembled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Compilation ends once shared memory is allocated: neither LLVM's optimiser nor the assembler runs.

    That is more than half of the time. What is made is no kernel, so it goes into a `cache` of its own.
    """
    from triton.backends.nvidia import compiler

    from unifmoe_dist.studies.kernel_estimates import compiled

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setattr(compiler.llvm, "optimize_module", lambda *args, **options: None)
        patch.setattr(
            compiler.CUDABackend, "make_ptx", lambda self, src, metadata, *rest: metadata.update(name="") or ""
        )
        patch.setattr(compiler.CUDABackend, "make_cubin", lambda self, src, metadata, *rest: b"none")
        patch.setattr(compiled, "_resources", lambda cubin: (0, 0))
        yield


def compiled_launches(function: Callable[[], None], architecture: int) -> list[Fitting]:
    """Call `function` on CPU tensors with every Triton launch recorded in place of run, then compile each once.

    Of several tiles that tuning would try, the first are compiled.
    """
    with on_device(SHARED_MEMORY[architecture]):
        found = {launch.key(): launch for launch in recorded(function)}
    result = []
    for launch in found.values():
        made = compiled(launch, architecture)
        result.append(Fitting(launch.name, f"{launch.given} {launch.options}", made.shared_memory, made.stack))
    return result
