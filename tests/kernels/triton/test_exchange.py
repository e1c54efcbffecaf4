"""The exchange's kernels: that they compile for real devices, how many launches they take, and that nothing waits."""

from __future__ import annotations

import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.kernels.triton.triton_compile import compiled_launches, launches
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.dispatch import alltoall
from unifmoe_dist.kernels import use_kernels

triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from tests.kernels.triton.exchange_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu

WORLD = 2


def exchange_step(monkeypatch, tokens, experts, blocks, dim, dtype):
    """A dispatcher's forward and backward pass in Triton for a rank that is told what it announces; nothing travels.

    The launches are to be recorded, and fill nothing in, so the counts are given: `tokens` rows to each of two ranks.
    """
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(alltoall, "start_runs", lambda *_: done)
    monkeypatch.setattr(
        alltoall, "dist", SimpleNamespace(all_to_all_single=lambda *_, **__: done, get_world_size=lambda _: WORLD)
    )
    monkeypatch.setattr(alltoall, "on_host", lambda table: [[[tokens, tokens, 1, 1]] * WORLD] * 2)
    x = torch.randn(tokens, dim).to(dtype).requires_grad_()
    gates = torch.rand(tokens, 1 + WORLD * experts)[:, 1:].requires_grad_()
    mask, outputs = torch.ones(tokens, blocks, dtype=torch.bool), []
    dispatcher = alltoall.AllToAllDispatcher(None)

    def forward():
        with use_kernels("triton"):
            exchange = dispatcher.dispatch(x, gates, mask)
        arrived = exchange.arrivals()
        exchange.send_home(arrived.x)
        outputs.extend([exchange.total(), arrived.gates])

    def backward():
        torch.autograd.backward(outputs, [t.detach() for t in outputs])

    return forward, backward


def test_launches(monkeypatch):
    """Beside these there are three collectives and the copy of the counts forward, and two collectives backward."""
    forward, backward = exchange_step(monkeypatch, 300, 3, 8, 64, torch.bfloat16)
    assert launches(forward) == ["count_kernel", "scan_kernel", "pack_kernel", "unpack_kernel", "sum_kernel"]
    assert launches(backward) == ["spread_kernel", "pack_gradients_kernel", "sum_kernel"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "architecture,experts,blocks,dim,dtype",
    [(90, 3, 8, 384, torch.bfloat16), (86, 1, 9, 100, torch.float16), (90, 64, 16, 1024, torch.float32)],
)
def test_kernels_compile(architecture, experts, blocks, dim, dtype, monkeypatch):
    forward, backward = exchange_step(monkeypatch, 300, experts, blocks, dim, dtype)

    def both():
        forward()
        backward()

    kernels = compiled_launches(both, architecture)
    assert sorted(k.name for k in kernels) == [
        "count_kernel",
        "pack_gradients_kernel",
        "pack_kernel",
        "scan_kernel",
        "spread_kernel",
        "sum_kernel",
        "sum_kernel",
        "unpack_kernel",
    ]
    assert all(kernel.shared_memory <= 48 * 1024 for kernel in kernels)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_rows_move_by_16_bytes(monkeypatch):
    """The compiler sees that runs start where wide loads and stores may."""
    compiled, narrow = triton.compile, {}

    def noting(source, *args):
        made = compiled(source, *args)
        narrow[source.fn.__name__] = re.findall(r"(?:ld|st)\.global\.b16", made.asm["ptx"])
        return made

    forward, _ = exchange_step(monkeypatch, 300, 3, 8, 384, torch.bfloat16)
    monkeypatch.setattr(triton, "compile", noting)
    compiled_launches(forward, 90)
    assert not narrow["pack_kernel"] and not narrow["unpack_kernel"] and not narrow["sum_kernel"]


@pytest.mark.gpu
def test_one_rank_of_nccl_waits_for_the_counts_alone(tmp_path):
    """torch raises where the host waits for the device; it waits for the counts' copy by an event, which is allowed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        config = UniFMoEConfig(64, 256, 4, 4)
        layer = UniFMoELayer(config, expert_group=dist.group.WORLD, dispatcher="alltoall").cuda()
        whole = UniFMoELayer(config).cuda()
        whole.load_state_dict(
            {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in layer.state_dict().items()}
        )
        x, mask = torch.randn(300, 64, device="cuda"), torch.rand(300, device="cuda") > 0.3
        results = []
        for module in (layer, layer, whole):  # the first pass compiles, tries and allocates
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            if len(results) == 1:
                torch.cuda.set_sync_debug_mode("error")
            y = module(leaf, mask)
            y.square().sum().backward()
            torch.cuda.set_sync_debug_mode("default")
            results.append([y, leaf.grad, *(p.grad.clone() for p in module.parameters())])
        for first, again, want in zip(*results, strict=True):
            assert torch.equal(first, again)  # sums have one order
            torch.testing.assert_close(first, want, rtol=2e-3, atol=2e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
