"""Text from saved language models: the tokens of Transformers' own `generate`, and what each of them used."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.jobs import run_job
from tests.support.tiny_decoders import tiny_tokenizer, write_decoder, write_texts
from unifmoe_dist import upcycle
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.generation import Sampling, coloured, load_writer, summary, write_html
from unifmoe_dist.upcycling import moe_layers

PROMPT = "The list is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model whose second layer has experts, with its tokenizer."""
    from transformers import AutoModelForCausalLM

    place = write_decoder(tmp_path_factory.mktemp("generation") / "dense")
    model = upcycle(AutoModelForCausalLM.from_pretrained(place), layers=[1], num_experts=4, num_blocks=8)
    model.save_pretrained(place.parent / "upcycled")
    tiny_tokenizer().save_pretrained(place.parent / "upcycled")
    return place.parent / "upcycled"


@pytest.mark.parametrize("sampling", [Sampling(9), Sampling(9, True, temperature=2.0, top_p=0.9, seed=3)])
def test_tokens_are_those_of_generate(folder, sampling):
    writer = load_writer(folder)
    ids = writer.encode(PROMPT, chat=False)
    torch.manual_seed(sampling.seed)
    wanted = writer.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **sampling.arguments())
    shown = []
    texts = [writer.write(PROMPT, sampling, record=record, show=shown.append) for record in (True, False)]
    for text in texts:
        assert "".join(token.text for token in text.tokens) == writer.tokenizer.decode(wanted[0])
        assert len(text.tokens) == wanted.shape[1] and sum(token.prompt for token in text.tokens) == ids.shape[1]
    assert shown == texts[0].tokens + texts[1].tokens
    assert not any(token.layers for token in texts[1].tokens)


def test_what_tokens_used_is_what_the_full_pass_decides(folder):
    writer = load_writer(folder)
    text = writer.write(PROMPT, Sampling(6))
    ids = writer.tokenizer("".join(token.text for token in text.tokens), return_tensors="pt")["input_ids"]
    (layer,), found = moe_layers(writer.model).values(), []
    hook = layer.register_forward_pre_hook(lambda module, args: found.append(module.route(args[0])))
    writer.model(ids)
    hook.remove()
    (routing,) = found
    assert ids.shape[1] == len(text.tokens) and text.tokens[-1].layers == {} and text.tokens[-1].share is None
    for place, token in enumerate(text.tokens[:-1]):
        use = token.layers["layer 1"]
        assert use.blocks == int(routing.block_compute[place]) and token.share == use.share == use.blocks / 8
        assert use.shared == tuple(routing.shared_blocks[place].nonzero().flatten().tolist())
        assert [number for number, _ in use.experts] == routing.gates[place].nonzero().flatten().tolist()
        assert use.demand == pytest.approx(routing.shared_demand[place].item(), abs=1e-5)
    assert re.search(r"^6 tokens in .*\nlayer 1: C_B \d+\.\d\d, k \d.*α 0\.\d\d; most used experts \d", summary([text]))


@pytest.mark.parametrize("method, share", [("topk", 2.0), ("emoe", 0.5)])
def test_other_layers_tell_their_experts(folder, method, share):
    writer = load_writer(folder.parent / "dense")
    upcycle(writer.model, [1], num_experts=4, num_blocks=8, method=method)
    token = writer.write(PROMPT, Sampling(2)).tokens[0]
    (use,) = token.layers.values()
    assert len(use.experts) == 2 and token.share == share and use.blocks == 8 * share
    assert use.demand is None and use.shared == ()


def test_characters_of_several_tokens_come_whole(folder):
    writer = load_writer(folder)
    shown = []
    writer.write("é “x” 漢", Sampling(1), show=shown.append)
    pieces = [token.text for token in shown if token.prompt]
    assert "".join(pieces) == "é “x” 漢" and "" in pieces


def test_colours_and_the_page(folder, tmp_path):
    writer = load_writer(folder)
    text = writer.write("a <b> & c", Sampling(4))
    line = "".join(map(coloured, text.tokens))
    assert re.sub(r"\033\[[0-9;]*m", "", line) == "".join(token.text for token in text.tokens)
    assert line.startswith("\033[1;3") and line.count("\033[0m") == len(text.tokens) - 1
    page = write_html(tmp_path / "page.html", writer, [text], Sampling(4)).read_text()
    assert page.count('class="t used') == len(text.tokens) - 1 and "<b>" not in page.partition("<article>")[2]
    use = text.tokens[0].layers["layer 1"]
    assert (
        f"layer 1: {use.blocks:g} blocks, α {use.demand:.2f}, shared {' '.join(map(str, use.shared))}; experts" in page
    )
    assert "prefers-color-scheme: dark" in page and "<script" not in page and "http" not in page


