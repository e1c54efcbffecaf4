"""What every layer of experts shares, whatever its gate: tokens in and out, its experts, statistics, auxiliary loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.config import ExpertLayerConfig
from unifmoe_dist.dispatch import Exchange, make_dispatcher
from unifmoe_dist.eager import not_compiled
from unifmoe_dist.engines import introduce, refuse_parts
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import ExpertGroup, ExpertShare, as_group, note_parameters
from unifmoe_dist.experts import FFN, BlockExperts
from unifmoe_dist.kernels import HiddenDropout
from unifmoe_dist.lending import bare
from unifmoe_dist.replicas import data_parallel, leave_bank_alone
from unifmoe_dist.usage import Usage, recomputing

Config = TypeVar("Config", bound=ExpertLayerConfig)


@dataclass(frozen=True)
class AppliedStep:
    """What a layer may ask about an optimiser step that has been applied. The functions are collective.

    Args:
        step: Its number, from 1.
        all_sum: Sums a tensor over all ranks, as float64 on the CPU.
        task_loss: Task loss of the step's last micro-batch with the weights as they are now, averaged over ranks.
        epoch_steps: Steps in a pass over the training data; None where nothing counts them.
    """

    step: int
    all_sum: Callable[[Tensor], Tensor]
    task_loss: Callable[[], float]
    epoch_steps: int | None = None


@dataclass(frozen=True)
class ChangedRows:
    """Rows of a parameter, along its first dimension, that a layer has rewritten in place.

    Args:
        parameter: The parameter as this rank holds it.
        rows: Indices of the rows.
        forget: Whether what the optimiser remembers of them (its moments) no longer holds.
    """

    parameter: nn.Parameter
    rows: list[int]
    forget: bool


class ExpertLayer(nn.Module, Generic[Config]):
    """K experts in the place of a transformer's FFN, spread over the ranks of a group.

    A subclass makes its gate and defines `_apply_to_tokens`.

    Args:
        config: Shape of the layer.
        expert_group: Ranks over which the experts are sharded, contiguously in rank order; None keeps all here.
        dispatcher: "auto" (local on one rank, two_level between nodes with several ranks each, else alltoall), "local",
            "alltoall", "two_level" or "tutel" (needs the tutel extra).
        ranks_per_node: Ranks of expert_group on each node; None finds out from the names of hosts.
        dispatch_chunks: Parts in which a rank's tokens travel, so that one travels while another is computed.

    Attributes:
        experts: The experts that this rank holds, at the places from `first_expert` on; `held` has their numbers.
        dispatcher: How tokens reach them.
        usage: Running routing statistics.
        loads: Blocks that every expert computed in training, where someone counts them.
        auxiliary_weight: Weight of `auxiliary_loss()` beside the task loss.

    Raises:
        UserError: num_experts is not divisible by the size of expert_group, or this rank is not in it; nodes differ in
            their number of ranks.
    """

    config_type: ClassVar[type[ExpertLayerConfig]] = ExpertLayerConfig
    """Its configuration, which says how it is made of the options of its method."""
    replicated: ClassVar[tuple[str, ...]] = ()
    """Names of banks of one expert that every rank holds beside `experts`."""
    resized: ClassVar[tuple[str, ...]] = ()
    """Names of buffers that the layer fits to its own length when they are loaded."""
    rank_sums: ClassVar[tuple[str, ...]] = ()
    """Names of buffers to which every rank adds what its own tokens give."""
    loads: Usage | None = None
    columns: Tensor | None = None
    """(K,) the expert at every place, where they do not lie as they are numbered."""

    def __init__(
        self,
        config: Config,
        expert_group: ExpertGroup = None,
        dispatcher: str = "auto",
        ranks_per_node: int | None = None,
        dispatch_chunks: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        expert_group = as_group(expert_group)
        group_size = 1 if expert_group is None else dist.get_world_size(expert_group)
        if group_size < 1:
            raise UserError("this rank does not belong to expert_group; give every rank the group that it is in.")
        if config.num_experts % group_size:
            raise UserError(
                f"num_experts {config.num_experts} is not divisible by the expert-parallel size {group_size}; "
                "change one of them."
            )
        local = config.num_experts // group_size
        self.num_local_experts = local
        self.first_expert = local * (0 if expert_group is None else dist.get_rank(expert_group))
        self.experts = self._make_experts(local)
        if expert_group is not None and group_size > 1:
            self.experts.share = ExpertShare(expert_group, self.first_expert, local, config.num_experts)
            note_parameters(self.experts.parameters(), self.experts.share)
            leave_bank_alone(self.experts)
        self.dispatcher = make_dispatcher(dispatcher, expert_group, ranks_per_node, dispatch_chunks)
        self.usage = Usage()
        self.auxiliary_weight = 0.0

    def _make_experts(self, count: int) -> BlockExperts:
        """`count` experts of the width of the dense FFN."""
        c = self.config
        return BlockExperts(count, c.model_dim, c.hidden_dim, c.num_blocks, c.activation, c.bias, c.gated)

    def reset_parameters(self) -> None:
        """All experts start from one random dense FFN."""
        self.load_dense(*self._random_dense())

    def _random_dense(self) -> FFN:
        """A random dense FFN, as torch starts its parts."""
        c = self.config
        parts = [nn.Linear(c.model_dim, c.hidden_dim, c.bias), nn.Linear(c.hidden_dim, c.model_dim, c.bias)]
        if c.gated:
            parts.append(nn.Linear(c.model_dim, c.hidden_dim, c.bias))
        return tuple(tensor for part in parts for tensor in (part.weight, part.bias))  # type: ignore[return-value]

    # -- tokens -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Apply the layer to tokens.

        Args:
            x: (..., model_dim) tokens; any leading shape, empty included.
            token_mask: Bool or 0/1, shape x.shape[:-1]; false positions cost nothing, come back as zeros and count in
                no statistic.

        Returns:
            Shape and dtype of x.

        Raises:
            UserError: x is no floating-point tensor or has another width; the mask has another shape; or the experts
                are spread over ranks inside DDP, FSDP or the like, which would treat them as copies of each other.
        """
        self._check_shapes(x, token_mask)
        if self.share is not None:
            self._look_around(x.dtype)
        tokens = x.reshape(-1, x.shape[-1])
        if token_mask is not None:
            token_mask = token_mask.reshape(-1).to(device=x.device, dtype=torch.bool)
        if token_mask is None or self._masks_in_place(tokens):
            return self._apply_to_tokens(tokens, token_mask).to(x.dtype).view(x.shape)
        kept = token_mask.nonzero().squeeze(1)
        output = self._apply_to_tokens(tokens.index_select(0, kept)).to(x.dtype)
        return torch.zeros_like(tokens).index_copy(0, kept, output).view(x.shape)

    @not_compiled
    def _look_around(self, dtype: torch.dtype) -> None:
        """Note what averages gradients around this forward pass of spread experts, or refuse it."""
        if not recomputing():  # which happens outside of what was around
            bank = bare(self.experts)
            bank.around = data_parallel(self, self.experts, dtype)
            note_parameters(self.experts.parameters(), bank.share)  # other ones, where they were assigned or copied

    def _apply_to_tokens(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Outputs of (N, model_dim) tokens; a mask is given only where `_masks_in_place` holds."""
        raise NotImplementedError

    def _dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor) -> Exchange:
        """Start (N, D) tokens on their way to the experts of their (N, K) gates, which compute (N, B) blocks."""
        if self.loads is not None and self.training:
            self.loads.update_blocks(gates, blocks)
        if self.columns is not None:
            gates = gates.index_select(1, self.columns.to(gates.device))
        return self.dispatcher.dispatch(x, gates, blocks, any(p.requires_grad for p in self.experts.parameters()))

    def _draw_dropout(self, x: Tensor) -> HiddenDropout | None:
        """What this forward pass drops of the hidden channels; None in evaluation."""
        rate = self.config.hidden_dropout
        return HiddenDropout.draw(rate, x.device) if rate and self.training else None

    def _masks_in_place(self, tokens: Tensor) -> bool:
        """Whether `_apply_to_tokens` takes a mask, so that no row has to move."""
        return False

    def _check_shapes(self, x: Tensor, token_mask: Tensor | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(
                f"input is {kind}, but the layer takes tokens as a floating-point tensor, such as hidden states; "
                "convert it with .float(), or pass it through the embedding first."
            )
        if x.ndim == 0 or x.shape[-1] != self.config.model_dim:
            raise UserError(
                f"input has shape {tuple(x.shape)}, but its last size must be model_dim {self.config.model_dim}."
            )
        if token_mask is not None and token_mask.shape != x.shape[:-1]:
            raise UserError(
                f"token_mask has shape {tuple(token_mask.shape)}, but tokens have shape {tuple(x.shape[:-1])}."
            )

    # -- training -----------------------------------------------------------------------------------------------------

    def auxiliary_loss(self) -> Tensor:
        """What the method minimises besides the task loss, unweighted: a float32 scalar, 0 where there is nothing."""
        device = bare(self.experts).keys.device
        return torch.zeros((), device="cpu" if device.type == "meta" else device)  # offloaded experts are on meta

    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        """Change what the method changes between steps; collective: all ranks call it, and decide alike.

        Returns:
            What was rewritten, for the optimiser to take over; buffers and frozen parameters are not listed.
        """
        return []

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Called by an engine of DeepSpeed that is being made around a model; collective over all ranks.

        Raises:
            UserError: the engine cannot train experts that are spread over ranks, or not with its optimiser.
        """
        refuse_parts()
        if self.share is not None:
            introduce(self.experts, self.share.group, self.config.num_experts)

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Sequence[int]:
        """Numbers of the experts on this rank, as they stand in `experts`."""
        return range(self.num_local_experts) if self.share is None else self.share.held

    def lay_out(self, order: Sequence[int]) -> None:
        """Have expert `order[p]` at place p, the same on all ranks. Weights stay: they are to be loaded anew."""
        assert self.share is not None
        in_place = list(order) == list(range(self.config.num_experts))
        bank = bare(self.experts)
        bank.share = replace(self.share, order=None if in_place else tuple(order))
        note_parameters(self.experts.parameters(), bank.share)
        self.columns = None if in_place else torch.tensor(order, device=bank.keys.device)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.experts is not bare(self.experts) and self.share is not None and not keep_vars:
            raise UserError(
                f"The adapters on {prefix}experts are of experts that are spread over ranks, and a state would hold "
                "one rank's alone; merge them first (merge_and_unload), or adapt a model upcycled without expert_group."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def load_dense(
        self,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        gate_weight: Tensor | None = None,
        gate_bias: Tensor | None = None,
    ) -> None:
        """Start every expert from one dense FFN, as `load_ffn` takes it."""
        self._start_from((up_weight, up_bias, down_weight, down_bias, gate_weight, gate_bias))

    def _start_from(self, dense: FFN) -> None:
        """What `load_dense` does: every expert becomes a copy, unless a method says otherwise."""
        for bank in self.banks():
            bare(bank).initialise(dense)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Weights of a dense FFN in the layer's place are an error even where others may be missing (strict=False)."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        own = {*self._modules, *self._parameters, *self._buffers}
        given = [name for name in state_dict if name.startswith(prefix)]
        if given and not any(name.removeprefix(prefix).partition(".")[0] in own for name in given):
            rest[-1].append(
                f"{given[0]} belongs to a dense FFN, but {prefix[:-1] or 'it'} is a layer of experts, which would keep "
                "its own weights; load dense weights first, then upcycle."
            )

    def banks(self) -> list[BlockExperts]:
        """All banks of experts on this rank: those that every rank holds, and this rank's share."""
        return [*(self._locate(name)[0] for name in self.replicated), self.experts]

    def load_ffn(
        self,
        expert: str | int,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        gate_weight: Tensor | None = None,
        gate_bias: Tensor | None = None,
    ) -> None:
        """Copy a dense FFN, in nn.Linear layouts (H, d), (H,), (d, H), (d,), gated (H, d), (H,), into one expert.

        Args:
            expert: A name in `replicated` or a global index 0..K-1; an expert that another rank holds is skipped here.
            gate_weight: The projection under the activation, of a gated FFN; else None.
            gate_bias: Its bias.
        """
        bank, index = self._locate(expert)
        if 0 <= index < (1 if expert in self.replicated else self.num_local_experts):
            bare(bank).load(index, up_weight, up_bias, down_weight, down_bias, gate_weight, gate_bias)

    def ffn_weights(self, expert: str | int) -> FFN:
        """One expert in nn.Linear layouts, the inverse of `load_ffn`: copies, detached; six tensors if it is gated.

        Under expert parallelism any rank gets any expert; every rank of the group must call, and each may ask for
        another expert.
        """
        bank, index = self._locate(expert)
        group = self.expert_group
        if bank is not self.experts or group is None or dist.get_world_size(group) == 1:
            return bank(None, use=lambda bank, _: bank.read(index))
        return self._collect(int(expert), group)

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """Ranks over which the experts are sharded; None where all are here."""
        return getattr(self.dispatcher, "group", None)

    @property
    def share(self) -> ExpertShare | None:
        """Which of the residual experts this rank holds; None where all are here."""
        return bare(self.experts).share

    def _collect(self, expert: int, group: dist.ProcessGroup) -> FFN:
        asked = torch.tensor([expert], device=bare(self.experts).keys.device)
        gathered = [torch.empty_like(asked) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, asked, group=group)
        local = self.num_local_experts
        for wanted in sorted({int(t) for t in gathered}):
            source = dist.get_global_rank(group, self._place(wanted) // local)
            index = self._place(wanted) - self.first_expert
            own = index if 0 <= index < local else 0
            tensors = self.experts(None, use=lambda bank, _, own=own: bank.read(own))
            for tensor in tensors:
                if tensor is not None:
                    dist.broadcast(tensor, source, group=group)
            if wanted == expert:
                answer = tensors
        return answer

    def _locate(self, expert: str | int) -> tuple[BlockExperts, int]:
        if expert in self.replicated:
            return getattr(self, str(expert)), 0
        last = self.config.num_experts - 1
        if not isinstance(expert, int) or not 0 <= expert <= last:
            choices = [*map(repr, self.replicated), f"a whole number from 0 to {last}"]
            raise UserError(f"expert {expert!r} does not exist; use {' or '.join(choices)}.")
        return self.experts, self._place(expert) - self.first_expert

    def _place(self, expert: int) -> int:
        order = None if self.share is None else self.share.order
        return expert if order is None else order.index(expert)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"d={config.model_dim}, H={config.hidden_dim}, K={config.num_experts}, B={config.num_blocks}, "
            f"activation={config.activation}{', gated' if config.gated else ''}"
        )
