"""What a UniF-MoE run's layers use for each semantic element of its test images, after the paper's element figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unifmoe_dist.data.images import ImageDataset
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.figures.maps import element_figure
from unifmoe_dist.studies.page import Block, Cell, Number, Picture, Section, Table
from unifmoe_dist.studies.run_report.loading import LoadedRun
from unifmoe_dist.studies.run_report.sample import Place, Sample, draw_sample, pixels, test_places
from unifmoe_dist.studies.usage.capture import Capture, capture
from unifmoe_dist.studies.usage.maps import ElementUsage, PatchGrid, element_usage
from unifmoe_dist.studies.usage.masks import VOID, match_masks, patch_elements, read_mask, read_names

MOST_DRAWN = 12
"""Elements of the figure; the table has all."""


@dataclass(frozen=True)
class Masks:
    """Elements of the patches of some of a run's test images.

    Args:
        sample: Those images.
        elements: (items, rows, columns) int64, as `patch_elements` gives them.
        names: Of the elements; one without a name goes by its number.
        origin: Where they come from, as sentences for readers.
        given: Whether they were read from files.
    """

    sample: Sample
    elements: Tensor
    names: Mapping[int, str]
    origin: str
    given: bool

    def name(self, element: int) -> str:
        return self.names.get(element, str(element))


@dataclass(frozen=True)
class ElementStudy:
    """Usage by element, layer by layer."""

    masks: Masks
    usage: Mapping[str, ElementUsage]

    def record(self) -> dict[str, Any]:
        """Every number."""
        return {
            "images": len(self.masks.sample.places),
            "from_files": self.masks.given,
            "names": {number: self.masks.name(number) for usage in self.usage.values() for number in usage.elements},
            "layers": {layer: asdict(usage) for layer, usage in self.usage.items()},
        }


def read_masks(run: LoadedRun, folder: Path, most_tokens: int, most_items: int | None) -> Masks:
    """The masks of a folder that belong to a run's test images (`studies/usage/masks.py` has the format).

    Args:
        run: A run on images.
        folder: Of the masks.
        most_tokens: Tokens that are looked at, at most.
        most_items: Images that are looked at, in place of a number of tokens.

    Raises:
        UserError: The run is one on text, or masks are missing, unreadable or of the wrong size.
    """
    if run.is_text:
        raise UserError(f"--masks is for images, but {run.name} was trained on text; leave it out.")
    places = test_places(run)
    found = match_masks(folder, [_image_name(run, place) for place in places])
    files = {places[index]: path for index, path in found.items()}
    sample = draw_sample(run, most_tokens, most_items, among=list(files))
    grid = PatchGrid.of(run.model)
    elements = torch.stack(
        [
            patch_elements(read_mask(files[place], *_image_size(run, place)), grid.rows, grid.columns)
            for place in sample.places
        ]
    )
    if (elements < 0).all():
        raise UserError(f"the masks below --masks {folder} name no element: every patch shows mostly {VOID}.")
    origin = (
        f"Masks are those of the folder {folder.name}: {len(found):,} of {len(places):,} test images have one, and "
        f"{len(sample.places):,} of these are looked at. A patch counts for the class that most of its pixels show "
        f"(ties: the lower number); patches that show mostly {VOID} are left out."
    )
    return Masks(sample, elements, read_names(folder), origin, True)


def ink_masks(run: LoadedRun, sample: Sample) -> Masks:
    """Stroke and background of digits: what a mask can be without anyone drawing it."""
    level = find_task(run.config.data.task).stroke_above
    assert level is not None
    grid = PatchGrid.of(run.model)
    inputs, _ = sample.batch(len(sample.places))
    bright = (pixels(run, inputs["x"])[:, 0] > level).long().numpy()
    elements = torch.stack([patch_elements(image, grid.rows, grid.columns) for image in bright])
    origin = (
        f"Digits have no masks of parts, so this one is made from the pixels: a pixel above {level:g} (of 1, about the "
        "mean of the data) is stroke, any other is background, and a patch counts for what most of its pixels "
        "are. Patches are large beside strokes here: read it as patches with much ink against patches with "
        "little. --masks FOLDER takes label images instead."
    )
    return Masks(sample, elements, {0: "background", 1: "stroke"}, origin, False)


def _image_name(run: LoadedRun, place: Place) -> str:
    """Path of an image's file, or its number where images have none."""
    data = run.task.test[place[0]]
    return str(data.folder.file(int(data.rows[place[1]]))) if isinstance(data, ImageDataset) else str(place[1])


