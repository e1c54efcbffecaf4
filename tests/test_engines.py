"""DeepSpeed's engines around upcycled models in loops of one's own: ZeRO 0 to 3, experts replicated and spread.

Whatever ranks do together equals one rank on all their batches; with SGD, since Adam would hide scaled gradients.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support.one_rank import (
    MICRO,
    RATE,
    assert_same_weights,
    batches,
    loss_of,
    one_rank,
    spread_model,
    upcycled,
    whole_model,
)
from tests.support.ranks import run_ranks
from tests.support.small_models import logits
from unifmoe_dist import full_state_dict, param_groups
from unifmoe_dist.engines import divide_groups, mark
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers


def engine_for(model: nn.Module, stage: int, clip: float, optimizer: Any, **options: Any) -> Any:
    import deepspeed

    schedule = None
    if optimizer == "with a schedule":
        optimizer = torch.optim.SGD(model.parameters(), lr=2 * RATE)
        schedule = LambdaLR(optimizer, lambda _: 0.5)
    elif optimizer == "by size":
        wide = [[p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
        optimizer = torch.optim.SGD([{"params": parameters} for parameters in wide], lr=RATE)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        **options,
    }
    groups = [*model.parameters()]
    return deepspeed.initialize(
        model=model, model_parameters=groups, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]


SGD = partial(torch.optim.SGD, lr=RATE)  # made by the engine, of the groups that it knows


def check_training(engine: Any, expected: list[tuple[float, float, nn.Module]], rank: int, world: int) -> None:
    """Losses, norms, and every weight after every step; scored between steps, as one does."""
    from deepspeed.runtime.zero import GatheredParameters

    model = engine.module
    for step, (loss, norm, whole) in enumerate(expected):
        total = torch.zeros((), dtype=torch.float64)
        for images in batches(step, world)[:, rank]:
            own = loss_of(engine, images)
            engine.backward(own)
            engine.step()
            total += own.detach() / (MICRO * world)
        dist.all_reduce(total)
        assert float(total) == pytest.approx(loss, abs=1e-5)
        if engine.gradient_clipping():
            assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-4)
        with GatheredParameters([*model.parameters()], enabled=engine.zero_optimization_stage() == 3):
            assert_same_weights(model, whole)
        model.eval()
        with torch.no_grad():
            images = batches(step, world)[0, rank]
            torch.testing.assert_close(
                logits(engine, {"x": images}), logits(copy.deepcopy(whole).eval(), {"x": images}), rtol=1e-4, atol=1e-5
            )
        model.train()


def equals_one_rank(rank: int, world: int, folder: str, size: int, cases: list[tuple[int, float, bool, Any]]) -> bool:
    """Cases are ZeRO stage, clipping, activation checkpointing, optimiser; experts are spread over `size` ranks."""
    groups = [dist.new_group([*range(start, start + size)]) for start in range(0, world, size)]
    for stage, clip, checkpointing, optimizer in cases:
        model = whole_model()
        if size > 1:
            model = spread_model(model, groups[rank // size])
        model.set_grad_checkpointing(checkpointing)
        engine = engine_for(model, stage, clip, optimizer)
        if optimizer == "with a schedule":
            assert len(engine.lr_scheduler.base_lrs) == len(engine.basic_optimizer.param_groups)
        expected = one_rank(clip, world)
        check_training(engine, expected, rank, world)
        if size > 1 and (state := full_state_dict(engine)):  # on rank 0
            again = whole_model()
            again.load_state_dict(state)
            assert_same_weights(again, expected[-1][2])
        if stage == 3:
            check_fetches(engine)
            check_files(engine, expected[-1][2], Path(folder))
    return True


def check_fetches(engine: Any) -> None:
    """What ZeRO 3 has recorded of the order in which modules run, to fetch their weights early, has held all along."""
    assert engine.optimizer.parameter_offload.get_param_coordinator().is_complete_trace()


def check_files(engine: Any, expected: nn.Module, folder: Path) -> None:
    """The weights that DeepSpeed saves, whole and in parts, are those of a model on one rank."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine.save_16bit_model(str(folder))
    engine.save_checkpoint(str(folder / "parts"))
    dist.barrier()
    whole = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for state in (whole, get_fp32_state_dict_from_zero_checkpoint(str(folder / "parts"))):
        model = whole_model()
        model.load_state_dict(state)
        assert_same_weights(model, expected)


