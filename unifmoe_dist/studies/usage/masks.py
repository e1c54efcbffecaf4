"""Masks of semantic elements: label images as files, found for given images, and reduced to patches.

A folder of masks holds one PNG per image with a class number per pixel: a palette image, as Pascal VOC's, or a grey
one. 255 marks pixels that belong to no class. `labels.json` in that folder may name classes: {"0": "background", ...}.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unifmoe_dist.errors import UserError

VOID = 255
"""Pixels without a class, as in Pascal VOC."""

NO_ELEMENT = -1
"""A patch that shows no class."""

LABELS = "labels.json"


def patch_elements(labels: np.ndarray, rows: int, columns: int) -> Tensor:
    """(rows, columns) int64: the class that most pixels of each patch show, or NO_ELEMENT where that is VOID.

    Ties go to the lower number. A pixel of the labels (height, width) is of the patch that holds its centre; patches
    need not be whole pixels.
    """
    for axis, least in enumerate((rows, columns)):  # every patch has to hold some pixel's centre
        labels = labels.repeat(-(-least // labels.shape[axis]), axis=axis)
    height, width = labels.shape
    row = (2 * np.arange(height) + 1) * rows // (2 * height)
    column = (2 * np.arange(width) + 1) * columns // (2 * width)
    classes, place = np.unique(labels, return_inverse=True)
    cell = (row[:, None] * columns + column) * len(classes) + place.reshape(labels.shape)
    counts = np.bincount(cell.ravel(), minlength=rows * columns * len(classes))
    most = classes[counts.reshape(rows * columns, len(classes)).argmax(1)].astype(np.int64)
    return torch.from_numpy(np.where(most == VOID, NO_ELEMENT, most)).view(rows, columns)


def match_masks(folder: Path, images: Sequence[str]) -> dict[int, Path]:
    """Mask files by index of their image; images without one are left out, and so are masks without an image.

    A mask belongs to the image whose path ends with the mask's path inside the folder, suffixes apart: a/b/c.png to
    .../a/b/c.jpg. Names that are numbers are compared as numbers: 0017.png belongs to 17.

    Raises:
        UserError: There is no such folder or no PNG in it, a mask fits several images or an image several masks, or no
            mask fits.
    """
    if not folder.is_dir():
        raise UserError(f"--masks {folder} is no folder; give one that holds a PNG with class numbers per image.")
    by_tail: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        parts = _parts(image)
        for length in range(1, len(parts) + 1):
            by_tail[parts[-length:]].append(index)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".png" and path.is_file())
    found: dict[int, Path] = {}
    for path in files:
        fits = by_tail.get(_parts(str(path.relative_to(folder))), [])
        if len(fits) > 1:
            raise UserError(
                f"mask {path} fits several test images ({images[fits[0]]}, {images[fits[1]]}); put masks into folders "
                "named like those of the images."
            )
        for index in fits:
            if index in found:
                raise UserError(f"masks {found[index]} and {path} both fit test image {images[index]}; remove one.")
            found[index] = path
    if not found:
        first = PurePath(images[0])
        named = f"like a test image, {first.with_suffix('.png')}"
        if images[0].isdecimal():
            named = f"by the number of a test image, {images[0]}.png to {images[-1]}.png"
        raise UserError(f"--masks {folder} holds {len(files)} PNG files below it, but none that is named {named}.")
    return found


def _parts(path: str) -> tuple[str, ...]:
    *folders, name = PurePath(path).with_suffix("").parts
    return (*folders, str(int(name)) if name.isdecimal() else name)


def read_mask(path: Path, width: int, height: int) -> np.ndarray:
    """(height, width) class numbers of a label image.

    Raises:
        UserError: It cannot be read, holds colours in place of numbers, or has another size than its image.
    """
    try:
        with Image.open(path) as image:
            mode, labels = image.mode, np.asarray(image)  # read here: the file is closed later
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"mask {path} cannot be read as an image ({error}).") from error
    if mode not in ("P", "L", "1", "I", "I;16"):
        raise UserError(f"mask {path} holds colours ({mode}), not class numbers; save it as a palette or grey PNG.")
    if labels.shape != (height, width):
        raise UserError(
            f"mask {path} is {labels.shape[1]} x {labels.shape[0]} pixels, but its image is {width} x {height}; "
            "masks need the size of the image's file, without smoothing."
        )
    return labels.astype(np.int64)


def read_names(folder: Path) -> Mapping[int, str]:
    """Names of classes from labels.json; empty without that file.

    Raises:
        UserError: It is no JSON object of numbers and names.
    """
    path = folder / LABELS
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        return {int(number): str(name) for number, name in content.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f'{path} is not of the form {{"0": "background", "1": "person"}} ({error}).') from error
