"""Gate: a guess at the next tokens changes time, never tokens: greedy and sampled, any size of cache, warm and cold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import _core

ISAS = [name for name in ("scalar", "avx2", "avx512") if name in _core.isas()]
DRAFT = "ngram:15"


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, count)]


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return tiny_vault("qwen3_moe", "q8", seed=11, layers=3, **every_layer)[1]


@pytest.fixture(scope="module")
def windowed(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("mistral", "q8_0", seed=12, sliding_window=24)[1]


def engine(path: Path, **options: Any) -> Any:
    return _core.Engine(str(path), **{"ctx": 256, "threads": 2, "chunk": 32, **options})


def generate(e: Any, ids: list[int], count: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
    out, outcome = e.generate(ids, count, **more)
    return list(out), dict(outcome)


REPEATING = ids_of(12, seed=5) * 5
# A few words only, so that even a random model repeats itself.
GREEDY: dict[str, Any] = {"temperature": 0.0, "bias": [(token, 60.0) for token in REPEATING[:4]]}
SAMPLED = {"temperature": 0.3, "seed": 9, "repetition_penalty": 1.2, "top_p": 0.9}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ring", [6, 24])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_same_tokens_with_and_without(vault: Path, isa: str, ring: int, sampling: dict[str, Any]) -> None:
    plain, _ = generate(engine(vault, isa=isa, ring=ring), REPEATING, 120, **sampling)
    drafted, outcome = generate(engine(vault, isa=isa, ring=ring, draft=DRAFT), REPEATING, 120, **sampling)
    assert drafted == plain
    assert outcome["drafted_tokens"] > 0
    if sampling is GREEDY:
        assert outcome["accepted_tokens"] > 40


@pytest.mark.parametrize("ring", [0, 6])
def test_guessing_while_it_is_faster_says_the_same(vault: Path, ring: int) -> None:
    """What the clock decides changes no token; it begins when it knows what a token takes without a guess."""
    e = engine(vault, ring=ring, draft="auto")
    for sampling in (GREEDY, SAMPLED):
        plain, _ = generate(engine(vault, ring=ring), REPEATING, 120, **sampling)
        guessed, outcome = generate(e, REPEATING, 120, **sampling)
        assert guessed == plain
        assert outcome["drafted_tokens"] > 0 or sampling is SAMPLED
        e.reset()
    assert generate(engine(vault, draft="auto"), REPEATING, 3, **GREEDY)[1]["drafted_tokens"] == 0


def test_only_a_sequence_that_runs_alone_guesses_by_itself(vault: Path) -> None:
    e = engine(vault, draft="auto", sessions=2)
    running = [e.start(REPEATING, 60, session=name, **GREEDY) for name in "ab"]
    while not all(one.ended for one in running):
        e.step()
    assert [one.outcome["drafted_tokens"] for one in running] == [0, 0]


def test_same_log_probabilities(vault: Path) -> None:
    _, plain = generate(engine(vault), REPEATING, 60, **GREEDY, logprobs=3)
    _, drafted = generate(engine(vault, draft=DRAFT), REPEATING, 60, **GREEDY, logprobs=3)
    assert drafted["accepted_tokens"] > 0
    assert (drafted["logprobs"], drafted["top"]) == (plain["logprobs"], plain["top"])


def test_ends_alike(vault: Path) -> None:
    """Where a stop id, the count or a cancellation falls inside a guess."""
    plain, _ = generate(engine(vault), REPEATING, 120, **GREEDY)
    for count in (1, 2, 57, 58, 59, 60):
        got, outcome = generate(engine(vault, draft=DRAFT), REPEATING, count, **GREEDY)
        assert (got, outcome["finish"]) == (plain[:count], "length")
    for stop in sorted(set(plain[60:80])):
        got, outcome = generate(engine(vault, draft=DRAFT), REPEATING, 120, **GREEDY, stop_ids=[stop])
        assert (got, outcome["finish"]) == (plain[: plain.index(stop)], "stop")


@pytest.mark.parametrize("which", ["vault", "windowed"])
def test_what_follows_a_drafted_turn_is_right(which: str, request: pytest.FixtureRequest) -> None:
    """A guess that was dropped leaves no trace in the conversation, nor does an end inside one, or a wrapped ring."""
    path = request.getfixturevalue(which)
    warm = engine(path, ctx=96, draft=DRAFT)
    conversation = list(REPEATING)
    for turn in range(6):
        count = 17 + 5 * turn
        cancel = {"cancel_after": 9} if turn == 2 else {}
        got, outcome = generate(warm, conversation, count, **GREEDY, **cancel)
        cold, _ = generate(engine(path, ctx=96), conversation, count, **GREEDY)
        assert got == cold[: len(got)]
        assert len(got) == (9 if cancel else count) or outcome["finish"] == "stop"
        conversation += got + ids_of(3, seed=turn)
    edited = conversation[: len(REPEATING) + 20] + ids_of(4, seed=50)
    assert generate(warm, edited, 20, **GREEDY)[0] == generate(engine(path, ctx=96), edited, 20, **GREEDY)[0]


def test_text_that_does_not_repeat_costs_next_to_nothing(vault: Path) -> None:
    _, outcome = generate(engine(vault, draft=DRAFT), ids_of(100, seed=3), 60, temperature=5.0, seed=1)
    assert outcome["drafted_tokens"] <= 15


def test_refused(vault: Path) -> None:
    for bad in ("ngram:0", "ngram:16", "ngram:", "model:x", "3"):
        with pytest.raises(_core.CoreError, match="--draft"):
            engine(vault, draft=bad)
    assert generate(engine(vault, draft="off"), REPEATING, 9, **GREEDY)[1]["drafted_tokens"] == 0
