"""Real English sentences that every Python installation carries, and small corruptions of them.

The prose is the language reference inside ``pydoc_data`` and the docstrings of the standard library, read
as text: nothing is downloaded. Another Python version has slightly other sentences; a sentence that both have
gets the same label and the same corruption in both.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from unifmoe_dist.errors import UserError

MIN_WORDS, MAX_WORDS = 6, 22
MAX_SENTENCES = 4000
FEWEST_SENTENCES = 1000
"""Below this the standard library's sources are evidently not there."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DETERMINERS = _words("a an the this these each every")
_AUXILIARIES = _words("is are was were be been can could should will would must may might has have does do")
_PREPOSITIONS = _words("of to in for by with from into on at as")
_FUNCTION_WORDS = _DETERMINERS | _AUXILIARIES | _PREPOSITIONS
_FINITE = _AUXILIARIES - {"be", "been"}
_IMPERATIVES = _words("Add Call Check Create Find Get Make Open Read Remove Return Send Set Use Write")
_PAIRS = [("is", "are"), ("was", "were"), ("has", "have"), ("does", "do"), ("a", "an"), ("this", "these")]
_OTHER_FORM = {**dict(_PAIRS), **{second: first for first, second in _PAIRS}}
_DROPPABLE = _words("a an of to is are was were be")

_PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z]+(?:'(?:s|t|re))?(?:-[a-z]+)*,?")
_MARKUP = re.compile(r">>>|::|=|\*\*\*|---|\n\s*\.\.\s|^\s*[-*+•]\s|^\s*:\w+|[{}\[\]<>|`\\]")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)  # parsing the sources properly takes seconds longer
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def extract_sentences(text: str) -> list[str]:
    """Full plain sentences of a text, in order: no code, markup, names in code style, numbers or brackets.

    A sentence has 6 to 22 words, ends with a full stop, and holds a finite auxiliary ("is", "can", ...) or
    starts with an imperative ("Return", "Set", ...), which keeps out headings and fragments.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if _MARKUP.search(paragraph):
            continue
        for sentence in _SENTENCE_END.split(re.sub(r"\s+", " ", paragraph.replace("’", "'")).strip()):
            if _is_plain(sentence):
                found.append(sentence)
    return found


def _is_plain(sentence: str) -> bool:
    if not sentence.endswith(".") or not sentence[:1].isupper():
        return False
    words = sentence[:-1].split(" ")
    return (
        MIN_WORDS <= len(words) <= MAX_WORDS
        and all(_PLAIN_WORD.fullmatch(word) for word in words)
        and (words[0] in _IMPERATIVES or any(word in _FINITE for word in words[1:-1]))
    )


@lru_cache(maxsize=1)
def real_sentences() -> tuple[str, ...]:
    """Up to 4,000 different sentences, in the order of a hash of their text (so in no order of topic).

    Of sentences with the same content words only the first in that order is kept, so that near copies do not
    end up on both sides of a split.

    Raises:
        UserError: the standard library's sources are missing.
    """
    ordered = sorted({s for text in _library_texts() for s in extract_sentences(text)}, key=_digest)
    by_content: dict[frozenset[str], str] = {}
    for sentence in ordered:
        content = frozenset(re.findall(r"[a-z]+", sentence.lower())) - _FUNCTION_WORDS
        if _with_fault(sentence) is not None:
            by_content.setdefault(content, sentence)
    sentences = tuple(by_content.values())[:MAX_SENTENCES]
    if len(sentences) < FEWEST_SENTENCES:
        raise UserError(
            f"Only {len(sentences)} sentences were found in {sysconfig.get_path('stdlib')}; the "
            "acceptability task reads the sources of Python's standard library, so use an "
            "installation that includes them."
        )
    return sentences


def _library_texts() -> Iterator[str]:
    """The reference topics and every docstring of the standard library's top-level modules and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    with suppress(ImportError):  # some distributions leave it out
        from pydoc_data.topics import topics

        yield from topics.values()
    skipped = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "pydoc_data"}
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if path.parent.name in skipped:
            continue
        yield from _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="ignore"))


def corrupt(sentence: str) -> str:
    """The sentence with one local fault, always the same one for the same sentence.

    The fault is one of: a function word swapped with its right neighbour, dropped, put in a form that does
    not agree ("is"/"are", "a"/"an"), doubled by a second determiner, or moved three or more places.
    The result always differs from the sentence and keeps its capital letter and full stop.

    Raises:
        ValueError: no fault fits (the sentence has no function word); never for ``real_sentences()``.
    """
    result = _with_fault(sentence)
    if result is None:
        raise ValueError(f"no fault fits {sentence!r}")
    return result


def _with_fault(sentence: str) -> str | None:
    rng = random.Random(_digest(sentence))
    words = sentence[:-1].split(" ")
    words[0] = words[0][0].lower() + words[0][1:]
    faults = list(_FAULTS)
    rng.shuffle(faults)
    for kinds, fault in faults:
        places = [i for i, word in enumerate(words[:-1]) if word in kinds]
        if fault is _swap:
            places = [i for i in places if words[i + 1] not in _FUNCTION_WORDS]
        result = fault(words, rng.choice(places), rng) if places else None
        if result is not None and result != words:
            text = " ".join(result)
            return text[0].upper() + text[1:].rstrip(",") + "."
    return None


def _swap(words: list[str], i: int, rng: random.Random) -> list[str]:
    return [*words[:i], words[i + 1].rstrip(","), words[i], *words[i + 2 :]]


def _drop(words: list[str], i: int, rng: random.Random) -> list[str]:
    return words[:i] + words[i + 1 :]


def _change_form(words: list[str], i: int, rng: random.Random) -> list[str]:
    return [*words[:i], _OTHER_FORM[words[i]], *words[i + 1 :]]


def _double_determiner(words: list[str], i: int, rng: random.Random) -> list[str]:
    return [*words[: i + 1], "the" if words[i] != "the" else "a", *words[i + 1 :]]


def _move(words: list[str], i: int, rng: random.Random) -> list[str] | None:
    rest = words[:i] + words[i + 1 :]
    targets = [j for j in range(1, len(rest)) if abs(j - i) >= 3 and words[i] not in (rest[j], rest[j - 1])]
    if not targets:
        return None
    j = rng.choice(targets)
    return [*rest[:j], words[i], *rest[j:]]


_FAULTS: tuple[tuple[frozenset[str], Callable[[list[str], int, random.Random], list[str] | None]], ...] = (
    (_DETERMINERS | _PREPOSITIONS, _swap),
    (_DROPPABLE, _drop),
    (frozenset(_OTHER_FORM), _change_form),
    (_DETERMINERS, _double_determiner),
    (_FUNCTION_WORDS, _move),
)
"""The words that a fault may begin at, and what it makes of a sentence at one of them."""


def real_label(sentence: str) -> int:
    """1 if the task shows this sentence as it is, 0 if corrupted: a fair coin, tossed by the text alone."""
    return _digest("label: " + sentence) % 2


def _digest(text: str) -> int:
    """A hash that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