@pytest.mark.parametrize(
    "world,size,cases",
    [
        (2, 2, [(0, 0.3, False, SGD), (1, 0.0, True, "with a schedule"), (2, 0.3, True, "by size")]),
        (4, 2, [(0, 0.3, True, "by size"), (1, 0.3, False, SGD), (2, 0.0, False, "with a schedule")]),
        (2, 1, [(1, 0.3, True, SGD), (2, 0.0, False, SGD), (3, 0.3, False, SGD)]),
        pytest.param(4, 1, [(1, 0.0, False, SGD), (2, 0.3, True, SGD), (3, 0.3, True, SGD)], marks=pytest.mark.slow),
    ],
)
def test_engines_train_as_on_one_rank(world, size, cases, tmp_path):
    assert run_ranks(world, equals_one_rank, str(tmp_path), size, cases, timeout=280, fresh=True) == [True] * world


def refusals(rank: int, world: int, folder: str) -> bool:
    everyone, alone = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([0, 1])][rank]
    whole = whole_model()
    for options, words in (
        ({"stage": 3}, "ZeRO 3 spreads every weight over all ranks; use ZeRO 1 or 2, or give upcycle no expert_group"),
        ({"stage": 0, "bf16": {"enabled": True}}, "fp16 and bf16 are not right for them without ZeRO,.*; use ZeRO 2"),
    ):
        with pytest.raises(UserError, match=words):
            engine_for(spread_model(whole, everyone), clip=0.0, optimizer=SGD, **options)
    with pytest.raises(UserError, match="ZeRO knows whole parameters alone; use zero_optimization.stage 0, or param_g"):
        engine_for(whole, 1, 0.0, SGD(param_groups(whole, muon=True)))
    two = spread_model(whole, everyone)
    two.blocks[2].mlp = spread_model(whole, alone).blocks[2].mlp
    engine = engine_for(two, 1, 0.0, SGD)  # another group of the same ranks is no other
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
        with pytest.raises(UserError, match=f"DeepSpeed's {name} knows one rank's alone; use unifmoe_dist.full_state"):
            getattr(engine, name)(folder)
    return True


def other_methods(rank: int, world: int) -> bool:
    """Under ZeRO 3, three steps of each, or a refusal."""
    from deepspeed.runtime.zero import GatheredParameters

    for method in ("topk", "gmoe", "emoe"):
        whole = upcycled(method)
        trained = [p for p in whole.parameters() if p.requires_grad]
        engine = engine_for(copy.deepcopy(whole), 3, 0.0, SGD, gradient_accumulation_steps=1)
        optimizer = SGD(trained)
        for step in range(3):
            images = batches(step, world)[0]
            losses = []
            for place in (*range(world), rank):  # the last is this rank's own, which draws the same noise
                torch.manual_seed(place)
                model = whole if len(losses) < world else engine
                losses.append(logits(model, {"x": images[place]}).square().mean())
                losses[-1] = losses[-1] + 0.1 * sum(layer.auxiliary_loss() for layer in moe_layers(model).values())
            engine.backward(losses.pop())
            engine.step()
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            with GatheredParameters([*engine.module.parameters()]):
                assert_same_weights(engine.module, whole)
    for method in ("dynmoe", "mass"):
        with pytest.raises(UserError, match="Layer reads and rewrites whole weights between steps; use ZeRO 1 or 2"):
            engine_for(upcycled(method), 3, 0.0, SGD)
    return True


def test_other_methods_under_zero_3():
    assert run_ranks(2, other_methods, fresh=True) == [True, True]


def test_what_engines_cannot_do_with_spread_experts_is_refused(tmp_path):
    assert run_ranks(2, refusals, str(tmp_path), timeout=280, fresh=True) == [True, True]


def test_a_schedule_made_before_knows_the_experts_groups():
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    experts = [*layers[2].parameters(), *layers[3].parameters()]
    mark(experts, "ep_size_2")
    groups = [
        {"params": layers[:3].parameters(), "lr": 0.1, "weight_decay": 0.0},
        {"params": layers[3].parameters(), "lr": 0.2, "weight_decay": 0.3},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    divide_groups(optimizer.param_groups, schedule)
    optimizer.step()
    schedule.step()
    found = [(len(g["params"]), g["lr"], g["weight_decay"], g.get("moe", False)) for g in optimizer.param_groups]
    assert found == [(4, 0.05, 0.0, False), (2, pytest.approx(0.02), 0.3, True), (2, 0.05, 0.0, True)]
    divide_groups(optimizer.param_groups, schedule)  # there is nothing left to divide
    assert [len(g["params"]) for g in optimizer.param_groups] == [4, 2, 2]
