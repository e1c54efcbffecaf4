"""Emoji by maker: npm's packages in their layout, made here, of squares and discs that resvg draws."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
import timm
import torch

import unifmoe_dist.data.timm_models  # noqa: F401  registers emoji_vit
from launch import data
from unifmoe_dist.config import DataConfig, TrainConfig
from unifmoe_dist.data import emoji
from unifmoe_dist.data.registry import PREPARED, TASKS, find_task
from unifmoe_dist.data.task import Task
from unifmoe_dist.errors import UserError

COLOURS = dict(zip(emoji.MAKERS, ("#ff0000", "#00ff00", "#0000ff", "#ffffff"), strict=True))
KINDS = len(emoji.CATEGORIES)
COUNT = 5 * KINDS


def archive(maker: str) -> bytes:
    """Five emoji of each category that all makers draw, each with a row of its own; more that must not be taken."""
    names = {f"{0x1F600 + i:x}": f"emoji-{i}" for i in range(COUNT)}
    more = {
        "1f44d-1f3fd": "toned",
        "1f468-200d-1f33e": "joined",
        f"2{emoji.MAKERS.index(maker)}": "own",
        "2690": "flag",
    }
    icons = {
        name: {"body": f'<path fill="{COLOURS[maker]}" d="M0 {i % 16}h16v1h-16z"/>'}
        for i, name in enumerate([*names.values(), *more.values()])
    }
    icons["emoji-0"]["height"] = 8  # half as high: in the middle of its square
    del icons["emoji-1"]
    kinds = {kind: [f"emoji-{i}" for i in range(COUNT) if i % KINDS == k] for k, kind in enumerate(emoji.CATEGORIES)}
    kinds[emoji.CATEGORIES[0]] += ["toned", "joined", "own"]
    files = {
        "icons": {"icons": icons, "aliases": {"emoji-1": {"parent": "emoji-17"}}, "width": 16, "height": 16},
        "chars": {**names, **more},
        "metadata": {"categories": {**kinds, "Flags": ["flag"]}},
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as target:
        for name, content in files.items():
            text = json.dumps(content).encode()
            entry = tarfile.TarInfo(f"package/{name}.json")
            entry.size = len(text)
            target.addfile(entry, io.BytesIO(text))
    return packed.getvalue()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with the four archives, which is the current one, and whose hashes are the right ones."""
    own = {}
    for maker, (name, version, _) in emoji.PACKAGES.items():
        (tmp_path / emoji.ARCHIVES[maker]).write_bytes(content := archive(maker))
        own[maker] = (name, version, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(emoji, "PACKAGES", own)
    monkeypatch.chdir(tmp_path)
    emoji.drawings.cache_clear()
    yield tmp_path
    emoji.drawings.cache_clear()


def read(held_out, name="emoji", **options):
    return find_task(name).read(TrainConfig(data=DataConfig(task=name, held_out=held_out, **options)))


def test_what_all_makers_drew_is_drawn_on_grey(packages, capsys):
    data.main(["prepare", "emoji"])
    said = capsys.readouterr().out
    assert f"has {COUNT} emoji of each maker" in said and "openmoji: OpenMoji" in said and "CC BY-SA 4.0" in said
    with np.load("data/emoji/emoji-32.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert images.shape == (4, COUNT, 3, 32, 32) and np.bincount(labels).tolist() == [5] * KINDS
    grey, red = [128] * 3, [255, 0, 0]
    plain = images[0, 2]
    assert plain[:, 4, 16].tolist() == plain[:, 5, 16].tolist() == red  # row 2 of 16 is rows 4 and 5 of 32
    assert plain[:, 3, 16].tolist() == plain[:, 6, 16].tolist() == grey
    half = images[0, 0]
    assert half[:, 8, 16].tolist() == red and half[:, 7, 16].tolist() == half[:, 20, 16].tolist() == grey
    assert np.array_equal(images[0, 1], images[0, 17])  # an alias
    assert images[2, 2][:, 4, 16].tolist() == [0, 0, 255]


def test_no_emoji_is_seen_in_one_style_and_tested_in_another(packages):
    data.main(["prepare", "emoji", "--root", "own"])
    for held in emoji.MAKERS:
        task = read(held, root="own")
        assert task.environments == tuple(maker for maker in emoji.MAKERS if maker != held)
        train, validation, test = (
            [set(d.source.tolist()) for d in part] for part in (task.train, task.validation, task.test)
        )
        assert train == [train[0]] * 3 and validation == [validation[0]] * 3
        assert [len(train[0]), len(validation[0]), len(test[0])] == [24, 6, 10]
        assert len(train[0] | validation[0] | test[0]) == COUNT
        pixels = 255 * (task.test[0].images * emoji.STD + emoji.MEAN)
        colours = {"#" + bytes(c).hex() for c in pixels.round().int().permute(0, 2, 3, 1).reshape(-1, 3).tolist()}
        assert colours & set(COLOURS.values()) == {COLOURS[held]}
    assert not torch.equal(
        read("noto", root="own").test[0].source, read("noto", root="own", split_seed=1).test[0].source
    )
    inputs, labels = task.collate([task.test[0][i] for i in range(4)])
    assert task.build_model()(**inputs).shape == (4, KINDS) and labels.tolist() == task.test[0].labels[:4].tolist()


def test_the_other_protocol_cuts_every_maker_by_itself(packages):
    data.main(["prepare", "emoji"])
    task = read("fluent", "emoji-seen")
    train, validation = ([set(d.source.tolist()) for d in part] for part in (task.train, task.validation))
    assert all(len(t) == 32 and len(v) == 8 and not t & v for t, v in zip(train, validation, strict=True))
    assert train[0] != train[1] and len(task.test[0]) == 32
    assert set(task.test[0].source.tolist()) & train[0]


def test_training_images_are_moved_and_mirrored():
    image = torch.zeros(3, 32, 32)
    image[:, 16, 4] = 1
    seen = set()
    for seed in range(200):
        changed, label = emoji.move_and_mirror((image, 3), torch.Generator().manual_seed(seed))
        assert label == 3 and changed.shape == image.shape and float(changed.sum()) == 3
        seen.add(tuple(changed[0].nonzero()[0].tolist()))
    assert {row for row, _ in seen} == set(range(13, 20))
    assert {column for _, column in seen} == {*range(1, 8), *range(24, 31)}
    assert float(image[0, 16, 4]) == 1


def test_the_backbone_is_in_timms_registry():
    model = timm.create_model("emoji_vit")
    assert model.pretrained_cfg["input_size"] == (3, 32, 32) and model(torch.zeros(1, 3, 32, 32)).shape == (1, KINDS)


def test_what_is_missing_or_damaged_is_said(packages, monkeypatch):
    with pytest.raises(
        UserError, match=r"data/emoji/emoji-32.npz is not there; run `npm pack @iconify-json/noto@.* prepare emoji`"
    ):
        read("noto")
    noto = packages / emoji.ARCHIVES["noto"]
    with pytest.raises(UserError, match=r"--archive names no iconify-json-twemoji-.*: run `npm pack"):
        data.main(["prepare", "emoji", "--archive", str(noto)])
    content = noto.read_bytes()
    noto.write_bytes(b"another")
    with pytest.raises(UserError, match=r"is another file \(sha256 [0-9a-f]{12}\) than results are of"):
        data.main(["prepare", "emoji"])
    noto.write_bytes(content)
    (packages / "data/emoji").mkdir(parents=True)
    (packages / "data/emoji/emoji-32.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UserError, match=r"emoji-32.npz is damaged"):
        read("noto")
    monkeypatch.setattr(emoji.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="resvg-py, which draws the emoji, is not installed: pip install resvg-py"):
        data.main(["prepare", "emoji"])


def test_every_task_that_is_prepared_says_how():
    own = {name for name in TASKS if type(find_task(name)).prepare is not Task.prepare}
    assert own == {*PREPARED, "emoji-seen"}  # which reads what emoji has prepared
