"""The paper's cost table: N, N_A and FLOPs of a model, counted, and seconds and memory of its steps, measured.

Conventions, settled by the paper's dense numbers (DeiT-S/16 with VLCS's 5 classes: N = 20.66, FLOPs = 8.57):

- N counts every parameter, in units of 2^20.
- FLOPs count 2 per multiply-add of every matrix product, patch embedding and attention's two products included; norms,
  activations, softmax and biases count nothing. That is `torch.utils.flop_counter`'s rule. Units are 2^30, per image.
- N_A leaves out the expert parameters that a token does not use, on average: executed blocks C_B count with their
  biases, each executed expert with its down bias, the router whole.

An MoE layer is counted from what it executed on real data (`Usage`), since no library sees inside fused kernels; all
else is the library's count. `paper.py` derives the paper's table from these rules.

T-TPS, I-TPS, T-RTM, I-RTM are those of training and inference steps on the device at hand. On CUDA, memory is the
allocator's peak. A CPU has no such counter, and a process's resident memory also holds the libraries and what earlier
measurements left: there it is the peak of the bytes that live tensors hold, parameters, gradients and optimiser states
included, temporaries inside one operation not. `MeasuredCost.memory_kind` says which.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies.meters import peak_bytes, seconds
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary

PARAMETER_UNIT = 2**20
FLOP_UNIT = 2**30
MEMORY_UNIT = 2**30
STATISTICS = ("N", "N_A", "FLOPs", "T-TPS", "I-TPS", "T-RTM", "I-RTM")


@dataclass(frozen=True)
class LayerCost:
    """One MoE layer, averages over its tokens."""

    parameters: int
    activated: float  # those that a token uses
    tokens: float  # per item
    routing_flops: float  # operations of the router per token
    expert_flops: float  # operations of the executed blocks per token

    @property
    def flops(self) -> float:
        """Operations per item."""
        return self.tokens * (self.routing_flops + self.expert_flops)


@dataclass(frozen=True)
class Cost:
    """A model: N, N_A and operations per item (image or sentence), not in the table's units; its MoE layers by name."""

    parameters: int
    activated: float
    flops: float
    layers: dict[str, LayerCost]


