"""What is read from disk, by the engine's own counters: each record once for a chunk, and every guess accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smoe_cli import _core
from tests.gates.engine_run import random_ids

LAYERS, TOP_K, RECORDS = 6, 4, 384
PROMPT = random_ids(100)


@pytest.mark.parametrize("spec", [0, 1])
@pytest.mark.parametrize("ring", [2 * TOP_K, 40, RECORDS])
def test_a_record_is_read_once_for_a_chunk(streamed: Path, tmp_path: Path, ring: int, spec: int) -> None:
    """100 tokens choose 400 experts a layer of 64: however few slots there are, nothing is read twice."""
    record = max(_core.inspect(str(streamed))["record_bytes"])
    trace = tmp_path / "trace"
    engine: Any = _core.Engine(str(streamed), ctx=256, ring=ring, chunk=128, spec=spec, trace=str(trace))
    _, outcome = engine.generate(PROMPT, 1, temperature=0.0)
    fetches = _core.trace_fetches(str(trace))
    distinct = [len(set(experts)) for _, _, experts, _ in fetches]
    assert len(fetches) == LAYERS and distinct == [len(experts) for _, _, experts, _ in fetches]
    assert outcome["hits"] + outcome["misses"] == sum(distinct)
    assert outcome["read_bytes"] <= record * (outcome["misses"] + outcome["guessed"])
    if spec == 0:
        assert outcome["guessed"] == 0 and outcome["misses"] == sum(distinct)
        assert outcome["read_bytes"] == record * sum(distinct)
    else:
        assert 0 < outcome["guessed_right"] <= outcome["guessed"]
        wrong = outcome["guessed"] - outcome["guessed_right"]
        assert outcome["read_bytes"] <= record * (sum(distinct) + wrong)


def test_guesses_in_decode_are_bounded_by_the_flag(streamed: Path) -> None:
    for spec in (0, 1, 3):
        engine: Any = _core.Engine(str(streamed), ctx=256, ring=40, spec=spec)
        engine.generate(PROMPT[:8], 1, temperature=0.0)
        _, outcome = engine.generate(PROMPT[:8], 21, temperature=0.0)
        assert outcome["guessed"] <= spec * LAYERS * 21
        assert (outcome["guessed"] > 0) == (spec > 0)
