"""What a prepared data set was made from and holds, kept beside it so that it can be checked later."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from unifmoe_dist.data.image_folders import ImageFolder
from unifmoe_dist.files import sha256, write_text

MANIFEST = "manifest.json"


def digest(folder: ImageFolder) -> str:
    """sha256 over the paths and the contents of an environment's images, in the order of their paths."""
    whole = hashlib.sha256()
    for name in sorted(os.fsdecode(file) for file in folder.files):
        whole.update(f"{name}\0{sha256(folder.path / name)}\n".encode())
    return whole.hexdigest()


def count_classes(folder: ImageFolder) -> dict[str, int]:
    """Images per class."""
    return {name: int((folder.labels == label).sum()) for label, name in enumerate(folder.classes)}


def write_manifest(dataset: Path, name: str, archives: list[dict[str, Any]], folders: list[ImageFolder]) -> None:
    """Write the manifest in one step.

    Args:
        dataset: The data set's folder.
        name: The benchmark's name.
        archives: File name, bytes and sha256 of what was unpacked.
        folders: What came out.
    """
    content = {
        "dataset": name,
        "archives": archives,
        "environments": {
            folder.environment.folder: {
                "images": len(folder),
                "sha256": digest(folder),
                "classes": count_classes(folder),
            }
            for folder in folders
        },
    }
    write_text(dataset / MANIFEST, json.dumps(content, indent=1))


def read_manifest(dataset: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none or it cannot be read."""
    try:
        content = json.loads((dataset / MANIFEST).read_text())
        return content if isinstance(content["environments"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
