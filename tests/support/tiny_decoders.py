"""A tiny Llama with a tokenizer trained on the spot, and texts by domain: what runs of a language model need."""

from __future__ import annotations

import json
from pathlib import Path

from unifmoe_dist.data.sentences import real_sentences

POSITIONS, END = 64, "<end>"


def write_texts(folder: Path, domains: tuple[str, ...] = ("red", "green", "blue"), documents: int = 12) -> Path:
    """Real sentences in a sub-folder per domain: .txt files, and of the last domain one .jsonl file."""
    sentences = iter(real_sentences())
    for domain in domains:
        (folder / domain).mkdir(parents=True)
        texts = [" ".join(next(sentences) for _ in range(8)) for _ in range(documents)]
        if domain == domains[-1]:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / domain / "all.jsonl").write_text(lines)
            continue
        for number, text in enumerate(texts):
            (folder / domain / f"{number:02}.txt").write_text(text)
    return folder


def tiny_tokenizer(vocabulary: int = 300):
    """Byte-level BPE with a chat template; every text can be written in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(real_sentences()[:400], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, model_max_length=POSITIONS)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    return tokenizer


def write_decoder(folder: Path, **given: int) -> Path:
    """A Llama of 2 layers, 32 wide (FFN 64), in the layout of Transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**sizes, **given})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
