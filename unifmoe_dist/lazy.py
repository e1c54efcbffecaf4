"""Names of a package that are imported when they are first used (PEP 562).

What needs PyTorch takes seconds to import; a command that only prints its help, or what is wrong with its options,
should not wait for it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        package: Its name.
        homes: By name, the module inside the package that defines it.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_


def load(place: str) -> Any:
    """What a registry names: "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
