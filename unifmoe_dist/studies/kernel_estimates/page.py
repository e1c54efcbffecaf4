"""The predictions as a page of tables."""

from __future__ import annotations

from collections.abc import Sequence

import triton

from unifmoe_dist.studies.kernel_estimates.cases import Card, Load
from unifmoe_dist.studies.kernel_estimates.compiled import Launch
from unifmoe_dist.studies.kernel_estimates.estimate import (
    DENSE_RATE,
    LAUNCH,
    TRITON_RATE,
    Line,
    floor_microseconds,
    inference_microseconds,
)

HEAD = f"""# Kernel estimates

**Predictions, not measurements.** Every line says what one kernel of a bfloat16 layer takes of a card after Triton's
compiler and NVIDIA's assembler, and how long it should run in a CUDA graph. Registers, stack (spilled bytes of a
thread) and shared memory are facts of the compiled kernel; operations and bytes are counted on paper; the time is the
longest of products ({DENSE_RATE} of the card's peak, which dense layers reached on an H200, times {TRITON_RATE} for
Triton), bytes across the L2 cache, among which is what threads move to and from the stack, as if the first cache held
none of it and every tile were full, and bytes from memory where they do not fit that cache, plus {LAUNCH} µs a launch.
The floor is the products of the selected blocks at the speed of a dense layer, measured on an H200 for the paper's
plain shapes, by the same rate elsewhere.
`make gpu` measures the same layers. Only Triton's kernels are listed; a forward pass launches one operation of torch
beside them, a backward pass five. Tiles that the workspace does not hold at once, which the overflow launch computes,
are counted in the lines of the others. Tiles are rows x blocks, as many numbers as the kernel has. Compiled by Triton
{triton.__version__}; another version may take other registers.

```bash
python launch/kernel_estimates.py --output docs/kernel_estimates.md     # minutes: it compiles every kernel
```
"""


def section(title: str, load: Load, card: Card, lines: Sequence[Line]) -> str:
    """One card and shape: a table of kernels, and the sums over the floor."""
    rows, sums = [], [0.0, 0.0]
    inference = sum(inference_microseconds(line, load, card) for line in lines if not line.backward)
    for line in lines:
        sums[line.backward] += line.microseconds
        made, tiles = line.made, line.launch.given
        chosen = "x".join(str(tiles[n]) for n in ("TILE_ROWS", "BLOCK_K", "BLOCK_R", "BLOCK_D") if n in tiles)
        name = line.launch.name.strip("_").removesuffix("_kernel") + (" (backward)" if line.backward else "")
        rows.append(
            f"| {name} | {chosen or '-'} | {line.launch.warps} | {made.registers} | {made.stack} "
            f"| {made.shared_memory / 1024:.0f} | {line.programs} | {line.operations / 1e9:.1f} "
            f"| {line.bytes / 1e6:.0f} | {line.microseconds:.0f} | {line.bound} |"
        )
    floor, both = floor_microseconds(load, card), sum(sums)
    sizes = f"N = {load.tokens:,}, D = {load.dim}, H = {load.hidden}, K = {load.experts}, B = {load.blocks}"
    forward = f"Forward **{inference:.0f} µs**, {inference / floor:.2f} times the floor of {floor:.0f}"
    forward += f" ({sums[0]:.0f} in training, which keeps channels)"
    step = f"forward and backward **{both:.0f} µs**, {both / (3 * floor):.2f} times the floor of {3 * floor:.0f}"
    head = "kernel|tile|warps|registers|stack|shared KiB|programs per SM|GFLOP|L2 MB|µs|bound by".split("|")
    held = [_held(line.launch, load) for line in lines if line.launch.name == "ffn_kernel"]
    parts = [
        f"## {card.name}: {title}",
        "",
        f"{sizes}, C_B = {load.per_token}{', gated' if load.gated else ''}. {forward}; {step}. "
        f"The workspace holds {100 * held[0]:.0f} % of the tiles forward and {100 * held[1]:.0f} % backward.",
        "",
        f"| {' | '.join(head)} |",
        f"| --- | --- |{' ---: |' * 8} --- |",
        *rows,
        "",
    ]
    return "\n".join(parts)


def _held(launch: Launch, load: Load) -> float:
    """Share of the tiles that the workspace holds at once."""
    rows = launch.given["TILE_ROWS"]
    return min(1.0, launch.grid[0] * rows / load.tile_rows(launch.given, rows))
