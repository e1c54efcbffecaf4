"""Batches of images: who draws what, and processes that read ahead."""

from __future__ import annotations

import math
import os
import signal
import subprocess

import pytest
import torch

from tests.support.jobs import ROOT
from tests.support.ranks import run_ranks
from tests.support.tasks import domainbed_task
from tests.support.tiny_images import TINY
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.batches import TrainBatches, evaluation_batches
from unifmoe_dist.train.build import build_optimizer, install_layers
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.read_ahead import read_ahead

pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")

# -- batches ------------------------------------------------------------------------------------------------------


def tensors_of(batches) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(inputs["x"].clone(), labels.clone()) for inputs, labels in batches]


def read_in_both_ways(rank, world, root):
    """Batches without and with workers: in order, again, after a jump, and for evaluation."""
    task = domainbed_task("pacs", "photo", root, image_size=16)
    before = torch.get_rng_state()
    result = {}
    for workers in (0, 2):
        batches = TrainBatches(task, 4, 7, 0, 1, 2, workers)
        read = [tensors_of(batches.step(step)) for step in (0, 1, 2)]
        read += [tensors_of(batches.step(1)), tensors_of(batches.step(3)), tensors_of(batches.step(9))]
        scored = evaluation_batches(task.test[0], task, 8, 1, 2, workers)
        result[workers] = read, [(*tensors_of([batch]), weight) for batch, weight in scored]
    return result, torch.equal(before, torch.get_rng_state())


def assert_equal(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
        return
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


def test_draws_with_replacement(pacs):
    """As DomainBed's sampler: every item of a batch is any item of the environment, whatever came before."""
    task = domainbed_task("pacs", "photo", pacs, image_size=16)
    plain, drawn = (TrainBatches(task, 8, 7, 0, 1, 1, replacement=r) for r in (False, True))
    size = len(task.train[1])
    epochs = [i for step in range(size) for i in plain.indices(1, step)]
    assert all(sorted(epochs[e * size : (e + 1) * size]) == list(range(size)) for e in range(8))
    draws = [drawn.indices(1, step) for step in range(600)]
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=size).double()
    mean = counts.sum() / size
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    assert abs(chi_square - (size - 1)) < 6 * (2 * (size - 1)) ** 0.5
    repeats = sum(len(set(batch)) < 8 for batch in draws) / 600
    expected = 1 - math.prod((size - i) / size for i in range(8))
    assert abs(repeats - expected) < 6 * (expected * (1 - expected) / 600) ** 0.5
    assert draws[3] == TrainBatches(task, 8, 7, 0, 1, 1, replacement=True).indices(1, 3) != drawn.indices(0, 3)
    halves = [tensors_of(TrainBatches(task, 8, 7, half, 2, 1, replacement=True).step(3)) for half in (0, 1)]
    assert_equal([half[0] for half in halves], tensors_of(TrainBatches(task, 8, 7, 0, 1, 2, replacement=True).step(3)))


@pytest.mark.parametrize("moe", ["unif", pytest.param("gmoe", marks=pytest.mark.slow), "none"])
def test_its_adam_decays_everything(moe):
    """After some steps the weights are those of `torch.optim.Adam(model.parameters(), lr, weight_decay=...)`."""
    words = [
        "--config",
        str(ROOT / "configs/domainbed/terraincognita.yaml"),
        "--data.held_out",
        "L38",
        "--model.moe",
        moe,
        "--model.layers",
        "[1]",
        "--optim.weight_decay",
        "0.1",
    ]
    config = parse_train_config(words)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(install_layers(config, build_backbone(TINY, 7, 32, "none")).eval())
    ours = build_optimizer(config, models[0])
    images = torch.randn(2, 3, 32, 32)
    theirs = torch.optim.Adam(models[1].parameters(), lr=config.optim.lr, weight_decay=0.1)
    for _ in range(2):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2])).backward()
            optimizer.step()
    for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other), name
    config.optim.decay = "matrices"
    exempt = [group for group in build_optimizer(config, models[0]).param_groups if not group["weight_decay"]]
    assert len(exempt) == 1 and len(exempt[0]["params"]) > 50


def test_workers_change_no_batch_and_no_random_state(pacs):
    ((result, untouched),) = run_ranks(1, read_in_both_ways, str(pacs))
    assert untouched
    assert_equal(result[0], result[2])
    (first, second, _, second_again, *_), scored = result[2]
    assert_equal(second, second_again)
    assert not torch.equal(first[0][0], second[0][0])
    # A step is the same items whether two ranks share it or one takes it in two micro-batches.
    task = domainbed_task("pacs", "photo", pacs, image_size=16)
    assert_equal([tensors_of(TrainBatches(task, 4, 7, half, 2, 1).step(1))[0] for half in (0, 1)], second)
    assert sum(int(weight.sum()) for _, weight in scored) == 17 and len(scored) == 3


def fail_in_workers(rank, world, root):
    messages = []
    task = domainbed_task("pacs", "photo", root, image_size=16)
    victim = task.test[0].folder.file(int(task.test[0].rows[3]))
    content = victim.read_bytes()
    victim.write_bytes(b"broken")
    for batches in (evaluation_batches(task.test[0], task, 4, 0, 1, 2), read_ahead(die, [1], 1)):
        try:
            list(batches)
        except UserError as error:
            messages.append(str(error))
    victim.write_bytes(content)
    stream = read_ahead(own_process, iter(int, 1), 1)
    pids = {next(stream)}
    for name in ("TERM", "INT", "USR1"):  # from elsewhere, as when a whole job is told to stop
        subprocess.run(["bash", "-c", f"kill -{name} {pids.copy().pop()}"], check=True)
        pids.add(next(stream))
    return messages, victim.name, len(pids)


def die(key):
    os.kill(os.getpid(), signal.SIGKILL)


def own_process(key):
    return os.getpid()


def test_errors_in_workers_are_one_sentence_and_they_outlive_stop_signals(pacs):
    """The last stream stays open: a rank that leaves takes its workers along."""
    (((broken, lost), name, processes),) = run_ranks(1, fail_in_workers, str(pacs))
    assert processes == 1
    assert f"{name} cannot be read as an image" in broken and "\n" not in broken and "worker" not in broken
    assert "a process that reads data ahead was lost" in lost and "lower data.workers" in lost and "\n" not in lost
