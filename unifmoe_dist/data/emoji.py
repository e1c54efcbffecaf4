"""Emoji by who drew them, each maker held out in turn: a shift of style as in PACS, on images that packages ship.

    noto        Google's Noto Emoji
    twemoji     Twitter's Twemoji
    openmoji    OpenMoji, outlined and smaller
    fluent      Microsoft's Fluent Emoji, flat

The 1,377 emoji that all four drew, in eight categories of Unicode: flags, skin tones and sequences of several emoji,
such as a man or a woman who runs, are left out. Images are 32 x 32 in colour, on grey.
"""

import hashlib
import importlib.util
import io
import json
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.digits import DigitsDataset, build_digits_vit
from unifmoe_dist.data.task import Task, TaskData, collate_images, find_environment, split_seed
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing

PACKAGES = {
    "noto": ("noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    "twemoji": ("twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"),
    "openmoji": ("openmoji", "1.2.29", "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5"),
    "fluent": ("fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"),
}
"""By maker: name in npm's scope @iconify-json, version, and SHA-256 of the archive that `npm pack` leaves."""

ARCHIVES = {maker: f"iconify-json-{name}-{version}.tgz" for maker, (name, version, _) in PACKAGES.items()}
PACK = "npm pack " + " ".join(f"@iconify-json/{name}@{version}" for name, version, _ in PACKAGES.values())
LICENCES = """\
noto: Noto Emoji, Google, Apache-2.0
twemoji: Twemoji, Twitter and other contributors, CC BY 4.0
openmoji: OpenMoji, the open-source emoji and icon project, CC BY-SA 4.0
fluent: Fluent Emoji, Microsoft, MIT"""
MAKERS = tuple(PACKAGES)
CATEGORIES = (
    "Smileys & Emotion",
    "People & Body",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
    "Symbols",
)
"""As the package of Noto has them."""

PREPARED = Path("data", "emoji")
DRAWN = "emoji-32.npz"
IMAGE_SIZE = 32
MEAN, STD = 0.5, 0.3
"""Pixel statistics (of values in 0..1), rounded: constants, so no maker leaks into another's scale."""

_TONES = {"1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}
_JOINER = "200d"
VIT_CFG = {
    "architecture": "emoji_vit",
    "num_classes": len(CATEGORIES),
    "input_size": (3, IMAGE_SIZE, IMAGE_SIZE),
    "fixed_input_size": True,
    "interpolation": "bilinear",
    "mean": (MEAN,) * 3,
    "std": (STD,) * 3,
    "first_conv": "patch_embed.backbone.0",
    "classifier": "head",
}
"""The backbone, as timm's registry describes it."""


class Emoji(Task):
    """Emoji in the registry of tasks: none is seen in training, in any style, that tests or validates."""

    title = "Emoji"
    num_classes = len(CATEGORIES)
    class_names = CATEGORIES
    environments = MAKERS
    ignored = ("model.backbone", "model.pretrained", "model.dropout", "model.drop_path", "data.image_size")
    mean, std = (MEAN,) * 3, (STD,) * 3
    backbone_sizes = 0.31e6, 64, 256
    disk_gb = 0.02
    method_options = dict.fromkeys(("emoe", "emoe-learn"), {"model.num_experts": 16, "model.top_k": 3})

    def read(self, config: TrainConfig) -> TaskData:
        """Items are `(image (3, 32, 32) float32, label int)`; the model is called as `model(x=images)`."""
        held = find_environment(config.data.held_out, self.title, MAKERS)
        images, labels = drawings(config.data.root)
        cuts = [self.cut(len(labels), split_seed(config), maker) for maker in range(len(MAKERS))]

        def rows(maker: int, part: int) -> DigitsDataset:
            chosen = cuts[maker][part]
            return DigitsDataset(images[maker][chosen], labels[chosen], chosen)

        kept = [maker for maker in range(len(MAKERS)) if maker != held]
        return TaskData(
            name=self.name,
            num_classes=self.num_classes,
            train=[rows(maker, 0) for maker in kept],
            validation=[rows(maker, 1) for maker in kept],
            test=[rows(held, 2)],
            environments=tuple(MAKERS[maker] for maker in kept),
            collate=collate_images,
            build_model=build_emoji_vit,
            augment=move_and_mirror,
        )

    def cut(self, count: int, seed: int, maker: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of emoji that train (60 %), validate (15 %) and test (25 %) where they are of this maker."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))  # the same for every maker
        first, second = int(0.6 * count), int(0.75 * count)
        return order[:first], order[first:second], order[second:]

    def untrained(self, config: TrainConfig) -> nn.Module:
        return build_emoji_vit()

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        return 3, IMAGE_SIZE, IMAGE_SIZE

    def prepare(self, archives: Sequence[Path], root: Path | None, progress: bool) -> str:
        """Draw the emoji of the four packages, found here or in data/, or named, into one file; takes a minute."""
        folder = root or PREPARED
        sets = {maker: _open(_find(maker, archives)) for maker in MAKERS}
        images, labels = draw_all(sets)
        folder.mkdir(parents=True, exist_ok=True)
        with appearing(folder / DRAWN) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, images=images, labels=labels)
        given = "" if root is None else f" --data.root {shlex.quote(str(root))}"
        return (
            f"{LICENCES}\n{folder / DRAWN} has {len(labels)} emoji of each maker (pixels "
            f"{hashlib.sha256(images.tobytes()).hexdigest()[:12]}); train with: deepspeed launch/train.py --config "
            f"configs/emoji.yaml{given}"
        )


class EmojiSeen(Emoji):
    """DomainBed's protocol: every maker is cut 80/20 by itself, so an emoji that tests was seen in other styles."""

    title = "Emoji, seen in other styles"
    base_config = "emoji.yaml"

    def cut(self, count: int, seed: int, maker: int) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(len(MAKERS) * seed + maker))
        inside, outside = order[: int(0.8 * count)], order[int(0.8 * count) :]
        return inside, outside, inside


@cache
def drawings(root: str | None) -> tuple[Tensor, Tensor]:
    """Images (makers, emoji, 3, 32, 32), normalised, and labels (emoji,), as `prepare` left them.

    Raises:
        UserError: they are not there, or the file is damaged.
    """
    file = Path(root or PREPARED) / DRAWN
    again = f"run `{PACK}` (7 MB), `pip install resvg-py` and `python launch/data.py prepare emoji`" + (
        f" --root {shlex.quote(root)}" if root else ""
    )
    if not file.is_file():
        raise UserError(f"{file} is not there; {again}.")
    try:
        with np.load(file) as arrays:
            images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file} is damaged ({error}); {again}.") from error
    return (images.float() / 255 - MEAN) / STD, labels