def test_a_dense_model_writes_too(folder, tmp_path):
    text = load_writer(folder.parent / "dense").write(PROMPT, Sampling(3))
    assert not any(token.layers for token in text.tokens) and coloured(text.tokens[0]) == text.tokens[0].text
    page = write_html(tmp_path / "page.html", load_writer(folder.parent / "dense"), [text], Sampling(3)).read_text()
    assert 'class="t used' not in page


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="is neither a run nor a saved model"):
        load_writer(tmp_path)
    Encoder(TINY, "none").classifier(2).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="holds a BertForSequenceClassification, which writes no text"):
        load_writer(tmp_path / "bert")
    with pytest.raises(UserError, match="has no checkpoints; leave --checkpoint latest out"):
        load_writer(folder, "latest")
    writer = load_writer(folder)
    with pytest.raises(UserError, match="are more than the 64 positions of upcycled"):
        writer.write(PROMPT, Sampling(63))
    with pytest.raises(UserError, match="a prompt is empty"):
        writer.write("", Sampling(1))
    writer.tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        writer.write(PROMPT, Sampling(1), chat=True)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_on_a_run(folder, tmp_path):
    write_texts(tmp_path / "texts")
    words = ["--data.task", "corpus", "--data.root", str(tmp_path / "texts"), "--data.held_out", "blue"]
    words += ["--data.sequence_length", "16", "--data.batch_size", "2", "--data.eval_windows", "2", "--steps", "1"]
    words += ["--model.backbone", str(folder.parent / "dense"), "--model.layers", "[1]", "--model.num_experts", "2"]
    job = run_job(tmp_path, 1, [*words, "--eval_every", "1", "--output", str(tmp_path / "run"), "--progress", "false"])
    assert job.statuses == [0], job.output
    (tmp_path / "prompts").write_text("The list\n\nA module\n")
    more = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "4", "--html", str(tmp_path / "page.html")]
    job = run_job(tmp_path, 1, [str(tmp_path / "run"), *more, "--chat"], script="generate")
    assert job.statuses == [0] and "8 tokens in" in job.output and "layer 1: C_B" in job.output, job.output
    assert job.output.startswith("user: The list\n") and "\nuser: A module" in job.output and "\033" not in job.output
    assert (tmp_path / "page.html").read_text().count("<article>") == 2
    job = run_job(tmp_path, 1, [str(tmp_path / "run"), "A", "--max_new_tokens", "2", "--color"], script="generate")
    assert job.statuses == [0] and "\033[1;3" in job.output and "in dense FFNs" in job.output


@pytest.mark.parametrize(
    "words,expected",
    [
        (["nowhere", "x"], "nowhere is not a folder"),
        (["nowhere"], "give either a prompt"),
        (["nowhere", "x", "--prompts", "y"], "give either a prompt"),
        (["nowhere", "--prompts", "y"], "--prompts y cannot be read"),
        (["nowhere", "x", "--max_new_tokens", "0"], "--max_new_tokens must be at least 1"),
        (["nowhere", "x", "--temperature", "0"], "--temperature must be above 0"),
        (["nowhere", "x", "--top_p", "1.5"], "--top_p must be above 0 and at most 1"),
        (["nowhere", "x", "--top_k", "0"], "--top_k must be at least 1"),
        (["nowhere", "x", "--html", "no/where.html"], "--html no/where.html lies in no folder that exists"),
        (["nowhere", "x", "--seed", "3"], "greedy decoding samples nothing"),
    ],
)
def test_options_that_are_refused(words, expected):
    from launch.generate import main

    with pytest.raises(UserError, match=expected):
        main(words)


def test_a_run_that_is_no_language_model(tmp_path):
    from unifmoe_dist.config import TrainConfig
    from unifmoe_dist.train.cli import dump_train_config

    (tmp_path / "config.yaml").write_text(dump_train_config(TrainConfig()))
    with pytest.raises(UserError, match="a run of data.task digits, whose model writes no text"):
        load_writer(tmp_path)
