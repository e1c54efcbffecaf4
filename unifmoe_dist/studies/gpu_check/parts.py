"""The parts of the check, in their order."""

from __future__ import annotations

from dataclasses import dataclass

HERE = "unifmoe_dist.studies.gpu_check"


@dataclass(frozen=True)
class Part:
    """Something to check in a process of its own.

    Args:
        name: One word, on command lines and in files.
        title: For readers.
        function: MODULE:FUNCTION, called with a `Record` and `arguments`.
        arguments: Words for the function.
        share: Of the whole time, the most that it may take.
        alone: Whether, on a card, nothing else may run meanwhile, because it measures times.
    """

    name: str
    title: str
    function: str
    arguments: tuple[str, ...] = ()
    share: float = 0.4
    alone: bool = False


PARTS = (
    Part("card", "The card and what is installed", f"{HERE}.card:check", share=0.15),
    Part("tests", "The GPU tests", f"{HERE}.suite:check"),
    Part("layers-vision", "The vision layer against its definition", f"{HERE}.layers:check", ("vision",)),
    Part("layers-language", "The language layer against its definition", f"{HERE}.layers:check", ("language",)),
    Part("layers-gated", "A gated layer against its definition", f"{HERE}.layers:check", ("gated",)),
    Part("one-rank", "Expert parallel over a world of one", f"{HERE}.one_rank:check", share=0.3),
    Part("training-digits", "Training on digits, and resuming", f"{HERE}.training:check", ("digits",)),
    Part("training-deit", "Training a DeiT-S, and resuming", f"{HERE}.training:check", ("deit-s",)),
    Part("memory-fp32", "Memory against the estimate, fp32", f"{HERE}.memory:check", ("fp32",)),
    Part("memory-bf16", "Memory against the estimate, bf16", f"{HERE}.memory:check", ("bf16",)),
    Part("launches", "Launches and waits of the host", f"{HERE}.launches:check", share=0.15, alone=True),
    Part("benchmark", "The layer beside the dense FFN", f"{HERE}.timing:check", ("own",), share=0.4, alone=True),
    Part("peers", "The layer beside its peers", f"{HERE}.timing:check", ("peers",), share=1.0, alone=True),
)
"""Those that measure times come last, and of them the longest: it takes what time is left."""
