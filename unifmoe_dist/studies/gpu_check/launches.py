"""What a layer has the device do, and how often its host waits, for few and for many experts."""

from __future__ import annotations

from collections import Counter

import torch

from unifmoe_dist import UniFMoEConfig
from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.layers import some_layer
from unifmoe_dist.studies.gpu_check.record import NOTE, OK, Record

EXPERTS, TINY_EXPERTS = (6, 16, 64, 255), (2, 4)
SIZES, TINY = (384, 1536, 8, 4096), (16, 64, 4, 24)  # d, H, B and N
FORWARD, BACKWARD = 8, 14  # the most launches that a layer should need


def check(record: Record) -> None:
    counts: dict[int, tuple[int, int]] = {}
    for experts in EXPERTS if record.on_card else TINY_EXPERTS:
        with record.attempt(f"K = {experts}"), device.quiet_tiles(), device.kernels():
            forward, backward = _count(record, experts)
            if forward:
                counts[experts] = forward, backward
    if counts:
        forward, backward = (max(count[i] for count in counts.values()) for i in (0, 1))
        fits = forward <= FORWARD and backward <= BACKWARD
        text = f"at most {forward} forward and {backward} backward; goals: {FORWARD} and {BACKWARD}, the same for any K"
        record.find("launches", NOTE, f"{'met' if fits and len(set(counts.values())) == 1 else 'not met'}: {text}")


def _count(record: Record, experts: int) -> tuple[int, int]:
    where, dtype = device.here(), torch.bfloat16 if record.on_card else torch.float32
    dim, hidden, blocks, tokens = SIZES if record.on_card else TINY
    layer = some_layer(UniFMoEConfig(dim, hidden, experts, blocks)).to(where, dtype)
    leaf = torch.randn(tokens, dim).to(where, dtype).requires_grad_()

    def forward() -> torch.Tensor:
        return layer(leaf)

    def both() -> None:
        y = forward()
        y.backward(y.detach())
        layer.zero_grad(set_to_none=True)

    fore, all_of_it = device.launched(forward, where), device.launched(both, where)
    backward = len(all_of_it) - len(fore)
    text = f"{len(fore)} launches forward, {backward} backward" if fore else "the profiler saw no kernels"
    record.find(f"K = {experts}", OK if fore else NOTE, text)
    waits = device.host_waits(both, where)
    if record.on_card:
        text = f"{len(waits)} of the host in a forward and a backward pass {waits[:4] or ''}"
        record.judge(f"K = {experts}: waits", not waits, text)
    cells: dict[str, object] = {"K": experts, "forward": len(fore), "backward": backward}
    cells |= {"waits of the host": len(waits) if record.on_card else "–"}
    record.row("launches", "Launches of a layer on one rank, and waits of its host", cells)
    names = {"forward": Counter(fore), "both": Counter(all_of_it), "waits": waits}
    record.numbers[f"K = {experts}"] = names
    return len(fore), backward
