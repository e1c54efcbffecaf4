"""Usage of UniF-MoE layers: statistics of routings written down by hand, and figures that draw what they are given."""

from __future__ import annotations

import json
import math

import pytest
import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.studies.diagnostics.diagnosis import Settings, diagnose
from unifmoe_dist.studies.diagnostics.residual_router import RouterTraining
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts
from unifmoe_dist.studies.figures.run_figures import (
    coactivation_figure,
    coactivation_graph,
    demand_figure,
    distribution_figure,
    element_figure,
    gram_figure,
    load_figure,
    patch_figure,
    text_figure,
    transition_figure,
)
from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.usage.capture import Capture
from unifmoe_dist.studies.usage.layer_usage import (
    PatchGrid,
    TextCompute,
    coactivation_change,
    distribution,
    element_usage,
    expert_distance,
    high_demand,
    patch_compute,
    study_layer,
    text_compute,
    token_means,
    usage_record,
)


def routing_by_hand() -> Routing:
    """Four tokens, K=3, B=4. b = 1, 2, 2, 3 and k = 1, 2, 2, 3, so C_B = 1+3, 2+2*2, 2+2*2, 3+3*1 = 4, 6, 6, 6."""
    gates = torch.tensor([[0.9, 0, 0], [0.5, 0.4, 0], [0.6, 0, 0.3], [0.4, 0.3, 0.3]])
    shared = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]]).bool()
    alpha = torch.tensor([0.25, 0.5, 0.5, 0.75])
    return Routing(alpha, shared, gates, gates, shared.sum(1), (gates > 0).sum(1))


def three_experts(gated: bool = False) -> BlockExperts:
    """Two copies, all weights 1, and a third with 2 in place of 1 throughout."""
    experts = BlockExperts(3, 3, 4, 4, "gelu", bias=True, gated=gated)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.view(3, -1).copy_(torch.tensor([[1.0], [1.0], [2.0]]).expand_as(weight.view(3, -1)))
    return experts


@pytest.mark.parametrize("gated", [False, True])
def test_distance_of_experts_by_hand(gated):
    # distances 0, 1 and 1 in norms of the copies, whose mean with the third's is 4/3 of theirs
    assert expert_distance(three_experts(gated)) == pytest.approx((2 / 3) / (4 / 3))


def captured(routing: Routing, item: list[int], position: list[int]) -> Capture:
    return Capture(routing, torch.tensor(item), torch.tensor(position), None)


def test_layer_usage_by_hand():
    router = Router(4, 3)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        router.weight[1, 0] = 2.0  # embedding 1 leans on the shared one: products 2, its square 5
    got = study_layer(routing_by_hand(), router, three_experts())
    assert got.tokens == 4
    assert got.expert_load == [1, 0.5, 0.5] and got.block_load == [0.75, 0.75, 0.25, 0.25]
    assert got.coactivation.tolist() == [[1, 0.5, 0.5], [0.5, 0.5, 0.25], [0.5, 0.25, 0.5]]
    assert got.mean_pair_coactivation == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert (got.block_compute.mean, got.expert_count.mean, got.shared_block_count.mean) == (5.5, 2, 2)
    assert got.shared_demand.mean == 0.5
    # C_B from B = 4 to 1 + 3 * 3 = 10, one bin each
    assert got.block_compute.fraction == [0.25, 0, 0.75, 0, 0, 0, 0]
    assert got.block_compute.edges[0] == 3.5 and got.block_compute.edges[-1] == 10.5
    assert got.expert_count.fraction == [0.25, 0.5, 0.25]
    assert got.gram[0].tolist() == [1, 2, 0, 0] and got.gram[1, 1] == 5
    assert got.gram_distance == pytest.approx(math.sqrt(2 * 2**2 + 4**2))
    assert got.gram_distance == pytest.approx(router.gram_loss().item())
    record = json.loads(json.dumps(usage_record(got)))
    assert record["block_compute"]["quantiles"]["0.5"] == 6 and record["coactivation"][1][2] == 0.25
    assert record["mean_pair_coactivation"] == got.mean_pair_coactivation


def test_distribution_by_hand():
    got = distribution(torch.tensor([0, 0, 0, 1, 4]), [-0.5, 0.5, 1.5, 4.5])
    assert got.fraction == [0.6, 0.2, 0.2]
    assert got.mean == 1 and got.deviation == pytest.approx(math.sqrt((3 * 1 + 0 + 9) / 5))
    assert got.quantiles[0.5] == 0 and got.quantiles[0.75] == 1


