"""Parameters and arithmetic against the paper's table, a library's count, and cases worked by hand."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.paper_cost import DERIVED, dynmoe, gmoe, unif_moe
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import grouped_products
from unifmoe_dist.studies.cost.cost_table import (
    FLOP_UNIT,
    PARAMETER_UNIT,
    STATISTICS,
    count_cost,
    layer_cost,
    library_flops,
    measure_cost,
    statistics_of,
)
from unifmoe_dist.studies.meters import Ledger, LiveBytes
from unifmoe_dist.studies.paper_numbers import published_cost
from unifmoe_dist.studies.run_report.method_costs import method_config
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary

CPU = torch.device("cpu")


def summary(layer: UniFMoELayer) -> UsageSummary:
    return UsageSummary.from_totals(layer.usage.totals, layer.config.num_experts)


def test_deit_small_comes_out_as_in_the_paper():
    """Built on the meta device, which needs neither memory nor time; counted by the library alone."""
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=5)
        cost = count_cost(model, {"x": torch.zeros(2, 3, 224, 224)})
    assert f"{cost.parameters / PARAMETER_UNIT:.2f}" == "20.66"
    assert cost.activated == cost.parameters
    assert f"{cost.flops / FLOP_UNIT:.2f}" == "8.57"
    # by hand: 12 layers of 12 d^2 per token and 2 T^2 d of attention, patches, head; 2 operations each
    macs = 12 * (197 * 12 * 384**2 + 2 * 197**2 * 384) + 196 * 768 * 384 + 384 * 5
    assert cost.flops == 2 * macs


def test_attention_is_counted_on_the_cpu_too():
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2
    )
    macs = 2 * (5 * 12 * 16**2 + 2 * 5**2 * 16) + 4 * 16 * 16 + 16 * 3
    assert library_flops(model, {"x": torch.zeros(7, 1, 8, 8)}) == 7 * 2 * macs
    assert model.training


def test_unif_moe_comes_out_as_in_the_paper():
    """N of layers 8 and 10; at the mean C_B of 9.21 that N_A implies, FLOPs are the paper's too."""
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=5)
        upcycle(model, [8, 10], num_experts=6, num_blocks=8)
    usage = UsageSummary(1, 9.21, 1.3, 5.3, 0.5, 0.0, [0.0] * 6, [0.0] * 8)
    layers = moe_layers(model)
    costs = [layer_cost(layer.to_empty(device="cpu"), usage, 197) for layer in layers.values()]
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{parameters / PARAMETER_UNIT:.2f}" == "34.19"
    assert f"{(parameters - sum(c.parameters - c.activated for c in costs)) / PARAMETER_UNIT:.2f}" == "21.01"
    assert costs[0].routing_flops == 2 * 384 * (7 + 8)
    replaced = 8.565374 * FLOP_UNIT - 2 * 197 * 4 * 384 * 1536
    assert f"{(replaced + sum(c.flops for c in costs)) / FLOP_UNIT:.2f}" == "8.70"


@pytest.mark.parametrize("method", DERIVED)
def test_the_papers_table_is_derived_to_the_last_digit(method):
    for statistic, value in DERIVED[method]().table().items():
        assert f"{value:.2f}" == f"{published_cost(method)[statistic]:.2f}", statistic


def test_executed_alone_the_peers_cost_less_than_the_paper_prints():
    assert gmoe(1).table()["FLOPs"] == pytest.approx(9.504, abs=1e-3)
    assert dynmoe(computed=2.54).table()["FLOPs"] == pytest.approx(9.901, abs=1e-3)
    saved = 1 - unif_moe().table()["FLOPs"] / gmoe(1).table()["FLOPs"]
    assert saved == pytest.approx(0.085, abs=1e-3)


def test_dynmoe_grows_to_the_papers_eight_experts_on_domainbed():
    """N of the table, 36.45, is that of 8 experts per layer (test_baselines.py counts them); scripts start with 6."""
    config = TrainConfig()
    config.data.task = "vlcs"
    dynmoe = method_config(config, "dynmoe").model
    assert (dynmoe.num_experts, dynmoe.most_experts()) == (6, 8)
    with pytest.raises(UserError, match="there are 6 experts"):
        method_config(config, "top8")


def test_layer_cost_by_hand():
    """d=4, H=6, K=2, B=3, so M=2. A block holds 2 (2 * 4 + 1) = 18 parameters and costs 4 * 4 * 2 = 32 operations.

    With C_B = 3.5 and k = 1.5 a token uses 3.5 * 18 + (1 + 1.5) * 4 = 73 expert parameters and the router's 12; all are
    3 (6 * 9 + 4) + 12 = 186. Routing: 2 * 4 * (3 rows + 3 prototypes) = 48. Per item of 5 tokens: 5 (48 + 112).
    """
    layer = UniFMoELayer(UniFMoEConfig(4, 6, num_experts=2, num_blocks=3))
    usage = UsageSummary(10, 3.5, 1.5, 2.0, 0.5, 0.0, [0.75, 0.75], [0.5] * 3)
    cost = layer_cost(layer, usage, tokens=5)
    assert (cost.parameters, cost.activated) == (186, 85)
    assert (cost.routing_flops, cost.expert_flops, cost.flops) == (48, 112, 800)
    bare = UniFMoELayer(UniFMoEConfig(4, 6, num_experts=2, num_blocks=3, bias=False))
    assert layer_cost(bare, usage, tokens=5).activated == 3.5 * 16 + 12


