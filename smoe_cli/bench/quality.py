"""Perplexity of a text, and how far a model's next-token distributions are from a reference's.

Windows of the text overlap by half: each is computed from an empty context and only its second half counts, the first
window's whole. So every token but the first is scored once, given at least half a window of what stands before it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from smoe_cli.errors import CorruptError, UsageError

Array = NDArray[Any]
ROWS = 64  # rows of a vocabulary worked on at once: what is beside the logits stays small
BLOCK = 32  # neighbours in a text are alike: for the error of a mean, so many tokens count as one


class Scorer(Protocol):
    """What is asked of an engine."""

    def score(self, ids: Sequence[int]) -> Array: ...

    def logits(self, ids: Sequence[int], prefill: int | None = None) -> Array: ...


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``end`` of the text, of which those from ``first`` on count (``first`` > ``start``)."""

    start: int
    first: int
    end: int


def windows(tokens: int, size: int) -> Iterator[Window]:
    yield Window(0, 1, min(size, tokens))
    end = size
    while end < tokens:
        start = end - size // 2
        yield Window(start, end, min(start + size, tokens))
        end = start + size


@dataclass
class Progress:
    """Says how far it is, every second or so."""

    total: int
    say: Callable[[str], None]
    what: str
    started: float = field(default_factory=time.monotonic)
    said: float = 0.0

    def at(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if done < self.total and now - self.said < 1:
            return
        self.said = now
        rate = done / max(now - self.started, 1e-9)
        left = (self.total - done) / max(rate, 1e-9)
        self.say(f"{self.what}: {done} of {self.total} tokens, {rate:.0f} tok/s, {left:.0f} s left{note}")


def perplexity(engine: Scorer, ids: list[int], size: int, progress: Progress) -> dict[str, Any]:
    """``{tokens, perplexity}``: exp of the mean negative log-probability of every token but the first."""
    loss, count = 0.0, 0
    for window in windows(len(ids), size):
        scores = engine.score(ids[window.start : window.end])[window.first - window.start - 1 :]
        loss -= float(np.asarray(scores, dtype=np.float64).sum())
        count += len(scores)
        progress.at(window.end, f", perplexity {math.exp(loss / count):.4f}")
    return {"tokens": count, "perplexity": math.exp(loss / count)}


def log_probabilities(logits: Array) -> Array:
    """Natural log-softmax of each row, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def distributions(engine: Scorer, ids: list[int], window: Window) -> Array:
    """Logits of the positions that predict the tokens that count, [counted, vocab]."""
    whole = engine.logits(ids[window.start : window.end])
    return np.asarray(whole[window.first - window.start - 1 : -1])


# -- a recorded reference ---------------------------------------------------------------------------------------------


class Recording:
    """A reference's log-probabilities on a text: a folder of meta.json and logprobs.npy, float16 [tokens, vocab]."""

    def __init__(self, folder: Path, ids: list[int], size: int) -> None:
        self.folder, self.ids, self.size = folder, ids, size
        try:
            meta = json.loads((folder / "meta.json").read_text())
            self.logprobs = np.load(folder / "logprobs.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise CorruptError(f"{folder} is not a recorded reference: {error}", "record it again") from None
        if meta != {"ids": ids, "window": size} or len(self.logprobs) != len(ids) - 1:
            raise UsageError(f"{folder} was recorded of another text or window", "record it again with this one")

    @classmethod
    def record(cls, folder: Path, engine: Scorer, ids: list[int], size: int, progress: Progress) -> Recording:
        """Run the reference over the text. Two bytes for each token and word of the vocabulary."""
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (folder / "meta.json").unlink()  # what is cut short must not look whole
        out: Any = None
        for window in windows(len(ids), size):
            logits = distributions(engine, ids, window)
            if out is None:
                shape = (len(ids) - 1, logits.shape[1])
                out = np.lib.format.open_memmap(folder / "logprobs.npy", mode="w+", dtype=np.float16, shape=shape)
            for at in range(0, len(logits), ROWS):
                row = window.first - 1 + at
                part = np.maximum(log_probabilities(logits[at : at + ROWS]), np.finfo(np.float16).min)
                out[row : row + len(part)] = part
            progress.at(window.end)
        out.flush()
        (folder / "meta.json").write_text(json.dumps({"ids": ids, "window": size}))
        return cls(folder, ids, size)


def compare(engine: Scorer, reference: Recording, progress: Progress) -> dict[str, Any]:
    """Perplexity and its ratio to the reference's, and of the distributions KL(reference || model) in nats (mean and
    99th percentile) and the share of positions at which both have the same likeliest token. ``_error`` is half of a
    mean's 95% interval, as the text's length bounds it; None for a text too short to say."""
    ids = reference.ids
    loss, agreed, divergences, lost = 0.0, 0, [], []
    for window in windows(len(ids), reference.size):
        logits = distributions(engine, ids, window)
        if logits.shape[1] != reference.logprobs.shape[1]:
            raise UsageError("the reference has another vocabulary", "compare vaults of the same model")
        for at in range(0, len(logits), ROWS):
            row = window.first - 1 + at
            q = log_probabilities(logits[at : at + ROWS])
            p = reference.logprobs[row : row + len(q)].astype(np.float64)
            said = np.arange(len(q)), ids[row + 1 : row + 1 + len(q)]
            loss -= float(q[said].sum())
            lost += list(p[said] - q[said])
            divergences += list((np.exp(p) * (p - q)).sum(axis=1))
            agreed += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        progress.at(window.end, f", KL {np.mean(divergences):.5f}")
    count = len(divergences)
    ratio, spread = math.exp(float(np.mean(lost))), half_interval(lost)
    return {
        "tokens": count,
        "perplexity": math.exp(loss / count),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": None if spread is None else ratio * spread,
        "kl_mean": float(np.mean(divergences)),
        "kl_error": half_interval(divergences),
        "kl_p99": float(np.percentile(divergences, 99)),
        "top1_agreement": agreed / count,
    }


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean of ``values``, which stand in a text's order: from the means of blocks."""
    blocks = len(values) // BLOCK
    if blocks < 4:
        return None
    means = np.asarray(values[: blocks * BLOCK], dtype=np.float64).reshape(blocks, BLOCK).mean(axis=1)
    return float(1.96 * means.std(ddof=1) / math.sqrt(blocks))
