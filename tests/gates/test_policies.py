"""Cache policies change which experts are read again, never a byte of the output; a replay counts what the engine did.

G8  any cache policy
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smoe_cli import _core
from smoe_cli.commands.chat import command as chat_command
from tests.gates.engine_run import random_ids, running

PROMPT, GEN = random_ids(70), 40
SHORT = random_ids(3)
RECORDS, TOP_K = 384, 4


@pytest.fixture(scope="module")
def resident(streamed: Path) -> list[int]:
    with running(streamed, ctx=256, ring=RECORDS) as run:
        return run.generate(PROMPT, GEN)[0]


@pytest.mark.parametrize("policy", [*_core.policies(), "decayed:7"])
def test_g8_any_policy_gives_the_same_text_and_its_replay_the_same_counts(
    streamed: Path, resident: list[int], policy: str, tmp_path: Path
) -> None:
    for slots in (2 * TOP_K, 30, 100, 300):
        trace = tmp_path / f"{slots}.trace"
        counted = {"hits": 0, "misses": 0}
        with running(streamed, ctx=256, ring=slots, cache_policy=policy, trace=str(trace)) as run:
            for turn in range(2):  # the second finds the cache as the first has left it
                ids, counters = run.generate(PROMPT[turn:], GEN)
                if turn == 0:
                    assert ids == resident
                for name in counted:
                    counted[name] += int(counters[name])
            assert run.process.info()["cache_policy"] == policy
        assert {name: _core.replay(str(trace))[name] for name in counted} == counted
        assert {name: _core.replay(str(trace), policy, slots)[name] for name in counted} == counted
        assert counted["misses"] > 0
        info = _core.trace_info(str(trace))
        assert (info["policy"], info["slots"], info["asked"]) == (policy, slots, sum(counted.values()))


def test_a_trace_says_what_another_policy_or_size_would_do(streamed: Path, tmp_path: Path) -> None:
    """One run is recorded; the others are run and compared with what was foretold. Reading ahead,
    which belongs to one run only, is off: --spec 0, --no-warm, and a prompt too short for it."""
    trace = tmp_path / "trace"

    def cold(argv: list[str]) -> list[str]:
        return [*argv, "--no-warm"]

    with running(streamed, cold, ctx=256, ring=40, spec=0, trace=str(trace)) as run:
        run.generate(SHORT, GEN)
    for policy, slots in (("decayed", 40), ("lfru", 90), ("lru", 200)):
        with running(streamed, cold, ctx=256, ring=slots, spec=0, cache_policy=policy) as run:
            counters = run.generate(SHORT, GEN)[1]
        foretold = _core.replay(str(trace), policy, slots)
        assert (foretold["hits"], foretold["misses"]) == (counters["hits"], counters["misses"])
    assert _core.replay(str(trace), "optimal", 40)["misses"] <= _core.replay(str(trace), "lru", 40)["misses"]


def test_an_unknown_policy_and_an_unwritable_trace_are_refused(streamed: Path, tmp_path: Path) -> None:
    with pytest.raises(_core.CoreError, match="--cache-policy does not take 'mru'") as refused:
        _core.Engine(str(streamed), ctx=64, ring=8, cache_policy="mru")
    assert "least-stale" in str(refused.value)
    with pytest.raises(_core.CoreError, match="cannot write the trace"):
        _core.Engine(str(streamed), ctx=64, ring=8, trace=str(tmp_path / "none" / "trace"))
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(_core.CoreError, match="no routing trace"):
        _core.replay(str(tmp_path / "text"))


def test_the_flags_are_those_of_every_verb_that_starts_an_engine() -> None:
    assert {"cache_policy", "trace"} <= set(chat_command.__annotations__)


def test_chunks_count_the_rows_that_chose_an_expert(streamed: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    engine: Any = _core.Engine(str(streamed), ctx=256, ring=RECORDS, chunk=64, trace=str(trace))
    engine.generate(PROMPT, 3, temperature=0.0)
    fetches = _core.trace_fetches(str(trace))
    chunk = [f for f in fetches if f[0] == 0 and f[1] == 64]
    assert len(chunk) == 1
    assert sum(chunk[0][3]) == 64 * TOP_K
    decode = [f for f in fetches if f[0] == 0 and f[1] == 1]
    assert len(decode) == 2 and all(len(f[2]) == TOP_K and f[3] == [] for f in decode)