def test_layer_cost_of_gated_experts_by_hand():
    """As above with a gate: a block holds 2 (3 * 4 + 2) = 28 parameters and costs 2 * 3 * 4 * 2 = 48 operations."""
    layer = UniFMoELayer(UniFMoEConfig(4, 6, num_experts=2, num_blocks=3, gated=True))
    usage = UsageSummary(10, 3.5, 1.5, 2.0, 0.5, 0.0, [0.75, 0.75], [0.5] * 3)
    cost = layer_cost(layer, usage, tokens=5)
    assert (cost.parameters, cost.activated) == (3 * (6 * 14 + 4) + 12, 3.5 * 28 + 2.5 * 4 + 12)
    assert (cost.routing_flops, cost.expert_flops) == (48, 3.5 * 48)


def small_unif() -> nn.Module:
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2
    )
    return upcycle(model, [1], num_experts=4, num_blocks=4, router_seed=0)


def test_executed_blocks_agree_with_the_librarys_count_of_the_plain_torch_path(monkeypatch):
    """The counter sees the grouped products of executed blocks; biases, which the convention leaves out, run there as
    products of gates and bias rows: 2 d (K + 1) per token. It knows no product of several groups in one call."""
    monkeypatch.setattr(grouped_products, "_grouped_mm", None)
    model, images = small_unif().eval(), torch.randn(6, 1, 8, 8)
    with torch.no_grad():
        model(images)
    ((name, layer),) = moe_layers(model).items()
    cost = count_cost(model, {"x": images}, {name: summary(layer)})
    biases = 2 * 16 * (4 + 1) * 5
    assert cost.flops * 6 == pytest.approx(library_flops(model, {"x": images}) - 6 * biases)
    assert cost.layers[name].tokens == 5
    assert cost.activated < cost.parameters
    assert torch.isfinite(model(images)).all() and "forward" not in vars(layer)  # the layer is itself again


def test_masked_tokens_cost_nothing():
    layer = UniFMoELayer(UniFMoEConfig(8, 16, num_experts=2, num_blocks=4))

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layer(x, token_mask=mask)

    model, x, mask = Masked(), torch.randn(2, 3, 8), torch.tensor([[1, 1, 1], [1, 0, 0]])
    model(x, mask)
    cost = count_cost(model, {"x": x, "mask": mask}, {"layer": summary(layer)})
    assert cost.layers["layer"].tokens == 2  # 4 real tokens in 2 items


def test_unused_layers_are_named():
    model = small_unif()
    with pytest.raises(UserError, match="blocks.1.mlp has no usage"):
        count_cost(model, {"x": torch.zeros(1, 1, 8, 8)})


def test_live_tensors_by_hand():
    """4 kB given; a + 1 adds 4 kB, b * 2 another, then b goes; views and in-place operations add none."""
    a, ledger = torch.zeros(1024), Ledger()
    with LiveBytes(ledger, [a]):
        b = a + 1
        assert ledger.live.total() == ledger.highest == 8192
        c = b * 2
        del b
        assert (ledger.live.total(), ledger.highest) == (8192, 12288)
        c.add_(1)
        c.view(32, 32)[0]
        assert (ledger.live.total(), ledger.highest) == (8192, 12288)
    del c
    assert ledger.live.total() == 4096


def test_measured_cost_of_a_known_model():
    """One Linear(256, 256): weights, gradients and Adam's two states are four times its 257 kB."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256))

    x = torch.randn(8, 256)

    def loss_of(model: nn.Module, inputs: dict, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(**inputs), labels)

    got = measure_cost(build, build, loss_of, ({"input": x}, torch.zeros(8, 256)), {"input": x}, CPU, 3, 1)
    weights = 4 * 257 * 256
    assert weights < got.eval_memory < 1.2 * weights
    assert 4 * weights <= got.train_memory < 6.5 * weights  # and Adam's temporaries
    assert 0 < got.eval_seconds and 0 < got.train_seconds
    assert (got.memory_kind, got.device) == ("live tensors", "CPU")


def test_table_in_the_papers_units():
    columns = {name: derive().table() for name, derive in DERIVED.items()}
    text = {
        statistic: [f"{columns[name][statistic]:.2f} ({published_cost(name)[statistic]:.2f})" for name in DERIVED]
        for statistic in STATISTICS
        if statistic in columns["gmoe"]
    }
    assert text["N"][:2] == ["20.66 (20.66)", "32.12 (32.12)"] and "T-TPS" not in text
    assert text["FLOPs"] == ["8.57 (8.57)", "10.37 (10.37)", "7.92 (7.92)", "14.63 (14.63)", "8.70 (8.70)"]
    assert published_cost("topk") == {}
    model = small_unif().eval()
    model(torch.zeros(1, 1, 8, 8))
    ((name, layer),) = moe_layers(model).items()
    column = statistics_of(count_cost(model, {"x": torch.zeros(1, 1, 8, 8)}, {name: summary(layer)}))
    assert column["N"] == pytest.approx(sum(p.numel() for p in model.parameters()) / 2**20)
