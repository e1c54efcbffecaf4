"""What a run shows while it goes on and at its end, for people at a terminal of 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tqdm import tqdm

from unifmoe_dist.train.words import BAR, LEAST, closing_words, result_sentence, show_beside, training_numbers
from unifmoe_dist.usage import UsageSummary


def usage(experts: int) -> UsageSummary:
    load = [0.05 + 0.02 * expert for expert in range(experts)]
    return UsageSummary(
        **{
            **{name: 0 for name in UsageSummary.__dataclass_fields__},
            "block_compute": 10.847,
            "expert_count": 1.53,
            "shared_demand": 0.434,
            "expert_load": load,
        }
    )


def shown(task: str, columns: int, numbers: list[str]) -> str:
    """The last line that a bar draws on a terminal of so many columns."""
    terminal = io.StringIO()
    bar = tqdm(total=5000, initial=4899, desc=task, file=terminal, ncols=columns, bar_format=BAR, mininterval=0)
    show_beside(bar, numbers)
    bar.update()
    line = terminal.getvalue().rsplit("\r", 1)[1]
    bar.close()
    return line


def test_sixteen_experts_are_two_numbers_with_a_name():
    numbers = training_numbers({"loss": 1.234, "accuracy": 0.5}, {"a": usage(16), "b": usage(16)})
    assert numbers == ["loss 1.234", "acc 0.500", "C_B 10.85", "k 1.53", "α 0.43", "loads 5-35%"]
    assert training_numbers({"loss": 1.234, "accuracy": 0.5}, {}) == ["loss 1.234", "acc 0.500"]
    assert training_numbers({"loss": 1.0, "accuracy": 0.5}, {"a": usage(4), "b": usage(6)})[-1] == "loads 5-15%"


@pytest.mark.parametrize(
    "task, columns, last",
    [("digits", 80, "C_B"), ("terraincognita", 80, "acc"), ("digits", 160, "loads"), ("digits", 50, "digits")],
)
def test_a_bar_keeps_its_length_and_the_numbers_that_fit(task, columns, last):
    line = shown(task, columns, training_numbers({"loss": 1.234, "accuracy": 0.5}, {"a": usage(16)}))
    assert len(line) <= columns
    bar = line.split("|")[1]
    assert len(bar) >= LEAST and bar.count("#") >= 0.9 * len(bar)
    assert last in line and f"{last} " in line + " "
    assert line.startswith(f"{task}  98%|")


SUMMARY = {
    "task": "digits",
    "held_out": "rot75",
    "moe": "unif",
    "algorithm": "erm",
    "metric": "accuracy",
    "score": 0.89123,
    "validation_score": 0.9799,
    "linear_baseline_accuracy": 0.598,
    "mean_block_compute": 10.8471,
    "num_blocks": 8,
    "mean_expert_count": 1.534,
    "world_size": 2,
    "wall_seconds": 48.2,
    "best_step": 700,
    "steps": 800,
}


def test_a_run_ends_in_sentences():
    words = closing_words(SUMMARY, Path("runs/my run"))
    first, second, third, last = words.splitlines()
    assert first == (
        "UniF-MoE on digits (rot75 held out): test accuracy 89.1 % (validation 98.0 %; a linear classifier has 59.8 % "
        "on the same test data), with 10.85 blocks per token and layer (a dense FFN is 8) and 1.53 residual experts."
    )
    assert "48 s on 2 ranks" in second and "step 700 of 800" in second
    assert third.startswith("Numbers: runs/my run/summary.json")
    assert last.endswith("python launch/analyze.py 'runs/my run'") and "{" not in words


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"moe": "none"}, "The dense model on digits (rot75 held out): validation accuracy 89.1 %."),
        ({"moe": "none", "algorithm": "lfme"}, "LFME on digits (rot75 held out): validation accuracy 89.1 %."),
        (
            {"moe": "topk", "held_out": None, "task": "cola", "metric": "matthews_correlation"},
            "The top-k MoE on cola: validation matthews correlation 89.1 %, with 10.85 blocks per token and layer "
            "(a dense FFN is 8) and 1.53 experts.",
        ),
    ],
)
def test_what_evaluate_says(changes, sentence):
    summary = {**SUMMARY, **changes}
    for name in ("validation_score", "linear_baseline_accuracy"):
        del summary[name]
    assert result_sentence(summary, "validation") == sentence
