"""What layers of earlier versions did where an option that they did not know has another default by now."""

from __future__ import annotations

from typing import Any


def former_options(method: str | None, expansion_steps: int | None) -> dict[str, Any]:
    """Fields of `LayerOptions` as a version without them had them.

    Args:
        method: Name of the layer.
        expansion_steps: Of mass; None where it is not known, and its windows are not either.
    """
    if method == "dynmoe":
        return {"gate_temperature": True}
    if method in ("gmoe", "emoe", "emoe_learn"):
        return {"load_loss": "shazeer"}
    if method == "mass" and expansion_steps is not None:
        return {
            "mass_window": max(2, min(200, expansion_steps * 2 // 5)),
            "mass_warmup": min(100, expansion_steps // 5),
        }
    return {}
