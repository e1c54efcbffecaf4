"""FFNs of any make are read as they compute, or refused in a sentence that names the module and the way out."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.dense_ffn import DenseFFN
from unifmoe_dist.upcycling.reader import Parts, outputs, read_ffn

D, H = 8, 24


class Gated(nn.Module):
    """Gate and up as two projections or as one, the gate first or last, its activation a module or not."""

    def __init__(self, packed: bool, gate_first: bool, module: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.one = nn.Linear(D, 2 * H if packed else H)
        if not packed:
            self.two = nn.Linear(D, H)
        self.out = nn.Linear(H, D)
        self.packed, self.gate_first, self.scale = packed, gate_first, scale
        if module:
            self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.one(x).chunk(2, -1) if self.packed else (self.one(x), self.two(x))
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.out(self.scale * functional.gelu(gate) * up)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Weights of gate and up."""
        first, second = self.one.weight.chunk(2) if self.packed else (self.one.weight, self.two.weight)
        return (first, second) if self.gate_first else (second, first)


def read(module: nn.Module) -> DenseFFN:
    parts = Parts.of(module)
    assert parts is not None
    return read_ffn(module, "blocks.3.mlp", parts)


@pytest.mark.parametrize(("dtype", "module"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_the_gate_is_the_projection_under_the_activation(packed, gate_first, module, dtype):
    ffn = Gated(packed, gate_first, module).to(dtype).train()
    before = torch.get_rng_state()
    found = read(ffn)
    gate, up = ffn.halves()
    assert found.gate is not None and torch.equal(found.gate.weight, gate) and torch.equal(found.up.weight, up)
    assert found.shape() == {"model_dim": D, "hidden_dim": H, "activation": "gelu", "bias": True, "gated": True}
    assert torch.equal(torch.get_rng_state(), before) and all(part.training for part in ffn.modules())


@pytest.mark.parametrize("zero", ["out", "one"])
def test_weights_of_zero_do_not_hide_the_order(zero: str):
    """Some models start with FFNs that give nothing, with which every reading agrees."""
    for packed in (True, False):
        ffn = Gated(packed, gate_first=False)
        nn.init.zeros_(getattr(ffn, zero).weight)
        nn.init.zeros_(getattr(ffn, zero).bias)
        gate, up = ffn.halves()
        found = read(ffn)
        assert found.gate is not None and found.gate.weight.data_ptr() == gate.data_ptr()
        assert found.up.weight.data_ptr() == up.data_ptr()


def test_weights_of_zero_hide_neither_a_norm_nor_the_activation():
    for module in (Normed(), Gated(True, False, module=False)):
        nn.init.zeros_(module.out.weight)
        if isinstance(module, Normed):
            with pytest.raises(UserError, match="cannot have its norm"):
                read(module)
        else:
            assert read(module).activation == "gelu"


def test_small_weights_in_half_precision():
    ffn = Gated(True, False).half()
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.mul_(1e-4)
    assert torch.equal(read(ffn).gate.weight, ffn.halves()[0])


def test_a_projection_is_not_taken_for_the_activation():
    ffn = nn.ModuleDict({"expand": nn.Linear(D, H), "contract": nn.Linear(H, D)})
    ffn.forward = lambda x: ffn["contract"](ffn["expand"](x).relu())
    assert read_ffn(ffn, "mlp", Parts(("expand",), "contract")).activation == "relu"


def test_without_weights_the_shape_is_read_all_the_same():
    for module in (True, False):
        ffn = Gated(True, False, module).to("meta")
        assert read(ffn).shape() == read(Gated(True, False, module)).shape()
        assert all(parameter.is_meta for parameter in ffn.parameters())


def test_projections_kept_in_other_layouts():
    config = transformers.GPT2Config(n_embd=D, n_inner=H)
    ffn = transformers.models.gpt2.modeling_gpt2.GPT2MLP(H, config)
    found = read(ffn)
    assert torch.equal(found.up.weight, ffn.c_fc.weight.T) and torch.equal(found.down.bias, ffn.c_proj.bias)
    assert found.up.weight.requires_grad and found.activation == "gelu_tanh"
    ffn.requires_grad_(False)
    assert not any(parameter.requires_grad for part in read(ffn).projections for parameter in part.parameters())
    falcon = transformers.FalconConfig(hidden_size=D, ffn_hidden_size=H, bias=True)
    ffn = transformers.models.falcon.modeling_falcon.FalconMLP(falcon)
    assert torch.equal(read(ffn).up.weight, ffn.dense_h_to_4h.weight)


class Normed(Gated):
    def __init__(self) -> None:
        super().__init__(True, True)
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.one(x).chunk(2, -1)
        return self.out(self.norm(functional.gelu(gate) * up))


class Residual(Gated):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return super().forward(x) + residual


class InPlace(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Strange(Gated):
    def __init__(self) -> None:
        super().__init__(True, True)
        self.act_fn = nn.Mish()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Gated(True, True, scale=1.1), "computes something else than an FFN of its one and out: .* by 9%"),
        (lambda: Gated(True, True, scale=1.03).bfloat16(), "computes something else .* by 3%"),
        (lambda: InPlace(True, True), "InPlace, computes something else"),
        (lambda: Normed(), r"a Normed, computes .*cannot have its norm \(LayerNorm\); if it is one, name its"),
        (lambda: Residual(True, True), "Residual, cannot be called with tokens alone, .*residual.*register_adapter"),
        (lambda: Strange(), "blocks.3.mlp: The FFN's activation Mish is not supported"),
    ],
    ids=["scaled", "scaled in bf16", "in place", "norm", "argument", "activation"],
)
def test_what_computes_something_else_is_refused(module, words: str):
    with pytest.raises(UserError, match=words):
        read(module())


def test_shapes_of_ffns():
    attention = nn.Module()
    for name in "qkvo":
        setattr(attention, name, nn.Linear(D, D))
    assert Parts.of(attention) is None
    assert Parts.of(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))) == Parts(("0",), "2")
    assert Parts.of(nn.Sequential(nn.Linear(H, D), nn.ReLU(), nn.Linear(D, H))) is None  # a bottleneck
    assert Parts.of(Gated(False, True)) == Parts(("one", "two"), "out")
    assert read(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))).activation == "relu"


def test_dropouts_behind_the_ffn_are_told_from_those_inside():
    ffn = transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2FeedForward(
        transformers.Wav2Vec2Config(hidden_size=D, intermediate_size=H)
    )
    assert outputs(ffn, torch.zeros(1, 1, D))[1] == [ffn.output_dropout]
    assert outputs(copy.deepcopy(ffn).to("meta"), torch.zeros(1, 1, D, device="meta"))[1] != []
