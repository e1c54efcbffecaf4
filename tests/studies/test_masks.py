"""Semantic elements from label images: patches by hand, files found by name, and reports that show them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launch import analyze
from tests.support.jobs import run_job
from tests.support.tiny_images import make_benchmark
from unifmoe_dist.data.digits import MEAN, STD, digits_task
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies import page as page_module
from unifmoe_dist.studies.usage.masks import match_masks, patch_elements, read_mask, read_names


def save(path: Path, labels: list | np.ndarray, mode: str = "P") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(labels, dtype=np.uint8))
    if mode == "P":
        image.putpalette([n for colour in range(256) for n in (colour, 255 - colour, 0)])
    image.save(path)
    return path


def test_a_patch_shows_what_most_of_its_pixels_show():
    """4 x 6 pixels, 2 x 2 patches of 2 x 3: counts 5:1, 3:3 (the lower number), void 4:2, and 7 alone."""
    labels = np.array([[3, 3, 3, 9, 9, 9], [3, 3, 0, 4, 4, 4], [255, 255, 255, 7, 7, 7], [255, 2, 2, 7, 7, 7]])
    assert patch_elements(labels, 2, 2).tolist() == [[3, 4], [-1, 7]]
    assert patch_elements(labels, 1, 1).tolist() == [[7]]  # 6 of 7, 4 of 3, 4 void
    assert patch_elements(labels, 4, 6).tolist() == np.where(labels == 255, -1, labels).tolist()


def test_patches_need_not_be_whole_pixels():
    """Five pixels in two patches: the middle one's centre opens the second. Two pixels in four patches: each twice."""
    assert patch_elements(np.array([[1, 1, 2, 3, 2]]), 1, 2).tolist() == [[1, 2]]
    assert patch_elements(np.array([[1, 2]]), 2, 4).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]
    assert patch_elements(np.array([[1, 2, 3]]), 1, 4).tolist() == [[1, 1, 2, 3]]  # 6 half pixels, centres at 1/12, ...


def test_masks_are_found_by_the_end_of_their_path(tmp_path):
    images = ["/data/art/dog/a.jpg", "/data/art/dog/b.jpg", "/data/art/cat/a.png", "/data/art/cat/010.jpg"]
    flat = tmp_path / "flat"
    b, number = save(flat / "b.png", [[0]]), save(flat / "10.PNG", [[0]])
    save(flat / "other.png", [[0]])
    (flat / "labels.json").write_text('{"0": "ground", "15": "person"}')
    assert match_masks(flat, images) == {1: b, 3: number}
    assert read_names(flat) == {0: "ground", 15: "person"} and read_names(tmp_path) == {}
    nested = [save(tmp_path / f"nested/{name}.png", [[0]]) for name in ("dog/a", "art/cat/a")]
    assert match_masks(tmp_path / "nested", images) == {0: nested[0], 2: nested[1]}
    numbers = [save(tmp_path / f"numbers/{name}.png", [[0]]) for name in ("0002", "1")]
    assert match_masks(tmp_path / "numbers", ["0", "1", "2"]) == {2: numbers[0], 1: numbers[1]}


def test_masks_that_do_not_fit_are_one_sentence(tmp_path):
    images = ["art/dog/a.jpg", "art/cat/a.jpg"]
    with pytest.raises(UserError, match="nowhere is no folder"):
        match_masks(tmp_path / "nowhere", images)
    with pytest.raises(UserError, match="holds 0 PNG files"):
        match_masks(tmp_path, images)
    save(tmp_path / "c.png", [[0]])
    with pytest.raises(UserError, match="1 PNG files below it, but none that is named like a test image, art/dog/a"):
        match_masks(tmp_path, images)
    with pytest.raises(UserError, match="by the number of a test image, 0.png to 1.png"):
        match_masks(tmp_path, ["0", "1"])
    save(tmp_path / "a.png", [[0]])
    with pytest.raises(UserError, match=r"a.png fits several test images \(art/dog/a.jpg, art/cat/a.jpg\)"):
        match_masks(tmp_path, images)
    save(tmp_path / "twice/dog/a.png", [[0]])
    save(tmp_path / "twice/art/dog/a.png", [[0]])
    with pytest.raises(UserError, match="both fit test image art/dog/a.jpg"):
        match_masks(tmp_path / "twice", images)


