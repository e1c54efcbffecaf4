"""What wraps a model: adapters, offloading, sharding. Outputs, losses and gradients are those of the bare model, or a
sentence says why not."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.utils import parametrize

from tests.support.ranks import run_ranks
from tests.support.small_models import B, K, build, inputs, logits, moved
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, diversity_loss, full_state_dict, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.routing import Router
from unifmoe_dist.upcycling import moe_layers

HERE_AND_ON_DISK = {
    "bert.embeddings": "cpu",
    "bert.encoder.layer.0": "cpu",
    "bert.encoder.layer.1": "disk",
    "bert.encoder.layer.2": "disk",
    "bert.pooler": "cpu",
    "classifier": "cpu",
}


def upcycled(family: str = "bert") -> nn.Module:
    torch.manual_seed(0)
    return moved(upcycle(build(family), [0, 2], K, B, router_seed=1))


def batch_of(family: str = "bert") -> dict[str, Tensor]:
    torch.manual_seed(2)
    return inputs(family)


def first_layer(model: nn.Module) -> UniFMoELayer:
    return next(iter(moe_layers(model).values()))


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and Gram loss, after a backward pass of both."""
    output, gram = logits(model, batch), diversity_loss(model)
    (output.square().mean() + 0.1 * gram).backward()
    return output.detach(), gram.detach()


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_peft_copies_of_a_layer_keep_the_mask_and_count_once():
    peft = pytest.importorskip("peft")
    model, batch = upcycled(), batch_of()
    expected, gram = logits(model, batch), diversity_loss(model)
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=["query"], modules_to_save=["intermediate"])
    )
    layers = moe_layers(adapted)
    assert len(layers) == 2 and all("modules_to_save" in name for name in layers)
    for layer in layers.values():
        layer.usage.reset()
    torch.testing.assert_close(logits(adapted, batch), expected)
    for layer in layers.values():
        assert int(layer.usage.totals[0]) == int(batch["attention_mask"].sum())
    assert torch.equal(diversity_loss(adapted), gram)
    with adapted.disable_adapter():
        assert all("original_module" in name for name in moe_layers(adapted))
        assert torch.equal(diversity_loss(adapted), gram)


