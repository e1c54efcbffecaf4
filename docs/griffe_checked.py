"""Has the API reference take classes of options for the dataclasses that `checked` makes of them."""

from __future__ import annotations

from typing import Any

import griffe


class Checked(griffe.Extension):
    """Reads `@checked(...)` as `@dataclass(...)`."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        for decorator in cls.decorators:
            value = decorator.value
            if isinstance(value, griffe.ExprCall) and str(value.function) == "checked":
                value.function = griffe.ExprName("dataclasses.dataclass")
