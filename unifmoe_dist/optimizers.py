"""A model's parameters as optimisers should see them: what is decayed, and what Muon may take for a matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import ExpertShare
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.lending import is_dtensor

_TRANSPOSED = {"keys": False, "gate_keys": False, "values": True}
"""Banks of matrices (E, H, D), and whether nn.Linear has such a matrix as (D, H)."""


def param_groups(model: nn.Module, weight_decay: float = 0.0, *, muon: bool = False) -> list[dict[str, Any]]:
    """An optimiser's groups of all parameters that are trained: biases, norms and routers are not decayed.

    timm's factory takes it as `param_group_fn=partial(param_groups, weight_decay=0.05, muon=True)`.

    Args:
        model: Any model, upcycled or not, on its device and before an optimiser is made for it.
        weight_decay: Of what is decayed, matrices and what has more dimensions.
        muon: Whether groups also tell, by `use_muon`, which hold matrices that Muon may orthogonalise: weights of two
            dimensions but embeddings and routers, and of experts one for each, (out, in) as nn.Linear has them.
            timm's Muon gives the other groups to AdamW; torch's takes only those, and the others need an optimiser.

    Returns:
        Dictionaries with `params`, `weight_decay` and, if asked for, `use_muon`, in the order of the model.

    Raises:
        UserError: Muon is to see experts whose matrices are cut across by sharding.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    banks = _banks(model) if muon else {}
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed, parts = is_decayed(name, parameter), [parameter]
        matrix = muon and decayed and parameter.ndim == 2 and id(parameter) not in embeddings
        if id(parameter) in banks:
            count, transposed = len(_here(parameter)), banks[id(parameter)]
            parts, matrix = [ExpertMatrix(parameter, expert, transposed) for expert in range(count)], True
        group = groups.setdefault((decayed, matrix), {"params": [], "weight_decay": weight_decay if decayed else 0.0})
        group["params"] += parts
        if muon:
            group["use_muon"] = matrix
    return [*groups.values()]


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay is for a parameter of that name: not for biases, norms and routers."""
    return not in_router(name) and not name.endswith("bias") and parameter.ndim >= 2


def in_router(name: str) -> bool:
    """Whether a parameter of that name is a router's."""
    return ".router." in f".{name}"


class ExpertMatrix(nn.Parameter):
    """One expert's matrix as a parameter of its own: memory and gradient are those of its bank (E, H, D).

    The gradient is read when it is asked for, so whatever sums, scales, clips or clears one sees the other.
    """

    bank: nn.Parameter
    expert: int
    transposed: bool
    expert_share: ExpertShare

    def __new__(cls, bank: nn.Parameter, expert: int, transposed: bool) -> ExpertMatrix:
        matrix = super().__new__(cls, _matrix(bank.detach(), expert, transposed), True)
        matrix.bank, matrix.expert, matrix.transposed = bank, expert, transposed
        if hasattr(bank, "expert_share"):
            matrix.expert_share = bank.expert_share  # so another rank's moments are refused
        return matrix

    @property
    def grad(self) -> Tensor | None:
        own = _matrix(self.bank.detach(), self.expert, self.transposed)
        if own.data_ptr() != self.data_ptr():
            self.data = own  # the model was moved, or has another dtype
        whole = self.bank.grad
        return None if whole is None else _matrix(whole, self.expert, self.transposed)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own = self.grad
        if value is None:
            self.bank.grad = None
        elif own is not None:
            own.copy_(value)
        else:
            raise UserError("an expert's matrix takes no gradient that its bank has not; give it to the bank.")


def _banks(model: nn.Module) -> dict[int, bool]:
    """Banks of matrices by their identity, and whether theirs are transposed."""
    found: dict[int, bool] = {}
    for module in model.modules():
        for name, turned in _TRANSPOSED.items() if isinstance(module, BlockExperts) else ():
            bank: Any = module._parameters.get(name)
            if bank is None:
                continue
            if bank.ndim != 3 or (
                is_dtensor(bank) and not all(p.is_shard(0) or p.is_replicate() for p in bank.placements)
            ):
                raise UserError(
                    "Muon needs every expert's matrices whole on one rank, but they are cut; shard experts along their "
                    "first dimension alone, as FSDP 2 does, or leave them out of sharding."
                )
            found[id(bank)] = turned
    return found


def _here(bank: Any) -> Tensor:
    """This rank's experts of a bank or of its gradient."""
    return bank.to_local() if is_dtensor(bank) else bank


def _matrix(bank: Tensor, expert: int, transposed: bool) -> Tensor:
    matrix = _here(bank)[expert]
    return matrix.T if transposed else matrix
