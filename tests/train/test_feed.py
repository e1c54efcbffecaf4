"""Batches on their way to a device: from pinned memory, on a stream of their own, one ahead, and none lost or repeated.

No device is here: a stand-in for `torch.cuda` keeps what is copied back until the stream that computes has waited.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import train
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import feed
from unifmoe_dist.train.feed import Feed, TrainFeed
from unifmoe_dist.train.nested import map_tensors, to_device

CUDA = torch.device("cuda", 0)
Pair = namedtuple("Pair", "left right")


class Recorded(torch.Tensor):
    """A tensor that writes into `log` how it gets to a device, and has its values only when the copy was waited for."""

    log: list
    events: list
    pinned = False

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        copied = self.as_subclass(Recorded)
        copied.pinned = True
        return copied

    def to(self, device, *, non_blocking):
        assert device == CUDA and non_blocking and self.pinned and FakeCuda.inside
        self.log.append(f"copy {int(self[0])}")
        moved = torch.full_like(self, -1)
        FakeCuda.under_way.append((moved, self))
        return moved

    def record_stream(self, stream):
        assert stream == "computing"
        self.log.append(f"keep {int(self[0])}")


class FakeCuda:
    """What `feed` uses of torch.cuda."""

    inside = False
    under_way: list = []

    @staticmethod
    def Stream(device):  # noqa: N802
        assert device == CUDA
        return SimpleNamespace(record_event=lambda: tuple(FakeCuda.under_way))

    @staticmethod
    @contextmanager
    def stream(stream):
        FakeCuda.inside = True
        FakeCuda.under_way = []
        yield
        FakeCuda.inside = False

    @staticmethod
    def current_stream(device):
        assert device == CUDA

        class Computing:
            def wait_event(self, event):
                for moved, source in event:
                    moved.copy_(source)

            def __eq__(self, other):
                return other == "computing"

        return Computing()


@pytest.fixture
def log(monkeypatch):
    entries: list[str] = []
    monkeypatch.setattr(Recorded, "log", entries, raising=False)
    monkeypatch.setattr(feed, "cuda", FakeCuda)
    return entries


def recorded(number):
    return torch.full((3,), float(number)).as_subclass(Recorded)


def read(log, count):
    for number in range(count):
        log.append(f"read {number}")
        yield {"x": recorded(number)}, (recorded(number + 100),)


def test_a_batch_travels_while_the_one_before_computes(log):
    batches = Feed(read(log, 3), CUDA)
    for inputs, labels in batches:
        log.append(f"compute {int(inputs['x'][0])} {int(labels[0][0])}")
        batches.fetch()
        batches.fetch()  # the next one is on its way
        log.append("wait")
    first = ["read 0", "copy 0", "copy 100", "keep 0", "keep 100", "compute 0 100"]
    second = ["read 1", "copy 1", "copy 101", "wait", "keep 1", "keep 101", "compute 1 101"]
    third = ["read 2", "copy 2", "copy 102", "wait", "keep 2", "keep 102", "compute 2 102", "wait"]
    assert log == first + second + third


def test_pinned_memory_is_pinned_once(log):
    batch = recorded(1).pin_memory()
    with patch.object(Recorded, "pin_memory", side_effect=AssertionError):
        (given,) = Feed([batch], CUDA)
    assert given[0] == 1


def test_an_error_of_reading_waits_for_its_turn(log):
    def faulty():
        yield recorded(1)
        raise UserError("the file is broken.")

    batches = Feed(faulty(), CUDA)
    assert next(batches)[0] == 1
    batches.fetch()  # the step on the first batch is not over
    with pytest.raises(UserError, match="broken"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_nothing_is_read_early_where_no_device_is_fed():
    seen: list[str] = []
    batches = Feed(((seen.append(n), torch.tensor(n))[1] for n in range(3)), torch.device("cpu"))
    assert next(batches) == 0
    batches.fetch()
    assert seen == [0]
    assert list(batches) == [1, 2]


def test_tensors_in_every_kind_of_batch():
    BatchEncoding = pytest.importorskip("transformers").BatchEncoding  # noqa: N806
    encoding = BatchEncoding({"input_ids": torch.ones(1, 2, dtype=torch.long), "mask": torch.ones(1, 2)})
    given = Pair([torch.zeros(2), "a name"], (encoding, {"n": 3, "t": torch.ones(2)}))
    moved = to_device(given, torch.device("cpu"), torch.bfloat16)
    assert type(moved) is Pair and type(moved.left) is list and type(moved.right) is tuple
    assert type(moved.right[0]) is BatchEncoding and moved.left[1] == "a name" and moved.right[1]["n"] == 3
    kinds = []
    map_tensors(moved, lambda t: kinds.append(t.dtype))
    assert kinds == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]
    assert given.left[0].dtype == torch.float32 and encoding["mask"].dtype == torch.float32  # as they were given


class Numbered:
    """Training batches that say which they are, and note which are read."""

    micro_batches = 2

    def __init__(self):
        self.read = []

    def step(self, step):
        for micro in range(self.micro_batches):
            self.read.append(step * self.micro_batches + micro)
            yield recorded(self.read[-1])

    def close(self):
        self.read.append("closed")


def test_steps_are_given_once_in_order_again_or_from_elsewhere(log):
    batches = Numbered()
    fed = TrainFeed(batches, CUDA)

    def step(number):
        given = []
        for batch in fed.step(number):
            fed.fetch()
            given.append(int(batch[0]))
        return given

    assert step(0) + step(1) + step(2) == [0, 1, 2, 3, 4, 5]
    assert batches.read == [0, 1, 2, 3, 4, 5, 6]
    assert step(2) == [4, 5]  # to find what was not finite in it
    assert step(3) == [6, 7]
    assert batches.read == [0, 1, 2, 3, 4, 5, 6, 4, 5, 7, 8]
    assert step(9) == [18, 19]
    fed.close()
    assert step(9) == [18, 19]
    assert batches.read[-5:] == [20, "closed", 18, 19, 20]


class Late:
    """A copy stream whose copies are there when they are waited for, and not before."""

    def __init__(self, device):
        assert device == CUDA

    def start(self, value):
        moved = map_tensors(value, lambda t: torch.full_like(t, -1))
        return moved, value

    def hand_over(self, moved, there):
        sources = []
        map_tensors(there, sources.append)
        numbers = itertools.count()
        map_tensors(moved, lambda t: t.copy_(sources[next(numbers)]))


def train_ahead(rank, world, folder, *args, **options):
    """As `train`, with batches that go to the CPU as they do to a device."""
    with (
        patch.object(feed, "CopyStream", Late),
        patch("unifmoe_dist.train.trainer.TrainFeed", lambda batches, device: TrainFeed(batches, CUDA)),
    ):
        return train(rank, world, folder, *args, **options)


@pytest.mark.timeout(300)
def test_a_run_and_its_resumption_are_those_without(tmp_path):
    options = dict(optimizer="adamw", eval_every=2, gradient_accumulation=2)
    plain, weights, _ = run_ranks(1, train, str(tmp_path / "plain"), 6, **options)[0]
    first, _, _ = run_ranks(1, train_ahead, str(tmp_path / "cut"), 6, 4, **options)[0]
    rest, resumed, _ = run_ranks(1, train_ahead, str(tmp_path / "cut"), 6, None, resume=True, **options)[0]
    assert first + rest == plain
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.gpu
def test_batches_arrive_on_a_device_while_it_computes():
    """Products that take longer than a copy are under way whenever a batch arrives or its memory is taken again."""
    device, busy = torch.device("cuda", torch.cuda.current_device()), torch.randn(4096, 4096, device="cuda")
    given = [({"x": torch.full((1 << 22,), float(number))}, torch.tensor([number])) for number in range(8)]
    batches = Feed(iter(given), device)
    sums, labels = [], []
    for inputs, label in batches:
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
        assert inputs["x"].device == device
        sums.append(inputs["x"].mean())
        labels.append(label)
        batches.fetch()
        del inputs, label
    assert [float(s) for s in sums] == [int(t) for t in labels] == list(range(8))