def test_coactivation_change_by_hand():
    routing = routing_by_hand()
    fewer = Routing(
        routing.shared_demand,
        routing.shared_blocks,
        routing.affinity,
        torch.tensor([[0.9, 0, 0], [0.5, 0.4, 0], [0.6, 0, 0], [0.4, 0, 0]]),
        routing.shared_block_count,
        torch.tensor([1, 2, 1, 1]),
    )
    before, after = (study_layer(r, Router(4, 3), three_experts()) for r in (routing, fewer))
    # pair sums 1.25 and 0.25
    assert coactivation_change(before, after) == pytest.approx(-0.8)
    alone = Routing(
        *(
            getattr(routing, n)[:1]
            for n in ("shared_demand", "shared_blocks", "affinity", "gates", "shared_block_count", "expert_count")
        )
    )
    assert math.isnan(coactivation_change(study_layer(alone, Router(4, 3), three_experts()), after))


def six_patches() -> Capture:
    """Two images of 1 x 2 patches with a class token each: tokens 0 and 3 are class tokens."""
    r = routing_by_hand()
    rows = torch.tensor([3, 0, 1, 3, 2, 3])
    fields = ("shared_demand", "shared_blocks", "affinity", "gates", "shared_block_count", "expert_count")
    return captured(Routing(*(getattr(r, name)[rows] for name in fields)), [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])


def test_patch_maps_drop_the_class_token():
    compute = patch_compute(six_patches(), PatchGrid(1, 2, prefix=1))
    assert compute.tolist() == [[[4, 6]], [[6, 6]]]
    assert high_demand(compute, 6).tolist() == [[[False, True]], [[True, True]]]
    with pytest.raises(UserError, match="4 patch tokens of 2 images do not fill grids of 2 x 2"):
        patch_compute(six_patches(), PatchGrid(2, 2, prefix=1))


def test_patch_grid_is_read_from_the_model():
    from unifmoe_dist.data.digits import build_digits_vit

    assert PatchGrid.of(build_digits_vit()) == PatchGrid(2, 2, 1)
    with pytest.raises(UserError, match="Linear has no patch grid"):
        PatchGrid.of(torch.nn.Linear(2, 2))


def test_element_usage_by_hand():
    """Patches are routed as tokens 0, 1 | 2, 3. Element 5 has patches 0 and 2, element 7 has 1; 3 is ignored."""
    mask = torch.tensor([[[5, 7]], [[5, -1]]])
    got = element_usage(six_patches(), PatchGrid(1, 2, prefix=1), mask)
    assert (got.elements, got.patches) == ([5, 7], [2, 1])
    # element 5: blocks {0} and {1, 2}, experts {0} and {0, 2}; element 7: blocks {0, 1}, experts {0, 1}
    third = 1 / 3
    assert torch.allclose(got.blocks, torch.tensor([[third, third, third, 0], [0.5, 0.5, 0, 0]]).double())
    assert torch.allclose(got.experts, torch.tensor([[2 * third, 0, third], [0.5, 0.5, 0]]).double())
    assert got.compute.tolist() == [5, 6]
    # tokens 0 and 2: alpha 1/4 and 1/2, b 1 and 2, k 1 and 2; token 1: 1/2, 2, 2
    assert got.shared_demand.tolist() == [0.375, 0.5]
    assert got.shared_block_count.tolist() == got.expert_count.tolist() == [1.5, 2]
    assert got.most_common(1).elements == [5] and got.most_common(1).blocks.equal(got.blocks[:1])
    with pytest.raises(UserError, match=r"mask has shape \(2, 2\), but the patches have shape \(2, 1, 2\)"):
        element_usage(six_patches(), PatchGrid(1, 2, prefix=1), mask[:, 0])
    with pytest.raises(UserError, match="names no element"):
        element_usage(six_patches(), PatchGrid(1, 2, prefix=1), torch.full((2, 1, 2), -1))


