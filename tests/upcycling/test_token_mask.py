"""Padding: no position of it reaches a layer of experts, in whatever form an attention mask comes."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from tests.support.small_models import TEXT, WIDTH, B, K, build, inputs, logits
from unifmoe_dist import upcycle
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.upcycling.token_mask import token_mask_from_attention


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", TEXT)
def test_padding_reaches_the_layer_and_changes_nothing(family: str, attention: str):
    try:
        model = build(family, attn_implementation=attention)
    except ValueError:
        pytest.skip(f"this Transformers has no {attention} attention for {family}")  # ELECTRA before version 5
    upcycle(model, [0, 2], K, B)
    seen: list[Tensor] = []
    for layer in moe_layers(model).values():
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    batch = inputs(family)
    batched = logits(model, batch)
    real = batch["attention_mask"].bool()
    assert len(seen) == 2
    for output in seen:
        assert (output[~real] == 0).all() and (output[real].abs().sum(-1) > 0).all()
    short = {name: value[1:2, :4] for name, value in batch.items()}
    torch.testing.assert_close(batched[1:2], logits(model, short), rtol=1e-4, atol=1e-5)
    full = inputs(family, padded=False)  # without padding right after: nothing of the old mask is left
    seen.clear()
    logits(model, {"input_ids": full["input_ids"]})
    assert all((output.abs().sum(-1) > 0).all() for output in seen)
    assert seen[0].shape == (3, 9, WIDTH)


def test_forms_of_attention_masks():
    real = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    square = real[:, None, None, :].expand(2, 1, 3, 3)
    additive = torch.zeros(2, 1, 3, 3).masked_fill(~square, torch.finfo(torch.float32).min)
    causal = square & torch.ones(3, 3).tril().bool()
    half = torch.zeros(2, 2, 3, 3, dtype=torch.float16).masked_fill(~square, float("-inf"))
    least = [torch.where(square, 0.25, value) for value in (-10000.0, -1e9)]  # BERT's own, and what is often used
    biased = additive + torch.linspace(-200, 0, 9).view(3, 3)
    for mask in (
        real,
        real.long(),
        real.float(),
        square,
        square[:, 0],
        additive,
        causal,
        half,
        *least,
        least[0].bfloat16(),
        biased,
    ):
        assert torch.equal(token_mask_from_attention(mask, 2, 3), real)
    assert torch.equal(token_mask_from_attention(square[1:], 2, 3), real[1:].expand(2, 3))
    assert token_mask_from_attention(None, 2, 3) is None
    assert token_mask_from_attention(square, 2, 1) is None  # keys from a cache beside the tokens
    from torch.nn.attention.flex_attention import create_block_mask

    flex = create_block_mask(lambda b, h, q, kv: real[b, kv], 2, None, 3, 3, device="cpu", BLOCK_SIZE=128)
    assert torch.equal(token_mask_from_attention(flex, 2, 3), real)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("past", [0, 2])
def test_causal_masks_with_keys_from_a_cache(past: int, spare: int):
    """Four queries behind `past` keys of a cache, before `spare` places for keys to come; padded left and right."""
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    cached = torch.tensor([[0, 0], [1, 1], [1, 1]])[:, :past].bool()
    keys = torch.cat([cached, real, torch.ones(3, spare).bool()], dim=1)
    place, query = torch.arange(keys.shape[1]), torch.arange(4)[:, None] + past
    causal = keys[:, None, None] & (place <= query)
    sliding = causal & (place > query - 2)
    additive = torch.zeros(3, 1, 4, keys.shape[1]).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (causal, sliding, additive, causal.expand(3, 2, 4, -1), causal[:, 0], keys[:, : past + 4]):
        assert torch.equal(token_mask_from_attention(mask, 3, 4), real)
    seen = causal.clone()
    seen[:, :, 1, : past + 3] |= keys[:, None, : past + 3]  # a part of an image sees what follows in it
    assert (token_mask_from_attention(seen, 3, 4) | ~real).all()  # nothing real is lost
    alone = causal[2:]  # no sequence has a last token: where the queries lie is known all the same, or all are taken
    assert (token_mask_from_attention(alone, 1, 4) | ~real[2:]).all()
    assert token_mask_from_attention(causal[:, :, :1], 3, 1) is None  # one token is no padding
    windows = torch.ones(5, 4, 4)  # Swin's: as many masks as windows, not as sequences
    assert token_mask_from_attention(windows, 15, 4) is None


def test_patches_of_padding_reach_the_layer():
    """NaFlexViT's, whose images have numbers of patches of their own, behind four registers."""
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=4, mlp_ratio=2).eval()
    upcycle(model, [1], K, B)
    (layer,) = moe_layers(model).values()
    patches, places = torch.randn(2, 6, 16 * 16 * 3), torch.tensor([[y, x] for y in range(2) for x in range(3)])
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    model({"patches": patches, "patch_coord": places.expand(2, 6, 2), "patch_valid": valid})
    assert int(layer.usage.totals[0]) == int(valid.sum()) + 2 * model.num_prefix_tokens


def test_an_ffn_before_attention_gets_no_mask():
    """What attention noted would be of the batch before."""

    class Block(nn.Module):
        def __init__(self, attention_first: bool) -> None:
            super().__init__()
            self.ffn = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            if attention_first:
                del self.ffn
            self.attention = SelfAttention()
            if attention_first:
                self.ffn = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.ffn(self.attention(x, mask))

    class SelfAttention(nn.Module):
        def forward(self, states: Tensor, attn_mask: Tensor) -> Tensor:
            return states

    mask = torch.tensor([[1, 1, 0]])
    for first, tokens in ((True, 2), (False, 3)):
        model = upcycle(nn.Sequential(Block(first)), [0], K, B)
        model[0](torch.randn(1, 3, 32), mask)
        (layer,) = moe_layers(model).values()
        assert int(layer.usage.totals[0]) == tokens
        model[0](torch.randn(1, 3, 32), mask)
        assert int(layer.usage.totals[0]) == 2 * tokens


def test_decoding_with_a_cache_equals_decoding_without():
    """With a cache, keys outnumber tokens: nothing may be taken for padding by its place."""
    config = build("bert", is_decoder=True).config
    model = upcycle(transformers.BertLMHeadModel(config).eval(), [0, 1], K, B)
    ids, mask = torch.randint(3, 50, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **options, use_cache=True, eos_token_id=None)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False, eos_token_id=None))


def test_ffn_chunking_does_not_upset_the_mask():
    for family in ("bert", "distilbert"):
        chunked = upcycle(build(family, chunk_size_feed_forward=3), [1], K, B, router_seed=1)
        whole = upcycle(build(family), [1], K, B, router_seed=1)
        whole.load_state_dict(chunked.state_dict())
        batch = inputs(family)
        torch.testing.assert_close(logits(chunked, batch), logits(whole, batch))
