"""Image files as tensors: decoding, and the transforms of DomainBed."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torchvision import transforms

from unifmoe_dist.data.benchmarks import MEAN, STD
from unifmoe_dist.data.image_folders import ImageFolder
from unifmoe_dist.errors import UserError

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""What a file may hold, whatever its name says. Pillow would hand others, such as EPS, to other programs."""

_lenient = threading.Lock()


class ImageDataset(Dataset):
    """Rows (N,) of an environment; items are `(transform(image), label)`.

    Without a transform they hold the decoded PIL image, for augmentation to turn into a tensor.
    """

    def __init__(
        self, folder: ImageFolder, rows: np.ndarray, transform: Callable[[Image.Image], Tensor] | None
    ) -> None:
        self.folder, self.rows, self.transform = folder, rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = int(self.rows[index])
        image = read_image(self.folder.file(row))
        return image if self.transform is None else self.transform(image), int(self.folder.labels[row])


class NotAnImage(ValueError):
    """A file that cannot be decoded, and why."""


def read_image(path: Path) -> Image.Image:
    """Decode an image as RGB. A truncated file keeps what it has and is grey below, as in DomainBed.

    Raises:
        UserError: the file is missing or is no image.
    """
    try:
        return decode(path)[0]
    except NotAnImage as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}); `python launch/data.py verify DATASET --root DIR` lists all "
            "such files."
        ) from error


def decode(path: Path) -> tuple[Image.Image, bool]:
    """An image as RGB, and whether the file is whole.

    Raises:
        NotAnImage: not even a part of it can be decoded.
    """
    try:
        try:
            return _decode(path), True
        except UnidentifiedImageError:
            raise
        except OSError:  # truncated, most likely
            return _decode_truncated(path), False
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's readers raise
        raise NotAnImage(str(error)) from error


def _decode(path: Path) -> Image.Image:
    with Image.open(path, formats=FORMATS) as image:
        if image.mode[0] in "IF":
            return _deep_grey(image).convert("RGB")
        return image.convert("RGB")


def _deep_grey(image: Image.Image) -> Image.Image:
    """A grey image of more than 8 bits as one of 8: Pillow itself would clip it, so that nearly all of it were white.

    Raises:
        NotAnImage: it has 32 bits, which say nothing about what white is, and its values are not those of 8 bits.
    """
    values = np.asarray(image)
    if image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PNG", "PPM"):  # always 16 bits there
        _tell_once(
            "warning: grey images of 16 bits are scaled to 8 here; DomainBed clips them to nearly white, so results on "
            "these data are not to be compared with its own."
        )
        return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not (low >= 0 and high <= 255) or image.mode == "F" and 0 < high <= 1:
        raise NotAnImage(
            f"its pixels are 32-bit numbers from {low:g} to {high:g}, which do not say what white is; save it with "
            "8 or 16 bits"
        )
    return image


_told = False
_told_anywhere: Any = None  # a flag that the job's own process shares with all that read for it


def told_anywhere() -> Any:
    """The flag that `know` takes, made at first use."""
    global _told_anywhere
    if _told_anywhere is None:
        _told_anywhere = multiprocessing.get_context("forkserver").Value(c_bool, _told)
    return _told_anywhere


def know(flag: Any) -> None:
    """In a process that reads images for another: say nothing that was said there, or in one beside this."""
    global _told_anywhere
    _told_anywhere = flag


def _tell_once(line: str) -> None:
    """Print a line once per job: on rank 0, by whichever process that reads for it comes first."""
    global _told
    reads = get_worker_info() is not None or multiprocessing.parent_process() is None
    if _told or not reads or os.environ.get("RANK", "0") != "0":
        return
    _told = True
    if _told_anywhere is not None:
        with _told_anywhere.get_lock():
            if _told_anywhere.value:
                return
            _told_anywhere.value = True
    print(line, file=sys.stderr, flush=True)


def _decode_truncated(path: Path) -> Image.Image:
    with _lenient:  # the switch is global in Pillow
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            return _decode(path)
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


@dataclass(frozen=True)
class EvaluationTransform:
    """PIL image -> (3, size, size) float32: resized directly, whatever its shape, and normalised."""

    size: int

    def __call__(self, image: Image.Image) -> Tensor:
        return self._steps(image)

    @cached_property
    def _steps(self) -> transforms.Compose:
        return transforms.Compose([transforms.Resize((self.size, self.size)), *_to_tensor()])


@dataclass(frozen=True)
class TrainingTransform:
    """`(PIL image, label), generator -> ((3, size, size) float32, label)`, with DomainBed's augmentation.

    Random resized crop to 0.7 to 1 of the area, horizontal flip, colour jitter of 0.3 (brightness, contrast, saturation
    and hue), greyscale with probability 0.1. The generator is the only source of randomness.
    """

    size: int

    def __call__(self, item: tuple[Image.Image, int], generator: torch.Generator) -> tuple[Tensor, int]:
        with _drawing_from(generator):
            return self._steps(item[0]), item[1]

    @cached_property
    def _steps(self) -> transforms.Compose:
        return transforms.Compose(
            [
                transforms.RandomResizedCrop(self.size, scale=(0.7, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
                transforms.RandomGrayscale(),
                *_to_tensor(),
            ]
        )


def _to_tensor() -> list[Callable]:
    return [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Have torch's global CPU generator, which torchvision draws from, be this one for a while."""
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)
