"""Lets Transformers rebuild a saved model's layers after `import unifmoe_dist` alone, without importing PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TARGET = "transformers.modeling_utils"


def watch() -> None:
    """Have `unifmoe_dist.upcycling` loaded, which patches Transformers, when Transformers' models are; or now."""
    if _TARGET in sys.modules:
        importlib.import_module("unifmoe_dist.upcycling")
    elif not any(isinstance(finder, _UpcyclingFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, _UpcyclingFirst())


class _UpcyclingFirst(MetaPathFinder):
    """Imports one module before another, then leaves the rest to the other finders."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        importlib.import_module("unifmoe_dist.upcycling")
        return importlib.util.find_spec(name)