def test_peft_adapts_parameters_of_experts_and_router():
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    names = ["experts.keys", "experts.values", "router.weight"]
    if tuple(map(int, peft.__version__.split(".")[:2])) >= (0, 21):  # 0.17 mistakes the shape of a single expert
        names.append("shared.values")
    adapted = peft.get_peft_model(
        upcycled(), peft.LoraConfig(target_modules=[], target_parameters=names, r=2, init_lora_weights=False)
    )
    batch = batch_of()
    output, gram = step(adapted, batch)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(names) and all(p.grad.abs().sum() > 0 for p in trained.values())
    seen = first_layer(adapted).ffn_weights(1)
    merged = copy.deepcopy(adapted).merge_and_unload()
    torch.testing.assert_close(logits(merged, batch), output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(diversity_loss(merged), gram)
    assert not torch.allclose(diversity_loss(upcycled()), gram)
    for got, want in zip(seen, first_layer(merged).ffn_weights(1), strict=True):
        torch.testing.assert_close(got, want)


def test_parametrised_weights_are_those_that_compute():
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    layer = UniFMoELayer(UniFMoEConfig(16, 32, num_experts=3, num_blocks=4))
    x = torch.randn(5, 16)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for name in ("keys", "values"):
            parametrize.register_parametrization(layer.experts, name, Half())
            getattr(other.experts, name).div_(2)
    assert torch.equal(layer(x), other(x))


def test_threads_do_not_take_each_others_masks():
    model = upcycled()
    masks = [torch.ones(3, 9), torch.ones(3, 9)]
    masks[0][:, 5:], masks[1][:, 7:] = 0, 0
    layer, barrier, seen = first_layer(model), threading.Barrier(2), {}
    # Both threads have noted their masks before either reaches the layer.
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: [barrier.wait(60)].clear())
    counted = {}

    def count(module: nn.Module, args: tuple, output: Tensor) -> None:
        seen[threading.get_ident()] = int((output.abs().sum(-1) > 0).sum())

    layer.register_forward_hook(count)

    def serve(number: int) -> None:
        with torch.no_grad():
            model(input_ids=torch.arange(27).view(3, 9) + 3, attention_mask=masks[number])
        counted[number] = seen[threading.get_ident()]

    threads = [threading.Thread(target=serve, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == {0: 15, 1: 21}


# -- offloading -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_offloaded_models_compute_the_same(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, batch = upcycled(), batch_of()
    expected, gram, ffn = logits(model, batch), diversity_loss(model), first_layer(model).ffn_weights(1)
    model.save_pretrained(tmp_path)
    on_disk = type(model).from_pretrained(tmp_path, device_map=HERE_AND_ON_DISK, offload_folder=tmp_path / "off")
    accelerate.cpu_offload(model, torch.device("cpu"))
    for offloaded in (model, on_disk):
        torch.testing.assert_close(logits(offloaded, batch), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(diversity_loss(offloaded), gram)
        for got, want in zip(first_layer(offloaded).ffn_weights(1), ffn, strict=True):
            assert torch.equal(got, want)
    with pytest.raises(UserError, match="load_ffn needs weights that are not in memory"):
        first_layer(model).load_ffn(0, *ffn)


def test_weights_that_are_not_here_are_not_upcycled(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    dense = build("bert")
    dense.save_pretrained(tmp_path)
    on_disk = type(dense).from_pretrained(tmp_path, device_map=HERE_AND_ON_DISK, offload_folder=tmp_path / "off")
    half = build("bert")
    half.bert.encoder.layer[1].to("meta")
    accelerate.cpu_offload(dense, torch.device("cpu"))
    for model in (on_disk, half, dense):
        with pytest.raises(UserError, match="FFN in layer 1 are not in memory.*load the model whole, upcycle it"):
            upcycle(model, [1], K, B)
        assert not moe_layers(model)


def test_a_model_without_any_weights_gets_layers_without():
    model = upcycle(build("timm").to("meta"), [1], K, B)
    assert all(p.is_meta for p in model.parameters())
    (layer,) = moe_layers(model).values()
    with pytest.raises(UserError, match="forward pass of the layer needs weights that are not in memory"):
        layer(torch.randn(3, 32))


# -- sharding ---------------------------------------------------------------------------------------------------------


def fsdp1(model: nn.Module, batch: dict[str, Tensor], policy, original: bool):
    """Outputs, Gram loss, and all gradients by name, from a step of SGD."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
    )
    found = step(sharded, batch)
    with torch.no_grad():
        for parameter in sharded.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    with FullyShardedDataParallel.summon_full_params(sharded):
        after = {n.replace("_fsdp_wrapped_module.", ""): p.clone() for n, p in sharded.named_parameters()}
    return *found, {name: before[name] - after[name] for name in before}


def fsdp2(model: nn.Module, batch: dict[str, Tensor], classes: tuple[type[nn.Module], ...]):
    for module in model.modules():
        if isinstance(module, classes):
            fully_shard(module)
    fully_shard(model)
    layer = first_layer(model)
    with pytest.raises(UserError, match="load_ffn needs weights that are spread over ranks"):
        layer.load_ffn(0, torch.ones(64, 32), None, torch.ones(32, 64), None)
    if not classes:
        with pytest.raises(UserError, match="forward pass of the layer needs weights that are spread over ranks"):
            layer(torch.randn(3, 32))
    output, gram = step(model, batch)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return output, gram, gradients


def sharded_equals_whole(rank: int, world: int) -> bool:
    """Every way to shard gives the outputs, the Gram loss and the gradients of the whole model on the same batch."""
    model, batch = upcycled("timm").train(), batch_of("timm")
    block, parts = type(model.blocks[0]), {Router, BlockExperts}
    whole = copy.deepcopy(model)
    output, gram = step(whole, batch)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    small = functools.partial(size_based_auto_wrap_policy, min_num_params=2000)
    ways = {
        f"FSDP 1 {name} {original}": functools.partial(fsdp1, policy=policy, original=original)
        for name, policy in (
            ("root", None),
            ("blocks", ModuleWrapPolicy({block})),
            ("size", small),
            ("parts", ModuleWrapPolicy(parts)),
        )
        for original in (True, False)
    }
    for classes in ((), (block,), (UniFMoELayer,), tuple(parts)):
        ways[f"FSDP 2 {classes}"] = functools.partial(fsdp2, classes=classes)
    for name, way in ways.items():
        got_output, got_gram, got = way(copy.deepcopy(model), batch)
        torch.testing.assert_close(got_output, output, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(got_gram, gram, msg=lambda m, name=name: f"{name}: {m}")
        assert got.keys() == gradients.keys()
        for parameter, want in gradients.items():
            torch.testing.assert_close(
                got[parameter], want, rtol=1e-4, atol=1e-6, msg=lambda m, where=f"{name}, {parameter}": f"{where}: {m}"
            )
    zero3_equals_whole(model, batch, output, gram, gradients)
    return True


def zero3_equals_whole(model, batch, output, gram, gradients) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    options = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=options
    )
    got = logits(engine, batch)
    got_gram = diversity_loss(engine)
    engine.backward(got.square().mean() + 0.1 * got_gram)
    torch.testing.assert_close(got, output)
    torch.testing.assert_close(got_gram, gram)
    with pytest.raises(UserError, match="ZeRO 3 has spread the model's weights; call this inside deepspeed.zero.Gath"):
        full_state_dict(engine)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        state = full_state_dict(engine)
    assert not state or {name: t.shape for name, t in state.items()} == {n: g.shape for n, g in gradients.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(parameter), gradients[name], rtol=1e-4, atol=1e-6)


def test_sharded_models_compute_the_same():
    assert run_ranks(2, sharded_equals_whole, timeout=280) == [True, True]