def _image_size(run: LoadedRun, place: Place) -> tuple[int, int]:
    """Width and height of an image as it is stored."""
    data = run.task.test[place[0]]
    if isinstance(data, ImageDataset):
        with Image.open(data.folder.file(int(data.rows[place[1]]))) as image:
            return image.size
    height, width = data[place[1]][0].shape[-2:]
    return width, height


def study_elements(run: LoadedRun, masks: Masks, captured: Mapping[str, Capture]) -> ElementStudy:
    """Group what UniF-MoE layers decide by element.

    Args:
        run: The run.
        masks: Masks of its images.
        captured: Routing of these layers on the images of `masks`, if that was captured; empty captures it now.
    """
    if not captured:
        captured = capture(run.model, run.layers, masks.sample.batches(f"{run.name}: elements"))
    grid = PatchGrid.of(run.model)
    return ElementStudy(masks, {name: element_usage(one, grid, masks.elements) for name, one in captured.items()})


def element_sections(run: LoadedRun, found: ElementStudy | None, prefix: str) -> list[Section]:
    """A table and a figure for every layer; nothing without masks."""
    if found is None:
        return []
    masks = found.masks
    kinds = torch.tensor([len(one.unique()) for one in masks.elements])
    shown = int(kinds.argmax())  # an image that shows many elements
    image = pixels(run, run.task.collate(masks.sample.items(shown, 1))[0]["x"])[0]
    blocks: list[Block] = [masks.origin]
    for number, (layer, usage) in enumerate(found.usage.items(), start=1):
        drawn = usage.most_common(MOST_DRAWN)
        caption = (
            "Above: one of the images, and the element of each of its patches. Below: within each element (a row; in "
            "brackets its number of patches, over all images), how its shared blocks and its residual experts are "
            "divided, in percent. Rows that look alike mean that the layer does not tell the elements apart."
        )
        if len(drawn.elements) < len(usage.elements):
            caption += f" The {MOST_DRAWN} most common of {len(usage.elements)} elements are drawn."
        figure = element_figure(image, masks.elements[shown], drawn, list(map(masks.name, drawn.elements)))
        title = f"Shared blocks and residual experts by element, {layer}"
        blocks.append(_element_table(masks, layer, usage, f"{prefix}elements-{number}"))
        blocks.append(Picture(f"{prefix}element-usage-{number}", title, caption, figure))
    return [Section("Usage by semantic element", blocks)]


def _element_table(masks: Masks, layer: str, usage: ElementUsage, name: str) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "element": masks.name(element),
            "patches": Number(usage.patches[i], ",d"),
            "C_B": Number(float(usage.compute[i])),
            "α": Number(float(usage.shared_demand[i])),
            "b": Number(float(usage.shared_block_count[i])),
            "k": Number(float(usage.expert_count[i])),
            **{f"E{e}": Number(share, ".0%") for e, share in enumerate(usage.experts[i].tolist())},
        }
        for i, element in enumerate(usage.elements)
    ]
    caption = (
        f"{layer}: means over the patches of each element of executed blocks C_B, shared demand α, shared blocks b "
        "and residual experts k; then the share of the element's residual-expert activations that goes to each "
        "expert, E0 to the last (a row's shares add up to 100 %)."
    )
    return Table(name, caption, rows)
