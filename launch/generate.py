#!/usr/bin/env python
"""Text from a saved language model: `python launch/generate.py FOLDER "Once upon a time" [--html FILE]`.

FOLDER is a run, or a model that launch/export.py or save_pretrained wrote. Tokens are printed as they come; on a
terminal each in the colour of the blocks that it executed in the layers of experts. Greedy, unless a sampling option is
given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser

SAMPLING = ("temperature", "top_k", "top_p")


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    prompts = _prompts(options)
    sampled = [name for name in SAMPLING if getattr(options, name) is not None]
    _check(options, sampled)
    if not options.folder.is_dir():
        raise UserError(f"{options.folder} is not a folder; give a run, or a folder with a saved model.")
    from unifmoe_dist.studies import generation

    chosen = {name: getattr(options, name) for name in sampled}
    sampling = generation.Sampling(options.max_new_tokens, bool(sampled), seed=options.seed or 0, **chosen)
    writer = generation.load_writer(options.folder, options.checkpoint)
    colour = sys.stdout.isatty() if options.color is None else options.color

    def show(token: generation.Token) -> None:
        print(generation.coloured(token) if colour else token.text, end="", flush=True)

    texts = []
    for number, prompt in enumerate(prompts):
        print(end="\n" if number else "")
        texts.append(writer.write(prompt, sampling, options.chat, colour or options.html is not None, show))
        print()
    print(generation.summary(texts), file=sys.stderr)
    if colour and any(token.layers for text in texts for token in text.tokens):
        print(generation.legend(), file=sys.stderr)
    if options.html is not None:
        print(generation.write_html(options.html, writer, texts, sampling), file=sys.stderr)


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompt of the command line, or one for each line of a file."""
    if (options.prompt is None) == (options.prompts is None):
        raise UserError('give either a prompt, such as "Once upon a time", or --prompts FILE with one on each line.')
    if options.prompt is not None:
        return [options.prompt]
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {options.prompts} cannot be read ({error}); give a text file in UTF-8.") from error
    if not (found := [line for line in lines if line.strip()]):
        raise UserError(f"--prompts {options.prompts} holds no prompt; write one on each line.")
    return found


def _check(options: argparse.Namespace, sampled: Sequence[str]) -> None:
    if options.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens must be at least 1, not {options.max_new_tokens}.")
    if options.temperature is not None and not options.temperature > 0:
        raise UserError(f"--temperature must be above 0, not {options.temperature:g}; greedy decoding is without it.")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top_k must be at least 1, not {options.top_k}.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top_p must be above 0 and at most 1, not {options.top_p:g}.")
    if options.html is not None and not options.html.parent.is_dir():
        raise UserError(f"--html {options.html} lies in no folder that exists; make {options.html.parent} first.")
    if options.seed is not None and not sampled:
        raise UserError("--seed decides what is sampled, and greedy decoding samples nothing; give --temperature too.")


def _parser() -> OptionParser:
    parser = OptionParser("generate.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run or of the model")
    parser.add_argument("prompt", nargs="?", help="what the text begins with")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="text file with a prompt on each line")
    parser.add_argument("--checkpoint", help="of a run: best, latest or step-N (default: best)")
    parser.add_argument("--chat", action="store_true", help="put the tokenizer's chat template around the prompt")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=64, help="at most (default: 64)")
    parser.add_argument("--temperature", type=float, help="divides the logits (default: 1, if another is given)")
    parser.add_argument("--top_k", "--top-k", type=int, help="draw from the k most probable tokens (default: 50)")
    parser.add_argument("--top_p", "--top-p", type=float, help="draw from the fewest tokens of this mass (default: 1)")
    parser.add_argument("--seed", type=int, help="of what is drawn (default: 0)")
    parser.add_argument(
        "--color", action=argparse.BooleanOptionalAction, help="colour tokens by their blocks (default: on a terminal)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with what every token used")
    return parser


if __name__ == "__main__":
    run_main(main)
