"""Kernels made ready before a job begins: compiled, tried, tuned, and chosen alike on every rank.

Kernels of a GPU are compiled, compared with plain torch and tuned at the first use of a shape, each rank for itself. A
warm-up does so for all shapes that are to come, outside of any step, and leaves no trace but that: it runs the kernels
on weights in leaves of their own and on made-up tokens, without the layer, its hooks, statistics or exchange.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import (
    HiddenDropout,
    block_ffn,
    pack_tokens,
    route_tokens,
    self_test,
    shared_and_residual_ffn,
    takes_triton,
)
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.lending import bare
from unifmoe_dist.routing import Router


def warm_up(model: nn.Module, tokens: int | Iterable[int], dtype: torch.dtype | None = None) -> None:
    """Make ready what the expert layers of a model will run; collective where torch.distributed is initialised.

    Call it in the autocast of the steps to come, with the model on its device and in their mode: in training backward
    passes are made ready too. Before a CUDA graph is captured it is needed: nothing is tried or tuned during a capture.
    Where layers run in plain torch alone, as on CPUs, it does nothing.

    If a kernel fails its trial on one rank, every rank takes plain torch in its place, which rank 0 says.

    Args:
        model: A model with expert layers, or such a layer.
        tokens: Numbers of tokens (positions of a batch) that a layer gets in a forward pass on this rank.
        dtype: Type of the hidden states that reach the layers; None for that of their weights.

    Raises:
        Exception: what the kernels raise on this rank, such as a lack of memory, once all ranks are done.
        RuntimeError: that happened on another rank.
    """
    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    devices = {device for layer in layers if takes_triton(device := _device(layer))}
    if not devices:
        return
    numbers = sorted({tokens} if isinstance(tokens, int) else set(tokens))
    failed: Exception | None = None
    with self_test.unsaid():
        try:
            for layer in _different(layers):
                for n in numbers:
                    _run(layer, n, dtype)
        except Exception as error:  # the others wait for this rank's part in what follows
            failed = error
        _agree(devices, failed)
    if failed is not None:
        raise failed


@torch.no_grad()
def tokens_reaching(model: nn.Module, forward: Callable[[], Any]) -> tuple[set[int], torch.dtype | None]:
    """Numbers of tokens that reach expert layers in `forward()`, and their type, for `warm_up`; None if none do.

    `forward` runs the model, which is put in evaluation for it, and whose expert layers hand their tokens on as they
    are: no rank waits for another, and no one's random numbers change.
    """
    numbers, types = set(), []

    def hand_on(x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        numbers.add(x.numel() // x.shape[-1])
        types.append(x.dtype)
        return x

    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    training = [module for module in model.modules() if module.training]
    devices = {device for layer in layers if (device := _device(layer)).type == "cuda"}
    model.eval()
    try:
        for layer in layers:
            layer.forward = hand_on  # type: ignore[method-assign]
        with torch.random.fork_rng([*devices], device_type="cuda"):
            forward()
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        for module in training:
            module.training = True
    return numbers, types[0] if types else None


def _device(layer: ExpertLayer) -> torch.device:
    return bare(layer.experts).keys.device


def _different(layers: list[ExpertLayer]) -> Iterator[ExpertLayer]:
    """One of all that run the same kernels."""
    seen = set()
    for layer in layers:
        parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in layer.parameters())
        kind = type(layer), str(layer.config), layer.num_local_experts, _device(layer), layer.training, parameters
        if kind not in seen:
            seen.add(kind)
            yield layer


def _agree(devices: set[torch.device], failed: Exception | None) -> None:
    """Have every rank know what has failed on any, and rank 0 say it."""
    own = self_test.failures(), None if failed is None else f"{type(failed).__name__}: {failed}"
    every = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
    first = not dist.is_initialized() or dist.get_rank() == 0
    said = set()
    for rank, (failures, error) in enumerate(every):
        for case, reason in failures:
            self_test.refuse(case, reason, devices)
            if first and case not in said:
                where = f" on any rank, since on rank {rank}" if len(every) > 1 else ""
                warnings.warn(f"Triton is not used for {case}{where}: {reason}", stacklevel=3)
            said.add(case)
        if error is not None and failed is None:
            raise RuntimeError(f"warm_up failed on rank {rank}: {error}")


def _run(layer: ExpertLayer, tokens: int, dtype: torch.dtype | None) -> None:
    """Forward and, in training, backward: all kernels that `tokens` tokens may take in a layer."""
    experts = _apart(layer.experts, lambda: layer._make_experts(layer.num_local_experts))
    device = experts.keys.device
    draw = _Draw(device, dtype or experts.keys.dtype, layer.config.model_dim, layer.training)
    rate = layer.config.hidden_dropout if layer.training else 0.0
    dropout = HiddenDropout(rate, torch.tensor([1, -1], dtype=torch.int32, device=device)) if rate else None
    ranks = layer.config.num_experts // layer.num_local_experts
    with torch.inference_mode(False), torch.set_grad_enabled(layer.training):
        if isinstance(layer, UniFMoELayer):
            _run_with_shared(layer, experts, draw(tokens), dropout)
        if not (isinstance(layer, UniFMoELayer) and layer.dispatcher.local):
            # How many rows arrive is known to no one. A power of two for each expert has every size of tiles run.
            per_expert = (16, 32, 64, 128)
            rows = {tokens, *(min(n * layer.num_local_experts, tokens * ranks) for n in per_expert)}
            for n in sorted(rows):
                x, gates = draw(n), draw.gates(n, layer.num_local_experts)
                blocks = torch.ones((n, experts.num_blocks), dtype=torch.bool, device=device)
                _backward(block_ffn(x, gates, blocks, experts.weights(), dropout), [x, gates], experts)


def _run_with_shared(layer: UniFMoELayer, experts: BlockExperts, x: Tensor, dropout: HiddenDropout | None) -> None:
    """Routing, with a token mask and without, and the experts that are beside the tokens."""
    config = layer.config
    shared = _apart(layer.shared, lambda: layer._make_experts(1))
    router = _apart(layer.router, lambda: Router(config.model_dim, config.num_experts, bare(layer.router).policies))
    mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    for given in (mask, None):
        routing = route_tokens(x, router, shared, given)
        _backward(routing.shared_demand.sum() + routing.gates.sum(), [x], router)
    routing = route_tokens(x, router, shared)
    if layer.dispatcher.local:
        y = shared_and_residual_ffn(x, routing, shared.weights(), experts.weights(), dropout)
        _backward(y, [x], router, shared, experts)
    else:
        for parts, ranks in getattr(layer.dispatcher, "packings", []):
            own = routing.gates[:, : config.num_experts // parts].contiguous()
            pack_tokens(x, own, ~routing.shared_blocks, ranks, [1, 1])
        y = block_ffn(x, routing.shared_demand[:, None], routing.shared_blocks, shared.weights(), dropout)
        _backward(y, [x], router, shared)


def _backward(y: Tensor, inputs: list[Tensor], *modules: nn.Module) -> None:
    leaves = [t for t in (*inputs, *(p for m in modules for p in m._parameters.values())) if t is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if y.requires_grad and wanted:
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)


def _apart(module: Any, fresh: Callable[[], Any]) -> Any:
    """A module's weights in leaves of their own, where no hook of it and no gradient of theirs sees what is done.

    Where the weights are spread or offloaded, others of their shapes.
    """
    module = bare(module)
    if module.absence() is not None:
        main = getattr(module, module.main[0])
        twin = fresh().to(device=main.device, dtype=main.dtype)
        for parameter in twin.parameters():
            nn.init.normal_(parameter, std=0.02)
        return twin
    twin = copy.copy(module)
    leaves = {
        name: None if own is None else nn.Parameter(own.detach(), own.requires_grad)
        for name, own in module._parameters.items()
    }
    twin.__dict__.update(_parameters=leaves, share=None, around=None)
    return twin


class _Draw:
    """Made-up tokens from a generator of its own, so that no one's random numbers change."""

    def __init__(self, device: torch.device, dtype: torch.dtype, dim: int, trained: bool) -> None:
        self.device, self.dtype, self.dim, self.trained = device, dtype, dim, trained
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, tokens: int) -> Tensor:
        """(tokens, D)."""
        numbers = torch.randn(tokens, self.dim, generator=self.generator, device=self.device)
        return numbers.to(self.dtype).requires_grad_(self.trained)

    def gates(self, rows: int, experts: int) -> Tensor:
        """(rows, experts) float32, half of them 0."""
        numbers = torch.rand(rows, experts, generator=self.generator, device=self.device)
        return numbers.sub_(0.5).clamp_(min=0).requires_grad_(self.trained)
