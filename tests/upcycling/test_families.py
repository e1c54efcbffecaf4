"""Every family on a tiny model: read as it computes, trained, saved, reloaded in a new process; decoders generate."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.families import FAMILIES, PAGES, WORDS, Family, Missing, table, with_table
from tests.support.ranks import run_ranks
from tests.support.reload_families import output, save, upcycled
from tests.support.small_models import moved
from unifmoe_dist import upcycle
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.upcycling import moe_layers

ROOT = Path(__file__).parents[2]
DECODERS = [family for family in FAMILIES if family.kind == "decoders"]


def by_name(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=[family.name for family in families])


def built(family: Family) -> nn.Module:
    torch.manual_seed(0)
    try:
        return family.build()
    except Missing as missing:
        pytest.skip(str(missing))


def dense_ffn(layer: nn.Module, x: Tensor) -> Tensor:
    """What the shared expert computes, which is a copy of the dense FFN."""
    up, up_bias, down, down_bias, *gate = layer.ffn_weights("shared")
    linear, act = nn.functional.linear, FUNCTIONS[layer.config.activation]
    hidden = act(linear(x, *gate)) * linear(x, up, up_bias) if gate else act(linear(x, up, up_bias))
    return linear(hidden, down, down_bias)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_name_what_is_tried_here(page: Path):
    assert page.read_text() == with_table(page.read_text()), "run python -m tests.support.families"
    assert page.read_text().count(table()) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("families")


@by_name(FAMILIES)
def test_experts_copy_the_ffn_and_train(family: Family, folder: Path):
    dense = moved(built(family))
    inputs = family.inputs()
    expected = output(dense, inputs)
    model = upcycled(family, copy.deepcopy(dense))
    layers = moe_layers(model)
    assert len(layers) == family.layers and len(moe_layers(family.part_of(model))) == family.layers
    shapes = upcycled(family, copy.deepcopy(dense).to("meta")).state_dict()
    assert {name: tensor.shape for name, tensor in shapes.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    forwards = {layer: layer.forward for layer in layers.values()}
    for layer in layers.values():
        layer.forward = lambda x, token_mask=None, layer=layer: dense_ffn(layer, x)
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-4)
    for layer in forwards:
        del layer.forward

    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    made = model(**inputs)
    (made if isinstance(made, Tensor) else made[0]).float().square().mean().backward()
    for name, layer in layers.items():
        for parameter in (layer.router.weight, layer.shared.keys, layer.experts.values):
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert layer.router.weight.grad.abs().sum() > 0 and layer.shared.keys.grad.abs().sum() > 0, name
    before = {name: layer.shared.keys.detach().clone() for name, layer in layers.items()}
    optimiser.step()
    assert all(not torch.equal(before[name], layer.shared.keys) for name, layer in layers.items())
    save(family, model.eval(), inputs, folder / family.name)


@pytest.fixture(scope="module")
def reloaded(folder: Path) -> dict[str, list[float] | str]:
    """What a new process says of all the folders that the tests above have written."""
    command = [sys.executable, "-m", "tests.support.reload_families", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@by_name(FAMILIES)
def test_a_new_process_reloads_it(family: Family, folder: Path, reloaded):
    if not (folder / family.name).exists():
        pytest.skip("not saved above")
    found = reloaded[family.name]
    assert not isinstance(found, str), found
    assert found[0] == family.layers and found[1] < 1e-4


@by_name([f for f in FAMILIES if f.kind == "encoders" or (f.part.endswith("encoder") and f.kind != "speech")])
def test_padding_costs_nothing(family: Family):
    model = moved(upcycled(family, built(family))).eval()
    inputs = family.inputs()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 5:] = 0
    layer = next(iter(moe_layers(model).values()))
    layer.usage.reset()
    padded = output(model, {**inputs, "attention_mask": mask})
    assert int(layer.usage.totals[0]) == int(mask.sum())
    alone = {name: value[:1, :5] if name == "input_ids" else value[:1] for name, value in inputs.items()}
    shown = slice(0, 5) if padded.shape[1] == mask.shape[1] else slice(None)
    torch.testing.assert_close(padded[:1, shown], output(model, alone), rtol=1e-4, atol=1e-4)


# -- decoders ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def without_cache(model: nn.Module, ids: Tensor, steps: int) -> Tensor:
    """Greedy decoding by a full forward pass for every token."""
    for _ in range(steps):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@by_name(DECODERS)
def test_decoding_with_a_cache_and_padding_on_the_left(family: Family, cache: str):
    model = moved(upcycled(family, built(family))).eval()
    if cache == "static":  # with places for keys to come, and masks of another kind
        model.set_attn_implementation("eager")
    layer = next(iter(moe_layers(model).values()))
    ids = torch.randint(3, WORDS, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}

    wanted = [without_cache(model, ids[:1, 4:], 5)[:, 5:], without_cache(model, ids[1:], 5)[:, 9:]]
    layer.usage.reset()
    with torch.no_grad():
        got = model.generate(ids, attention_mask=mask, use_cache=True, **options)
    assert torch.equal(got[:, 9:], torch.cat(wanted))
    assert int(layer.usage.totals[0]) == int(mask.sum()) + 2 * 4  # padding costs nothing; the last token is not read

    if model.config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
        torch.testing.assert_close(padded[:1, 4:], model(input_ids=ids[:1, 4:]).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded[1:], model(input_ids=ids[1:]).logits, rtol=1e-4, atol=1e-4)


@by_name([family for family in FAMILIES if family.kind == "encoders with decoders" and "decoder" in family.part])
def test_a_decoder_behind_an_encoder_decodes_with_a_cache(family: Family):
    model = moved(upcycled(family, built(family))).eval()
    ids = family.inputs()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        cached, whole = (model.generate(ids, **options, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, whole) and cached.shape[1] >= 7


def spread_equals_whole(rank: int, world: int) -> bool:
    """Run on every rank: with experts spread over ranks, the same outputs and the same tokens."""
    for title in ("Llama", "OPT"):
        dense = built(next(family for family in DECODERS if family.title == title))
        whole = upcycle(copy.deepcopy(dense), [0, 1], 4, 4, router_seed=3)
        spread = upcycle(dense, [0, 1], 4, 4, router_seed=3, expert_group=dist.group.WORLD)
        torch.manual_seed(1)
        ids = torch.randint(3, WORDS, (2, 9))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        torch.testing.assert_close(output(spread, batch), output(whole, batch), rtol=1e-4, atol=1e-4)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            got, want = (model.generate(**batch, **options) for model in (spread, whole))
        assert torch.equal(got, want)
    return True


def test_experts_spread_over_ranks():
    assert run_ranks(2, spread_equals_whole) == [True, True]
