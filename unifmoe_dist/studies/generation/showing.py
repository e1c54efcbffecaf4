"""Texts of a language model for readers: coloured on a terminal, in numbers, and as a page."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.generation.writing import Sampling, Token, Writer, Written
from unifmoe_dist.studies.templating import environment

STEPS = ((1.25, "34"), (1.5, "36"), (1.75, "32"), (2.0, "33"), (2.25, "35"))
"""Upper bounds of C_B / B, and the colour of a terminal's own palette that shows it; beyond them red."""

_MOST = "31"


def coloured(token: Token) -> str:
    """A token's text in the colour of what it used; a prompt's is bold."""
    if token.share is None:
        return token.text
    bold = "1;" if token.prompt else ""
    return f"\033[{bold}{_colour(token.share)}m{token.text}\033[0m"


def _colour(share: float) -> str:
    return next((colour for bound, colour in STEPS if share <= bound + 1e-9), _MOST)


def legend() -> str:
    """The colours of `coloured`."""
    parts = [f"\033[{colour}mto {bound:g}\033[0m" for bound, colour in STEPS]
    return f"colours, in dense FFNs per token and layer: {', '.join(parts)}, \033[{_MOST}mmore\033[0m"


def summary(texts: Sequence[Written]) -> str:
    """Speed, and where layers were recorded, what tokens used in each."""
    count, seconds = sum(len(text.new) for text in texts), sum(text.seconds for text in texts)
    lines = [f"{count} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):.1f} tokens/s"]
    used = [token.layers for text in texts for token in text.tokens if token.layers]
    for name in used[0] if used else ():
        own = [layers[name] for layers in used]
        blocks, experts = sum(u.blocks for u in own) / len(own), sum(len(u.experts) for u in own) / len(own)
        demand = "" if own[0].demand is None else f", α {sum(u.demand or 0.0 for u in own) / len(own):.2f}"
        loads = Counter(number for use in own for number, _ in use.experts).most_common(3)
        often = ", ".join(f"{number} ({100 * load / len(own):.0f}%)" for number, load in loads)
        lines.append(f"{name}: C_B {blocks:.2f}, k {experts:.2f}{demand}; most used experts {often}")
    return "\n".join(lines)


def write_html(path: Path, writer: Writer, texts: Sequence[Written], sampling: Sampling) -> Path:
    """One page of the texts: tokens on grounds coloured by what they used, and pointed at, what exactly."""
    shares = [token.share for text in texts for token in text.tokens if token.share is not None]
    low, high = min(shares, default=0.0), max(shares, default=1.0)
    page = (
        environment()
        .get_template("generation.html")
        .render(
            name=writer.name,
            texts=texts,
            sampling=sampling,
            low=low,
            high=high,
            span=max(high - low, 1e-9),
            summary=summary(texts).splitlines(),
        )
    )
    write_text(path, page)
    return path
