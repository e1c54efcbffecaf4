"""Folders of images that are not as published: each is one sentence."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.support.tasks import domainbed_task
from tests.support.tiny_images import make_benchmark, write_image
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")

# -- bad layouts --------------------------------------------------------------------------------------------------


def remove(*parts: str):
    return lambda dataset: shutil.rmtree(dataset.joinpath(*parts))


def empty(dataset: Path) -> None:
    for file in (dataset / "cartoon/dog").iterdir():
        file.unlink()


BAD = {
    "environment": (remove("sketch"), ["no folder sketch", "environment Sketch", "PACS/sketch/CLASS/IMAGE"]),
    "class": (remove("photo", "guitar"), ["photo does not hold the classes of PACS", "lacks guitar"]),
    "extra class": (lambda d: (d / "photo/cat").mkdir(), ["photo", "has cat besides", "labels would not agree"]),
    "empty class": (empty, ["cartoon/dog holds no images"]),
    "not an image": (lambda d: (d / "photo/dog/a.txt").touch(), ["photo/dog/a.txt is not an image"]),
    "no environments": (lambda d: [shutil.rmtree(f) for f in d.iterdir()], ["is not PACS's folder", "prepare pacs"]),
    "nothing": (shutil.rmtree, ["is not PACS's folder", "art_painting, cartoon, photo, sketch"]),
    "file for a folder": (lambda d: (shutil.rmtree(d / "photo"), (d / "photo").touch()), ["no folder photo"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_layout_is_one_sentence(kind, tmp_path):
    dataset = make_benchmark(tmp_path, "pacs", per_class=1, size=4)
    damage, words = BAD[kind]
    damage(dataset)
    with pytest.raises(UserError) as caught:
        domainbed_task("pacs", "art", dataset)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_classes_that_differ_between_environments(tmp_path):
    dataset = make_benchmark(tmp_path, "officehome", per_class=1, size=4)
    os.rename(dataset / "Product/class_007", dataset / "Product/Class_7")
    message = "Product does not hold the classes of .*Art: it lacks class_007 and has Class_7 besides"
    with pytest.raises(UserError, match=message):
        list_images(BENCHMARKS["officehome"], dataset)
    shutil.rmtree(dataset / "Art/class_000")
    with pytest.raises(UserError, match="Art has 64 class folders, but OfficeHome has 65"):
        list_images(BENCHMARKS["officehome"], dataset)


def test_folders_that_cannot_be_read(pacs, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="art_painting cannot be read .Permission denied.; check its rights"):
        list_images(BENCHMARKS["pacs"], pacs)


def test_an_environment_needs_images_for_both_splits(tmp_path):
    dataset = make_benchmark(tmp_path, "vlcs", per_class=1, size=4)
    task = domainbed_task("vlcs", 0, dataset)
    assert [len(data) for data in (*task.train, *task.validation)] == [4, 4, 4, 1, 1, 1]  # five images: the least
    for environment in BENCHMARKS["vlcs"].environments:
        shutil.rmtree(dataset / environment.folder / "dog")
    four = replace(BENCHMARKS["vlcs"], classes=("bird", "car", "chair", "person"))
    with mock.patch.dict(BENCHMARKS, vlcs=four):
        with pytest.raises(UserError, match="Caltech101 holds 4 images, too few for an out-split of 20 %"):
            domainbed_task("vlcs", 0, dataset)


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_a_file_that_is_no_image_is_named(content, tmp_path):
    dataset = make_benchmark(tmp_path, "vlcs", per_class=2, size=24)
    task = domainbed_task("vlcs", 0, dataset)
    victim = task.train[0].folder.file(int(task.train[0].rows[0]))
    victim.write_bytes(content) if content is not None else victim.unlink()
    with pytest.raises(UserError, match=f"{victim.name} cannot be read as an image .*data.py verify"):
        task.train[0][0]


def test_truncated_images_are_read_as_far_as_they_go(tmp_path):
    write_image(tmp_path / "a.jpg", 0, 0, 0, size=64)
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    from unifmoe_dist.data.images import decode

    image, complete = decode(tmp_path / "a.jpg")
    assert image.size == (64, 64) and not complete