def library_flops(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Operations of one forward pass `model(**inputs)` in evaluation mode, as torch's counter sees them.

    Attention runs as two plain products meanwhile: the counter knows them, but not every fused kernel.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(**inputs)
    finally:
        model.train(was_training)
    return counter.get_total_flops()


def count_cost(model: nn.Module, inputs: Mapping[str, Tensor], usage: Mapping[str, UsageSummary] | None = None) -> Cost:
    """Count a model with all its experts on this rank.

    Args:
        model: A dense model, or one with MoE layers.
        inputs: Model inputs of one or more items; they fix the tokens per item, padding aside.
        usage: What each MoE layer executed, by module name, for example from an evaluation; nothing for a dense model.

    Raises:
        UserError: A layer's usage is missing or has counted no token.
    """
    layers = moe_layers(model)
    items = len(next(iter(inputs.values())))
    with _bypassed(layers) as tokens:
        flops = library_flops(model, inputs) / items
    costs = {}
    for name, layer in layers.items():
        if usage is None or name not in usage or usage[name].tokens == 0:
            raise UserError(f"Layer {name} has no usage; evaluate the model on some data first.")
        costs[name] = layer_cost(layer, usage[name], tokens[name] / items)
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(
        parameters,
        parameters - sum(cost.parameters - cost.activated for cost in costs.values()),
        flops + sum(cost.flops for cost in costs.values()),
        costs,
    )


def layer_cost(layer: Any, usage: UsageSummary, tokens: float) -> LayerCost:
    """Count one MoE layer from what it executed.

    Args:
        layer: Holds its routed experts as `experts` and those that every token uses in other `BlockExperts`; its
            `config` has the dense FFN's hidden_dim and the num_blocks that `block_compute` counts; it has `route`.
        usage: What its tokens executed.
        tokens: Tokens per item.
    """
    bank: BlockExperts = layer.experts
    banks = [module for module in layer.modules() if isinstance(module, BlockExperts)]
    dim = bank.keys.shape[2]
    width = layer.config.hidden_dim / layer.config.num_blocks
    matrices = 2 if bank.gate_keys is None else 3
    channel = matrices * dim + (0 if bank.key_bias is None else matrices - 1)
    experts_used = usage.expert_count + len(banks) - 1
    used = usage.block_compute * width * channel + experts_used * (0 if bank.value_bias is None else dim)
    parameters = sum(p.numel() for p in layer.parameters())
    held = sum(p.numel() for module in banks for p in module.parameters())
    x = torch.zeros(16, dim, dtype=bank.keys.dtype, device=bank.keys.device)
    with torch.no_grad(), use_kernels("reference"), FlopCounterMode(display=False) as counter:  # sees no fused kernel
        layer.route(x)
    return LayerCost(
        parameters=parameters,
        activated=parameters - held + used,
        tokens=tokens,
        routing_flops=counter.get_total_flops() / len(x),
        expert_flops=usage.block_compute * width * 2 * matrices * dim,
    )


@contextmanager
def _bypassed(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, int]]:
    """Layers that return their input and note how many real tokens came."""
    tokens = dict.fromkeys(layers, 0)

    def skip(name: str, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        tokens[name] += x[..., 0].numel() if token_mask is None else int(token_mask.sum())
        return x

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(patch.object(layer, "forward", partial(skip, name)))
        yield tokens


@dataclass(frozen=True)
class MeasuredCost:
    """Medians over the repeats, in seconds and bytes."""

    train_seconds: float  # T-TPS: forward, loss, backward and update
    eval_seconds: float  # I-TPS
    train_memory: int  # T-RTM
    eval_memory: int  # I-RTM
    memory_kind: str  # "CUDA allocator" or "live tensors"
    device: str


def measure_cost(
    deploy: Callable[[], nn.Module],
    prepare: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Mapping[str, Tensor], Tensor], Tensor],
    train_batch: tuple[Mapping[str, Tensor], Tensor],
    eval_inputs: Mapping[str, Tensor],
    device: torch.device,
    repeats: int = 10,
    warmup: int = 2,
) -> MeasuredCost:
    """Measure a method, built anew for inference and for training, so that neither holds the other's memory.

    Args:
        deploy: Makes the model that is deployed, on the CPU.
        prepare: Makes what is trained, on the CPU: the model with all that only training needs.
        loss_of: `loss_of(trained, inputs, labels)`, auxiliary losses included.
        train_batch: Inputs and labels of a training step (the paper: 32 images of each training environment).
        eval_inputs: Inputs of an inference step (the paper: 64 images).
        device: Where.
        repeats: Timed steps, after `warmup` others.
    """

    def medians(model: nn.Module, step: Callable[[], object], *given: Tensor) -> tuple[float, int]:
        # The peak is that of the first two steps: the states and gradients that the first leaves are there in the next.
        held = [*model.parameters(), *model.buffers(), *given]
        memory = peak_bytes(lambda: (step(), step()), device, held)
        times = [seconds(step, device) for _ in range(warmup + repeats)]
        return statistics.median(times[warmup:]), memory

    def inference() -> tuple[float, int]:
        model, inputs = deploy().to(device).eval(), {name: tensor.to(device) for name, tensor in eval_inputs.items()}
        return medians(model, torch.no_grad()(lambda: model(**inputs)), *inputs.values())

    def training() -> tuple[float, int]:
        model, inputs = prepare().to(device).train(), {n: tensor.to(device) for n, tensor in train_batch[0].items()}
        labels, optimizer = train_batch[1].to(device), torch.optim.Adam(model.parameters(), lr=1e-5)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, inputs, labels).backward()
            optimizer.step()

        return medians(model, step, *inputs.values(), labels)

    (eval_seconds, eval_memory), (train_seconds, train_memory) = inference(), training()
    cuda = device.type == "cuda"
    kind, name = ("CUDA allocator", torch.cuda.get_device_name(device)) if cuda else ("live tensors", "CPU")
    return MeasuredCost(train_seconds, eval_seconds, train_memory, eval_memory, kind, name)


def statistics_of(cost: Cost, measured: MeasuredCost | None = None) -> dict[str, float]:
    """One column in the table's units: 2^20 parameters, 2^30 operations per item, seconds, GiB."""
    counted = [cost.parameters / PARAMETER_UNIT, cost.activated / PARAMETER_UNIT, cost.flops / FLOP_UNIT]
    if measured is not None:
        counted += [measured.train_seconds, measured.eval_seconds]
        counted += [measured.train_memory / MEMORY_UNIT, measured.eval_memory / MEMORY_UNIT]
    return dict(zip(STATISTICS, counted, strict=False))