def build_emoji_vit() -> nn.Module:
    """The ViT of digits for `(N, 3, 32, 32)` images: 16 patches; logits are `(N, 8)`."""
    model = build_digits_vit(channels=3, image_size=IMAGE_SIZE, num_classes=len(CATEGORIES))
    model.pretrained_cfg = VIT_CFG  # type: ignore[assignment]
    return model


def move_and_mirror(item: tuple[Tensor, int], generator: torch.Generator) -> tuple[Tensor, int]:
    """Move the image of a training item by up to 3 pixels along each axis, and mirror every other one."""
    image, label = item
    row, column, mirrored = torch.randint(0, 7, (3,), generator=generator).tolist()
    moved = F.pad(image, (3, 3, 3, 3))[:, row : row + IMAGE_SIZE, column : column + IMAGE_SIZE]  # 0 is the grey
    return (moved.flip(2) if mirrored % 2 else moved), label


def draw_all(sets: Mapping[str, Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Images (makers, emoji, 3, 32, 32) uint8 and labels (emoji,) int64 of what all makers drew, by code point."""
    names = [found["chars"] for found in sets.values()]
    shared = sorted(set.intersection(*(set(own) for own in names)))
    labels = {name: label for label, kind in enumerate(CATEGORIES) for name in sets[MAKERS[0]]["categories"][kind]}
    chosen = [
        code for code in shared if names[0][code] in labels and not {_JOINER, *_TONES}.intersection(code.split("-"))
    ]
    images = [[_draw(svg(found["icons"], found["chars"][code])) for code in chosen] for found in sets.values()]
    return np.array(images), np.array([labels[names[0][code]] for code in chosen])


def svg(icons: Mapping[str, Any], name: str) -> str:
    """One emoji of a set as a square picture."""
    while name in icons.get("aliases", {}):
        name = icons["aliases"][name]["parent"]
    icon = icons["icons"][name]
    box = [icon.get(side, icons.get(side, 0)) for side in ("left", "top", "width", "height")]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{IMAGE_SIZE}" height="{IMAGE_SIZE}" viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'
    )


def _draw(picture: str) -> np.ndarray:
    """(3, 32, 32) uint8, on grey."""
    if importlib.util.find_spec("resvg_py") is None:
        raise UserError("resvg-py, which draws the emoji, is not installed: pip install resvg-py.")
    from PIL import Image
    from resvg_py import svg_to_bytes

    drawn = Image.open(io.BytesIO(bytes(svg_to_bytes(svg_string=picture, skip_system_fonts=True)))).convert("RGBA")
    page = Image.new("RGBA", drawn.size, (round(255 * MEAN),) * 3 + (255,))
    return np.asarray(Image.alpha_composite(page, drawn).convert("RGB")).transpose(2, 0, 1)


def _find(maker: str, archives: Sequence[Path]) -> Path:
    name = ARCHIVES[maker]
    for file in [file for file in archives if file.name == name] if archives else [Path(name), Path("data", name)]:
        if file.is_file():
            return file
    where = "--archive names no" if archives else "there is no"
    raise UserError(f"{where} {name}: run `{PACK}` (7 MB) here, or name all four files with --archive.")


def _open(archive: Path) -> dict[str, Any]:
    """Drawings, their names by code point, and names by category.

    Raises:
        UserError: the archive is unreadable, or another one than results are of.
    """
    try:
        content = archive.read_bytes()
    except OSError as error:
        raise UserError(f"{archive} cannot be read: {error.strerror}.") from error
    wanted = next(sha256 for maker, (*_, sha256) in PACKAGES.items() if ARCHIVES[maker] == archive.name)
    if (found := hashlib.sha256(content).hexdigest()) != wanted:
        raise UserError(f"{archive} is another file (sha256 {found[:12]}) than results are of ({wanted[:12]}).")
    with tarfile.open(fileobj=io.BytesIO(content)) as package:

        def read(name: str) -> Any:
            file = package.extractfile(f"package/{name}.json")
            return json.load(file) if file else {}

        return {"icons": read("icons"), "chars": read("chars"), "categories": read("metadata")["categories"]}
