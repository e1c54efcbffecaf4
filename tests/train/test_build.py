"""What a configuration becomes: the share of the data that is learned from, and the schedule of the learning rate."""

from __future__ import annotations

import pytest
import torch

from tests.support.training import make_config
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.train.build import build_schedule, build_task


def shared(share: float, seed: int = 0) -> TaskData:
    config = make_config("run", seed=seed)
    config.data.train_share = share
    return build_task(config)


def items(data: object) -> set[bytes]:
    return {image.numpy().tobytes() for image, _ in (data[number] for number in range(len(data)))}


def test_a_share_of_every_environment_is_learned_from():
    whole, half, tenth = (shared(share) for share in (1.0, 0.5, 0.1))
    assert [len(each) for each in half.train] == [-(-len(each) // 2) for each in whole.train]
    for most, some, few in zip(whole.train, half.train, tenth.train, strict=True):
        assert items(few) < items(some) < items(most)
    for split in ("validation", "test"):
        for all_of_it, own in zip(getattr(whole, split), getattr(half, split), strict=True):
            assert all(torch.equal(a[0], b[0]) for a, b in zip(all_of_it, own, strict=True))
    assert [items(each) for each in shared(0.5).train] == [items(each) for each in half.train]
    assert items(shared(0.5, seed=1).train[0]) != items(half.train[0])
    assert [len(each) for each in shared(1e-9).train] == [1] * len(whole.train)


@pytest.mark.parametrize("warmup,steps", [(3, 10), (0, 7), (5, 4), (60, 60)])
@pytest.mark.parametrize(
    "name,theirs", [("cosine", "cosine"), ("linear", "linear"), ("constant", "constant_with_warmup")]
)
def test_schedules_are_those_of_transformers(name, theirs, warmup, steps):
    from transformers import get_scheduler

    config = make_config("run", steps=steps)
    config.optim.schedule, config.optim.warmup_steps = name, warmup

    def rates(make) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        schedule, found = make(optimizer), []
        for _ in range(steps + 3):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    expected = rates(lambda optimizer: get_scheduler(theirs, optimizer, warmup, steps))
    assert rates(build_schedule(config)) == expected