def test_label_images_are_read_as_numbers(tmp_path, monkeypatch):
    for mode in ("P", "L"):
        path = save(tmp_path / f"{mode}.png", [[0, 15, 255]], mode)
        assert read_mask(path, 3, 1).tolist() == [[0, 15, 255]]
    with pytest.raises(UserError, match="is 3 x 1 pixels, but its image is 4 x 1"):
        read_mask(path, 4, 1)
    Image.new("RGB", (3, 1)).save(tmp_path / "colours.png")
    with pytest.raises(UserError, match=r"holds colours \(RGB\), not class numbers"):
        read_mask(tmp_path / "colours.png", 3, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(UserError, match=r"P.png cannot be read as an image .*exceeds limit"):
        read_mask(tmp_path / "P.png", 3, 1)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UserError, match=r"text.png cannot be read as an image"):
        read_mask(tmp_path / "text.png", 3, 1)
    (tmp_path / "labels.json").write_text('["background"]')
    with pytest.raises(UserError, match="labels.json is not of the form"):
        read_names(tmp_path)


# -- on runs: test_run_report.py has those on digits with files --------------------------------------------------------


def test_image_folders_with_masks(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "save", lambda figure, path: path.touch())  # drawing is another test's
    with pytest.warns(UserWarning, match="not VLCS's"):
        data = make_benchmark(tmp_path, "vlcs", per_class=2, size=32)
        words = [
            "--data.task",
            "vlcs",
            "--data.root",
            str(data),
            "--data.held_out",
            "SUN09",
            "--data.image_size",
            "32",
            "--model.backbone",
            "vit_tiny_patch16_224",
            "--model.pretrained",
            "none",
            "--model.layers",
            "[11]",
            "--model.num_experts",
            "2",
            "--data.batch_size",
            "1",
            "--steps",
            "1",
            "--eval_every",
            "1",
            "--progress",
            "false",
            "--optim.warmup_steps",
            "0",
            "--output",
            str(tmp_path / "run"),
        ]
        job = run_job(tmp_path / "logs", 1, words, timeout=200)
        assert job.statuses == [0], job.output
        masks = tmp_path / "masks"
        for image in (data / "SUN09").rglob("*.jpg"):
            halves = np.repeat([[1, 2]], 32, 0).repeat(16, 1)
            save(masks / image.relative_to(data / "SUN09").with_suffix(".png"), halves)
        analyze.main([str(tmp_path / "run"), "--masks", str(masks)])
    page = (tmp_path / "run/analysis-masks/report.html").read_text()
    (numbers,) = json.loads((tmp_path / "run/analysis-masks/numbers.json").read_text())["runs"]
    found = numbers["elements"]
    (usage,) = found["layers"].values()
    assert 1 <= found["images"] <= 5 and usage["elements"] == [1, 2]
    assert usage["patches"] == [2 * found["images"]] * 2  # two of four patches each
    assert "Masks are those of the folder masks" in page


def test_stroke_and_background_of_digits():
    """The rule of the caption, on the data: a pixel is stroke above 0.3, a patch of 8 x 8 by its majority."""
    from unifmoe_dist.studies.run_report.sample import Sample, ink_masks

    class Run:
        task = digits_task()
        model = task.build_model()
        facts = find_task("digits")
        device = torch.device("cpu")

    run = Run()
    found = ink_masks(run, Sample(run, [(0, 3), (0, 8)]))  # type: ignore[arg-type]
    for item, index in enumerate((3, 8)):
        stroke = run.task.test[0][index][0][0] * STD + MEAN > 0.3
        share = stroke.view(2, 8, 2, 8).double().mean((1, 3))
        assert found.elements[item].tolist() == (share > 0.5).long().tolist()
