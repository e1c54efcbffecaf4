"""Triton kernels as host code launches them, recorded and compiled for a device that is not here.

Uses the compiler and the assembler that come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from unifmoe_dist.errors import UserError

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float64: "fp64",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch that did not happen.

    Args:
        kernel: Triton's function.
        given: Its arguments by name.
        options: Warps and stages, where they were given.
        grid: Programs along three axes.
    """

    kernel: Any
    given: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def warps(self) -> int:
        return self.options.get("num_warps", 4)

    def key(self) -> str:
        """What is alike for launches of the same compiled kernel."""
        signature, constants, _ = self._signature()
        return str((self.name, signature, constants, self.options))

    def _signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.given.get(parameter.name)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32"
        return signature, constants, attributes


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes: registers and bytes of stack of a thread, bytes of shared memory of a program.

    `spilled` are the bytes that a thread moves between registers and stack outside of loops, and in a turn of them.
    """

    registers: int
    stack: int
    shared_memory: int
    spilled: tuple[int, int] = (0, 0)


@contextmanager
def on_device(shared_memory: int) -> Iterator[None]:
    """Tiles are chosen as for a device on which a program may have so many bytes of shared memory."""
    from unifmoe_dist.kernels.triton import tuning

    with patch.object(tuning, "shared_memory", lambda device: shared_memory):
        yield


@contextmanager
def recording(launched: Callable[[Launch], None]) -> Iterator[None]:
    """Triton launches call `launched` in place of running; kernels to be tuned take the first of the tiles to try."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(self.arg_names, args, strict=False)), **named}
        programs = grid(given) if callable(grid) else grid
        options = {name: given.pop(name) for name in _OPTIONS if given.get(name) is not None}
        launched(Launch(self, given, options, tuple(programs)))

    def first_tiles(self: Any, *args: Any, **named: Any) -> None:
        pruned = self.early_config_prune(self.configs, dict(zip(self.arg_names, args, strict=False)), **named)
        self.fn.run(*args, **named, **pruned[0].all_kwargs())

    with patch.object(JITFunction, "run", run), patch.object(Autotuner, "run", first_tiles):
        yield


def recorded(function: Callable[[], None]) -> list[Launch]:
    """The launches of `function`, in order."""
    launches: list[Launch] = []
    with recording(launches.append):
        function()
    return launches


def compiled(launch: Launch, architecture: int) -> Compiled:
    """What the kernel of a launch takes on a device of compute capability `architecture` / 10.

    Raises:
        UserError: the compiler or the assembler does not take it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = launch._signature()
    source = ASTSource(launch.kernel, signature, constants, attributes)
    try:
        binary = triton.compile(source, GPUTarget("cuda", architecture, 32), dict(launch.options))
    except Exception as error:
        raise UserError(f"{launch.name} does not compile for sm_{architecture}: {error}") from error
    cubin = binary.asm["cubin"]
    registers, stack = _resources(cubin)
    return Compiled(registers, stack, binary.metadata.shared, spilled(_dumped(cubin, "-sass")) if stack else (0, 0))


def spilled(assembly: str) -> tuple[int, int]:
    """Bytes that a thread moves between registers and stack: by instructions outside of loops, and by those in loops.

    Loops are what a branch to an earlier address goes back over. Every instruction counts once, those of branches that
    a program does not take included.
    """
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", assembly, re.M)]
    back = [(int(m[1], 16), at) for at, text in lines if (m := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    loops = [(start, end) for start, end in back if start < end]
    moved = [0, 0]
    for at, text in lines:
        if found := re.search(r"\b(?:LDL|STL)(?:\.[A-Z]+\d*)*(?:\.(64|128))?(?=\s)", text):
            moved[any(start <= at <= end for start, end in loops)] += int(found[1] or 32) // 8
    return moved[0], moved[1]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the assembler allotted them."""
    said = _dumped(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise UserError(f"cuobjdump did not say what a kernel takes: {said.strip()[:200]!r}.")
    return int(found[1]), int(found[2])


def _dumped(cubin: bytes, what: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
