"""The diagnostics on real models: what is captured, and routers trained on frozen experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.layers import make_layer
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.diagnostics.rankings import top_pair
from unifmoe_dist.studies.diagnostics.residual_router import ResidualOutput, RouterTraining, train_router_on_task
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, shared_sets
from unifmoe_dist.studies.usage.capture import capture
from unifmoe_dist.upcycling import moe_layers, upcycle

# -- from a model ----------------------------------------------------------------------------------------------------


def small_model():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2)
    return upcycle(model, [1], num_experts=4, num_blocks=4, router_seed=0)


def test_capture_sees_every_token_where_it_was():
    model = small_model().train()
    ((name, layer),) = moe_layers(model).items()
    seen = []
    hook = layer.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(), out.detach())))
    images = torch.randn(5, 1, 8, 8)
    got = capture(model, {name: layer}, [{"x": images[:3]}, {"x": images[3:]}], keep_tokens=True)[name]
    hook.remove()
    assert model.training and not layer._forward_pre_hooks
    assert got.item.tolist() == [i for i in range(5) for _ in range(5)]
    assert got.position.tolist() == list(range(5)) * 5
    tokens = torch.cat([x.reshape(-1, 16) for x, _ in seen])
    assert torch.equal(got.tokens, tokens)
    with torch.no_grad():
        assert torch.equal(got.routing.gates, layer.eval().route(tokens).gates)
    assert got.routing.by_products is None
    with pytest.raises(UserError, match="at least one batch"):
        capture(model, {name: layer}, [])


def test_capture_leaves_padding_out():
    layer = moe_layers(small_model())["blocks.1.mlp"]
    holder = torch.nn.ModuleDict({"layer": layer})
    holder.forward = lambda x, mask: layer(x, token_mask=mask)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    got = capture(holder, {"l": layer}, [{"x": torch.randn(2, 3, 16), "mask": mask}])["l"]
    assert got.item.tolist() == [0, 0, 1] and got.position.tolist() == [0, 1, 0]
    assert got.tokens is None and len(got.routing.expert_count) == 3


def test_frozen_experts_compute_what_the_layer_holds():
    layer = moe_layers(small_model())["blocks.1.mlp"]
    torch.nn.init.normal_(layer.experts.values)
    torch.nn.init.normal_(layer.experts.value_bias)
    experts, x = FrozenExperts.of(layer), torch.randn(7, 16)
    outputs = torch.bmm(experts.activations(x), experts.values)
    for e in range(4):
        up, up_bias, down, down_bias = layer.ffn_weights(e)
        expected = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
        assert torch.allclose(outputs[e].float(), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_gated_experts_compute_what_the_layer_holds(bias):
    layer = make_layer(bias=bias, gated=True, activation="silu")
    experts, x = FrozenExperts.of(layer), torch.randn(7, 16)
    assert experts.to(torch.float32).gate_keys.dtype == torch.float32
    outputs = torch.bmm(experts.activations(x), experts.values)
    for e in range(3):
        up, up_bias, down, down_bias, gate, gate_bias = layer.ffn_weights(e)
        hidden = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
        assert torch.allclose(outputs[e].float(), F.linear(hidden, down, down_bias), atol=1e-4)


def test_the_new_router_routes_residual_positions_alone():
    """y = S_ij(x) + sum over its top-2 of g_e E_e^R(x), token by token from the layer's own weights."""
    model = small_model()
    layer = moe_layers(model)["blocks.1.mlp"]
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    experts = FrozenExperts.of(layer)
    sets = shared_sets(experts, delta=0.1)
    assert 0 < sets.ratio.min() and sets.ratio.max() < 1
    weight, x = torch.randn(4, 16), torch.randn(2, 3, 16)
    got = ResidualOutput(experts.to(torch.float32), sets, weight)(layer, (x,), {}, torch.empty(2, 3, 16))
    tokens = x.reshape(6, 16)
    scores, logits = layer.route(tokens).affinity, tokens @ weight.T
    parts = experts.activations(tokens)  # (4, 6, C)
    for n in range(6):
        i, j = scores[n].topk(2).indices.sort().values.tolist()
        shared = sets.shared[int(top_pair(scores[n : n + 1]))].double()
        total = scores[n, i] + scores[n, j]
        y = sum(scores[n, e] / total * ((parts[e, n] * shared) @ experts.values[e]) for e in (i, j))
        a, b = logits[n].topk(2).indices.tolist()
        gate = torch.sigmoid(logits[n, a] - logits[n, b])
        for e, g in ((a, gate), (b, 1 - gate)):
            y = y + g * ((parts[e, n] * (1 - shared)) @ experts.values[e])
        torch.testing.assert_close(got.reshape(6, 16)[n], y.float(), atol=1e-4, rtol=1e-4)


def test_router_on_the_task_loss_lowers_it_and_leaves_the_model_alone():
    model = small_model()
    layer = moe_layers(model)["blocks.1.mlp"]
    torch.nn.init.normal_(layer.experts.values, std=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = (images.mean((1, 2, 3)) > 0).long()
    losses = []

    def loss_of(output, target):
        loss = F.cross_entropy(output, target)
        losses.append(loss.item())
        return loss

    sets = shared_sets(FrozenExperts.of(layer))
    training = RouterTraining(steps=40, lr=0.05)
    weight = train_router_on_task(model, layer, sets, [({"x": images}, labels)] * 40, loss_of, training)
    assert weight.shape == (4, 16)
    assert len(losses) == 40 and min(losses[-5:]) < losses[0] - 0.02
    assert all(p.requires_grad and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not layer._forward_hooks and model.training
    assert all(p.grad is None for p in model.parameters())
