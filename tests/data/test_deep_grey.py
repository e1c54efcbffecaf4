"""Grey images of more than 8 bits: as bright as they are, or refused; never clipped to white."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unifmoe_dist.data import images
from unifmoe_dist.data.images import NotAnImage, decode, read_image

ROOT = Path(__file__).parents[2]
RAMP = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)


def write_pgm(path: Path, maximum: int, values: np.ndarray) -> None:
    path.write_bytes(f"P5 32 32 {maximum}\n".encode() + values.astype(">u2").tobytes())


def write(path: Path) -> None:
    if path.stem == "big":
        Image.frombytes("I;16B", (32, 32), RAMP.astype(">u2").tobytes()).save(path)
    elif path.suffix == ".pgm":
        write_pgm(path, 65535, RAMP)
    else:
        Image.fromarray(RAMP).save(path)


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "big.tiff", "a.pgm"])
def test_sixteen_bits_are_scaled_and_that_is_said_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images, "_told", False)
    monkeypatch.delenv("RANK", raising=False)
    write(tmp_path / name)
    for _ in range(2):
        pixels = np.asarray(read_image(tmp_path / name)).astype(float)
    assert pixels.shape == (32, 32, 3) and abs(pixels.mean() - 127.5) < 0.1
    assert np.abs(pixels - RAMP[..., None] / 257).max() <= 0.5
    assert capsys.readouterr().err.count("DomainBed clips them to nearly white") == 1


READ_TWICE = """
import sys
from pathlib import Path
from unifmoe_dist.data.images import read_image
from unifmoe_dist.train.read_ahead import read_ahead

if __name__ == "__main__":
    for _ in range(2):
        assert len(list(read_ahead(read_image, [Path(word) for word in sys.argv[1:]], workers=2))) == 4
"""


def test_processes_that_read_ahead_say_it_once_together(tmp_path):
    """Every evaluation starts new ones. In a program of its own: they write where the first of them was made to."""
    for name in "abcd":
        write(tmp_path / f"{name}.png")
    program = tmp_path / "read.py"
    program.write_text(READ_TWICE)
    words = [sys.executable, str(program), *(str(tmp_path / f"{name}.png") for name in "abcd")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DomainBed clips them to nearly white") == 1


def test_other_ranks_do_not_repeat_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images, "_told", False)
    monkeypatch.setenv("RANK", "1")
    write(tmp_path / "a.png")
    read_image(tmp_path / "a.png")
    assert capsys.readouterr().err == ""


def test_fewer_bits_in_a_portable_grey_map(tmp_path):
    write_pgm(tmp_path / "a.pgm", 4095, RAMP // 16)
    assert abs(np.asarray(read_image(tmp_path / "a.pgm")).mean() - 127.5) < 0.5


@pytest.mark.parametrize("values", [RAMP.astype(np.int32), (RAMP / 65535).astype(np.float32), RAMP.astype(np.float32)])
def test_thirty_two_bits_do_not_say_what_white_is(values, tmp_path):
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(NotAnImage, match="32-bit numbers from 0 to .*, which do not say what white is"):
        decode(tmp_path / "a.tiff")


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_thirty_two_bits_with_values_of_eight(kind, tmp_path):
    values = (RAMP // 257).astype(kind)
    Image.fromarray(values).save(tmp_path / "a.tiff")
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.tiff"))[..., 0], values.astype(np.uint8))


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "LA", "RGBA", "CMYK"])
def test_images_of_eight_bits_are_read_as_ever(mode, tmp_path):
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.fromarray((RAMP // 257).astype(np.uint8)).convert(mode).save(path)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(np.asarray(read_image(path)), expected)
