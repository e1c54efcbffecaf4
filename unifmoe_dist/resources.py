"""Folders that travel with the package: launch/ and configs/, inside it once installed, beside it in a checkout."""

from pathlib import Path


def folder(name: str) -> Path:
    """The folder "launch" or "configs"."""
    package = Path(__file__).parent
    return package / name if (package / name).is_dir() else package.parent / name


def script(name: str) -> Path:
    """launch/NAME.py."""
    return folder("launch") / f"{name}.py"


def config(path: str) -> str:
    """A path as it is, or where the working folder has no such file and it begins with configs/, the shipped one's."""
    shipped = folder("configs").parent / path
    return str(shipped) if path.startswith("configs/") and not Path(path).exists() and shipped.is_file() else path
