"""Few tokens, as in decoding: a layer beside the dense FFN, with its weights in the processor's cache and not.

One layer that is timed again and again finds its weights in the cache, as far as they fit. In a decoder the weights of
other layers have passed through meanwhile, so that all are read from memory: "swept" passes 64 MB before each call.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.files import write_text
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies import meters
from unifmoe_dist.studies.benchmark.layers_and_models import dense_ffn
from unifmoe_dist.studies.records import markdown

DIM, HIDDEN, EXPERTS, BLOCKS = 576, 1536, 6, 8  # SmolLM2-135M's FFN
TOKENS = (1, 4, 16, 64)
_SETS = 8  # of tokens, which decide differently
_SWEEP_BYTES = 64 * 2**20

Row = dict[str, Any]
"""Of one number of tokens: medians in microseconds, warm and swept, and the arithmetic in dense FFNs."""


@torch.no_grad()
def time_decoding(
    device: torch.device, dtype: torch.dtype, seconds: float, on_round: Callable[[], object]
) -> list[Row]:
    """Rows of plain and gated layers, each timed for about `seconds`, in rounds that take all contenders in turn."""
    torch.manual_seed(0)
    rows: list[Row] = []
    for gated in (False, True):
        dense = dense_ffn(DIM, HIDDEN, gated).to(device, dtype).eval()
        config = UniFMoEConfig(DIM, HIDDEN, EXPERTS, BLOCKS, "silu" if gated else "gelu", gated=gated)
        layer = UniFMoELayer(config).to(device, dtype).eval()
        for tokens in TOKENS:
            sets = torch.randn(_SETS, tokens, DIM).to(device, dtype)
            work = sum(float(layer.route(x).block_compute.sum()) for x in sets) / (sets[..., 0].numel() * BLOCKS)
            times = _rounds(dense, layer, sets, seconds, on_round)
            rows.append({"ffn": "gated" if gated else "plain", "tokens": tokens, "work": work, **times})
    return rows


def _rounds(
    dense: nn.Module, layer: nn.Module, sets: Tensor, seconds: float, on_round: Callable[[], object]
) -> dict[str, float]:
    swept = torch.empty(_SWEEP_BYTES // 4, device=sets.device)
    contenders: dict[str, tuple[nn.Module, Callable[[], AbstractContextManager]]] = {
        "dense": (dense, nullcontext),
        "layer": (layer, nullcontext),
        "layer_grouped": (layer, lambda: use_kernels("grouped")),
    }
    found: dict[str, list[float]] = {f"{name}_{kind}": [] for name in contenders for kind in ("warm", "swept")}
    started, rounds = time.perf_counter(), 0
    while rounds < _SETS or time.perf_counter() - started < seconds:
        for name, (module, context) in contenders.items():
            call = partial(module, sets[rounds % _SETS])
            with context():
                swept.add_(1)
                found[f"{name}_swept"].append(meters.seconds(call, sets.device))
                found[f"{name}_warm"].append(meters.seconds(call, sets.device))
        rounds += 1
        on_round()
    return {name: 1e6 * statistics.median(values) for name, values in found.items()}


def write(path: Path, where: str, rows: Sequence[Row]) -> str:
    """Write path.md and path.json; returns the table."""
    text = table(rows)
    sizes = f"d={DIM}, H={HIDDEN}, K={EXPERTS}, B={BLOCKS}"
    write_text(path.with_suffix(".md"), f"{where}; {sizes}\n\n{text}\n")
    record = {"where": where, "sizes": {"d": DIM, "H": HIDDEN, "K": EXPERTS, "B": BLOCKS}, "rows": list(rows)}
    write_text(path.with_suffix(".json"), json.dumps(record, indent=1))
    return text


def table(rows: Sequence[Row]) -> str:
    """Times over the dense FFN, warm and with swept caches; "grouped" is the same layer through the grouped kernel."""
    return markdown(
        [
            {
                "FFN": row["ffn"],
                "tokens": row["tokens"],
                "work / dense": f"{row['work']:.2f}",
                "dense FFN (µs)": f"{row['dense_warm']:.0f}",
                "UniF-MoE (µs)": f"{row['layer_warm']:.0f}",
                "/ dense": f"{row['layer_warm'] / row['dense_warm']:.2f}",
                "grouped / dense": f"{row['layer_grouped_warm'] / row['dense_warm']:.2f}",
                "swept: / dense": f"{row['layer_swept'] / row['dense_swept']:.2f}",
                "swept: grouped / dense": f"{row['layer_grouped_swept'] / row['dense_swept']:.2f}",
            }
            for row in rows
        ]
    )