def test_text_compute_by_hand():
    """Two texts of 3 and 1 real tokens; the second was padded, its padding was not captured."""
    got = text_compute(captured(routing_by_hand(), [0, 0, 0, 1], [0, 1, 2, 0]), [["a", "b", "c"], ["d", "[PAD]"]])
    assert [t.tokens for t in got] == [["a", "b", "c"], ["d"]]
    assert [t.block_compute for t in got] == [[4, 6, 6], [6]]
    assert [t.expert_count for t in got] == [[1, 2, 2], [3]]
    means = token_means([TextCompute(["a", "b", "a"], [4, 6, 5], [1, 2, 2]), TextCompute(["b"], [6], [3])])
    assert list(means.itertuples(index=False, name=None)) == [("b", 6, 2.5, 2), ("a", 4.5, 1.5, 2)]
    with pytest.raises(UserError, match="text 0 has 1 token strings, but its token at position 2"):
        text_compute(captured(routing_by_hand(), [0, 0, 0, 1], [0, 1, 2, 0]), [["a"], ["d"]])


# -- figures ---------------------------------------------------------------------------------------------------------


def shown(figure) -> str:
    """All text of a figure."""
    from matplotlib.text import Text

    return " | ".join(text.get_text() for text in figure.findobj(Text))


def test_usage_figures_show_the_numbers(tmp_path):
    usage = study_layer(routing_by_hand(), Router(4, 3), three_experts())
    assert "mean 5.50" in shown(distribution_figure({"blocks.3.mlp": usage}))
    assert "blocks.3.mlp" in shown(load_figure({"blocks.3.mlp": usage}))
    assert f"distance to identity {usage.gram_distance:.2g}" in shown(gram_figure({"layer": usage}))
    graph = coactivation_graph({"without Gram loss": usage, "with Gram loss": usage})
    assert shown(graph).count("mean pair co-activation 41.7 %") == 2
    edges = graph.axes[0].lines  # drawn weakest first: 1-2 at half the strength of the others
    assert len(edges) == 3 and edges[0].get_linewidth() < edges[1].get_linewidth() == edges[2].get_linewidth()
    for suffix in ("png", "pdf"):
        path = save(graph, tmp_path / f"graph.{suffix}")
        assert path.stat().st_size > 1000
    assert {p.name for p in tmp_path.iterdir()} == {"graph.png", "graph.pdf"}


def test_patches_above_the_threshold_are_outlined_where_they_are():
    from matplotlib.patches import Rectangle

    compute = torch.tensor([[[4, 6], [4, 4]]])
    figure = patch_figure(torch.rand(1, 3, 8, 8), compute, threshold=6, titles=["clock"])
    outlines = [p for axis in figure.axes for p in axis.patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert [(p.get_xy(), p.get_width(), p.get_height()) for p in outlines] == [((3.5, -0.5), 4, 4)]
    assert "clock" in shown(figure) and "mean $C_B$ 4.5" in shown(figure)


def test_element_and_text_figures_show_the_numbers():
    mask = torch.tensor([[[5, 7]], [[5, -1]]])
    usage = element_usage(six_patches(), PatchGrid(1, 2, prefix=1), mask)
    text = shown(element_figure(torch.rand(1, 4, 8), mask[0], usage, ["head", "body"]))
    assert "head (2)" in text and "body (1)" in text and "67" in text
    texts = text_compute(captured(routing_by_hand(), [0, 0, 0, 1], [0, 1, 2, 0]), [["$a", "b", "c"], ["d"]])
    text = shown(text_figure(texts, ["first", "second"]))
    assert all(part in text for part in ("$a", "first", "second", "4", "6"))
    long = text_compute(captured(routing_by_hand(), [0] * 4, [0, 1, 2, 3]), [["word" * 8] * 4])
    assert len({t.get_position()[1] for t in text_figure(long).axes[0].texts if "word" in t.get_text()}) > 1  # broken


def test_diagnosis_figures_show_the_numbers():
    g = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=g)
    ffns = []
    for _ in range(4):
        near = torch.rand(6, generator=g) < 0.6
        down = torch.where(near, base, torch.randn(4, 6, generator=g))
        ffns.append((torch.randn(6, 4, generator=g), None, down, None))
    scores = torch.softmax(torch.randn(200, 4, generator=g), 1)
    settings = Settings(router=RouterTraining(steps=5), epsilons=(0.1, 0.2), resamples=99)
    found = diagnose(FrozenExperts.from_ffns(ffns, "gelu"), torch.randn(200, 4, generator=g), scores, settings)
    assert f"Pearson r = {found.coactivation.r:.3f}" in shown(coactivation_figure(found))
    text = shown(transition_figure(found))
    assert f"same top-2 set {100 * found.transition.same_pair:.1f} % (chance 16.7)" in text and "control" in text
    text = shown(demand_figure(found))
    assert "3 pairs of lowest shared ratio" in text and f"r = {found.demand[1].correlation:.3f}" in text
