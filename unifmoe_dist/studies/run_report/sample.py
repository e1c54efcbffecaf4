"""Some of a run's test data, drawn once and by the same seed for every run: what its layers are watched on; and the
semantic elements that the patches of its images show."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unifmoe_dist.data.images import ImageDataset
from unifmoe_dist.data.task import Batch, plain
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.heartbeat import followed
from unifmoe_dist.studies.run_report.loaded_run import LoadedRun
from unifmoe_dist.studies.usage.layer_usage import PatchGrid
from unifmoe_dist.studies.usage.masks import VOID, match_masks, patch_elements, read_mask, read_names
from unifmoe_dist.train.nested import to_device

MOST_TOKENS = 20_000
SEED = 0
IMAGES = 8
"""That are shown one by one."""

Place = tuple[int, int]
"""Data set of a task's test data, and index in it."""


@dataclass(frozen=True)
class Sample:
    """Items of a run's test data in the order in which they are seen."""

    run: LoadedRun
    places: list[Place]

    def items(self, first: int, count: int) -> list[Any]:
        """Items of the task, not collated."""
        return [self.run.task.test[data][index] for data, index in self.places[first : first + count]]

    def batch(self, count: int) -> Batch:
        """The first `count` items, or all if there are fewer, on the run's device."""
        inputs, labels = self.run.task.collate(self.items(0, count))
        return to_device(inputs, self.run.device, torch.float32), labels

    def titles(self, count: int) -> list[str]:
        """Of the first items the names of their classes, or of their domains where every token has a label."""
        if self.run.facts.next_token:
            return [self.run.task.domains["test"][data] for data, _ in self.places[:count]]
        names = label_names(self.run)
        return [names[int(item[-1])] for item in self.items(0, count)]

    def batches(self, progress: str) -> Iterator[dict[str, Tensor]]:
        """Model inputs of all items; `progress` names the bar that a terminal shows."""
        size = self.run.config.data.eval_batch_size
        for first in followed(range(0, len(self.places), size), progress):
            inputs, _ = self.run.task.collate(self.items(first, size))
            yield to_device(inputs, self.run.device, torch.float32)


def _places(run: LoadedRun) -> list[Place]:
    """All items of a run's test data, in order."""
    return [(data, index) for data, items in enumerate(run.task.test) for index in range(len(items))]  # type: ignore[arg-type]


def places_of(run: LoadedRun, of_class: str | None) -> list[Place]:
    """The test images of a class, by its name or number; all of them where none is named.

    Raises:
        UserError: there is no such class, none of the test images is of it, or the run is one on text.
    """
    if run.is_text:
        raise UserError(f"--class and --images are for images, but {run.name} was trained on text; leave them out.")
    places = _places(run)
    if of_class is None:
        return places
    names = label_names(run)
    spelled, wanted = [plain(name) for name in names], plain(of_class)
    if wanted not in spelled and not (wanted.isdecimal() and int(wanted) < len(names)):
        raise UserError(f"--class {of_class!r} is no class of {run.facts.title}; give one of {', '.join(names)}.")
    label = spelled.index(wanted) if wanted in spelled else int(wanted)
    found = [place for place in places if _label(run, place) == label]
    if not found:
        raise UserError(f"no test image of {run.name} is of the class {names[label]}; choose another --class.")
    return found


def _label(run: LoadedRun, place: Place) -> int:
    data = run.task.test[place[0]]
    if isinstance(data, ImageDataset):  # without opening the image
        return int(data.folder.labels[data.rows[place[1]]])
    return int(data[place[1]][-1])


def draw_sample(
    run: LoadedRun, most_tokens: int = MOST_TOKENS, most_items: int | None = None, among: Sequence[Place] | None = None
) -> Sample:
    """Items at random, as many as have at most so many tokens together, or so many items; at least one.

    Padding does not count. `among` are the items to choose from, by default all.
    """
    places = list(_places(run) if among is None else among)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(SEED)).tolist()
    places = [places[i] for i in order]
    if most_items is None and not run.is_text:
        most_items = most_tokens // PatchGrid.of(run.model).tokens
    elif most_items is None:
        tokens = accumulate(len(run.task.test[data][index][0]) for data, index in places)
        most_items = sum(1 for _ in takewhile(lambda total: total <= most_tokens, tokens))
    return Sample(run, places[: max(1, most_items)])


def pixels(run: LoadedRun, images: Tensor) -> Tensor:
    """Images (n, channels, height, width) as they were before normalisation, in 0..1, on the CPU."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (run.facts.mean, run.facts.std))
    return (images.cpu() * std + mean).clamp(0, 1)


def label_names(run: LoadedRun) -> tuple[str, ...]:
    """Names of the task's classes, or their numbers."""
    return run.facts.class_names or tuple(str(number) for number in range(run.task.num_classes))


@dataclass(frozen=True)
class Masks:
    """Elements of the patches of some of a run's test images."""

    sample: Sample  # those images
    elements: Tensor  # (items, rows, columns) int64, as `patch_elements` gives them
    names: Mapping[int, str]  # one without a name goes by its number
    folder: Path | None = None  # of the files that they were read from; None for those made from the pixels
    found: int = 0  # of the test images that have a mask there
    of: int = 0  # test images

    def name(self, element: int) -> str:
        return self.names.get(element, str(element))


def read_masks(run: LoadedRun, folder: Path, most_tokens: int, most_items: int | None) -> Masks:
    """The masks of a folder (`studies/usage/masks.py` has the format) that belong to as many test images of a run.

    Raises:
        UserError: The run is one on text, or masks are missing, unreadable or of the wrong size.
    """
    if run.is_text:
        raise UserError(f"--masks is for images, but {run.name} was trained on text; leave it out.")
    places = _places(run)
    found = match_masks(folder, [str(_image_file(run, place) or place[1]) for place in places])
    files = {places[index]: path for index, path in found.items()}
    sample = draw_sample(run, most_tokens, most_items, among=list(files))
    labels = (read_mask(files[place], *_image_size(run, place)) for place in sample.places)
    grid = PatchGrid.of(run.model)
    elements = torch.stack([patch_elements(label, grid.rows, grid.columns) for label in labels])
    if (elements < 0).all():
        raise UserError(f"the masks below --masks {folder} name no element: every patch shows mostly {VOID}.")
    return Masks(sample, elements, read_names(folder), folder, len(found), len(places))


def ink_masks(run: LoadedRun, sample: Sample) -> Masks:
    """Stroke and background of digits: what a mask can be without anyone drawing it."""
    level = run.facts.stroke_above
    assert level is not None
    grid = PatchGrid.of(run.model)
    inputs, _ = sample.batch(len(sample.places))
    bright = (pixels(run, inputs["x"])[:, 0] > level).long().numpy()
    elements = torch.stack([patch_elements(image, grid.rows, grid.columns) for image in bright])
    return Masks(sample, elements, {0: "background", 1: "stroke"})


def _image_file(run: LoadedRun, place: Place) -> Path | None:
    data = run.task.test[place[0]]
    return Path(data.folder.file(int(data.rows[place[1]]))) if isinstance(data, ImageDataset) else None


def _image_size(run: LoadedRun, place: Place) -> tuple[int, int]:
    """Width and height of an image as it is stored."""
    if file := _image_file(run, place):
        with Image.open(file) as image:
            return image.size
    height, width = run.task.test[place[0]][place[1]][0].shape[-2:]
    return width, height
