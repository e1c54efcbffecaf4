"""Files that are whole or not there, whatever is killed and even if the power fails."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new, never a part, even after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")  # whatever the locale: reports hold Greek letters
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that whoever may read other new files may read; the library's own are private."""
    save_file(tensors, path, metadata)
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
