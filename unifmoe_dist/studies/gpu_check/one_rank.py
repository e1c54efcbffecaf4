"""Expert parallelism over a world of one: the whole path between ranks, through NCCL (gloo without a card)."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from unifmoe_dist import UniFMoEConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.leaving import note_joined
from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.layers import DTYPES, SIZES, TINY, differences, passes, some_layer
from unifmoe_dist.studies.gpu_check.record import NOTE, LeftOut, Record

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-4}  # both paths round alike, but sum in another order


def check(record: Record) -> None:
    backend = "nccl" if record.on_card else "gloo"
    with record.attempt(f"{backend}, world of one"):
        if record.on_card:
            torch.cuda.set_device(0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        note_joined()
        _collectives(record, backend)
    if not dist.is_initialized():
        return
    d, h, k, b, n = SIZES["vision"] if record.on_card else TINY
    config = UniFMoEConfig(d, h, k, b)
    for dispatcher in ("alltoall", "tutel"):
        for kind in TOLERANCE if record.on_card else ("fp32",):  # the interpreter is slow
            with record.attempt(f"{dispatcher}, {kind}"), device.quiet_tiles(), device.kernels():
                _compare(record, dispatcher, kind, config, n)


def _collectives(record: Record, backend: str) -> None:
    given = torch.arange(6.0, device=device.here())
    summed, crossed = given.clone(), torch.empty_like(given)
    dist.all_reduce(summed)
    dist.all_to_all_single(crossed, given, [6], [6])
    right = torch.equal(summed, given) and torch.equal(crossed, given)
    record.judge(f"{backend}, world of one", right, "all_reduce and all_to_all_single give what went in")


def _compare(record: Record, dispatcher: str, kind: str, config: UniFMoEConfig, tokens: int) -> None:
    where, dtype = device.here(), DTYPES[kind]
    local = some_layer(config).to(where, dtype)
    try:
        spread = some_layer(config, expert_group=dist.group.WORLD, dispatcher=dispatcher).to(where, dtype)
    except UserError as error:  # its library is missing
        raise LeftOut(str(error)) from error
    spread.load_state_dict(copy.deepcopy(local.state_dict()))
    x = torch.randn(tokens, config.model_dim).to(where, dtype)
    errors = differences(passes(spread, x), passes(local, x))
    worst = max(errors, key=lambda value: errors[value])
    good = all(error <= TOLERANCE[kind] for error in errors.values())  # NaN is bad
    waits = device.host_waits(lambda: spread(x), where)
    if record.on_card and dispatcher == "alltoall":
        text = (
            f"{len(waits)} of the host in a forward pass, goal 1 {'met' if len(waits) <= 1 else 'not met'} {waits[:4]}"
        )
        record.find(f"{dispatcher}, {kind}: waits", NOTE, text)
    cells = {"dispatcher": dispatcher, "type": kind, "output": f"{errors['output']:.1e}"}
    cells |= {"worst": f"{errors[worst]:.1e}", "of": worst, "allowed": f"{TOLERANCE[kind]:.0e}"}
    cells["waits of the host, forward"] = str(len(waits)) if record.on_card else "–"
    record.row("one-rank", "A world of one against one device: largest errors over the largest value", cells)
    record.numbers[f"{dispatcher}, {kind}"] = errors
    record.judge(f"{dispatcher}, {kind}", good, f"outputs and gradients within {errors[worst]:.1e} ({worst})")
