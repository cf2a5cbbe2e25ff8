"""The ids a measurement feeds: a text's own, prompt and continuation alike, or random ones.

Never what a model would say: with greedy text from random weights the routing collapses onto a few experts, and every
cache looks better than it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from smoe_cli.errors import UsageError

SAMPLE = Path(__file__).with_name("sample.txt")
STRIDE = 7919  # a prime: rounds begin at places of the text that have nothing to do with each other


@dataclass(frozen=True)
class TextIds:
    """The ids of a text, from another place each round, beginning again at its end."""

    ids: list[int]
    name: str

    def take(self, count: int, round_: int) -> list[int]:
        start = round_ * STRIDE % len(self.ids)
        turned = self.ids[start:] + self.ids[:start]
        return (turned * (count // len(turned) + 1))[:count]


@dataclass(frozen=True)
class RandomIds:
    """Uniformly random ids, the same for the same round: the routing of random text, the worst a cache meets."""

    vocab: int
    name: str = "random ids"

    def take(self, count: int, round_: int) -> list[int]:
        return random.Random(round_).choices(range(self.vocab), k=count)


def text_ids(tokenizer_dir: Path, file: Path | None) -> TextIds:
    """The ids of ``file``, or of the sample that comes with smoe. Raises UsageError for a text that gives none."""
    from smoe_cli.chat.tokenizer import TextTokenizer

    path = file or SAMPLE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{path} cannot be read as text: {why}", "give a UTF-8 text file") from None
    ids = TextTokenizer(tokenizer_dir).encode_document(text)
    if len(ids) < 2:
        raise UsageError(f"{path} has no text", "give a text of some pages")
    return TextIds(ids, path.name if file else "the sample text")
