"""The plan's rehearsal, before a model has ever run: it asks for what the model will ask for; every family has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoe_cli import _core
from smoe_cli.bench.programs import Ours
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.engine.flags import EngineFlags
from tests.gates.engine_run import random_ids
from tests.unit.checkpoints import CONFIGS, FakeCheckpoint, config_of, write_tokenizer

PUBLISHED = Path(__file__).parents[1] / "bench_data" / "2026-11-30-plan" / "raw.json"
PROMPT = 512


def make(folder: Path, family: str, **more: Any) -> Path:
    source = FakeCheckpoint(config_of(family, **more)).write(folder / "checkpoint")
    write_tokenizer(source)
    convert(prepare(Options(source, folder, name="tiny", quant="q8"), Quiet()), Quiet())
    return folder / "tiny.smoe"


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 32 experts, each its own, of which a token takes 4; what is asked for is far from even."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    return make(tmp_path_factory.mktemp("vault"), "qwen3_moe", **sizes)


def rehearse(vault: Path, slots: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return _core.predict(str(vault), 0.01, ids, ring=slots, ctx=1024, **more)


def live_hit_rate(vault: Path, slots: int, ids: list[int]) -> float:
    """Of decoding the ids after the first PROMPT, from a cache that has seen only these."""
    program = Ours("smoe", vault, EngineFlags(ring=slots, ctx=1024), extra=("--spec", "0", "--no-warm"))
    program.start()
    try:
        program.prefill(ids[:PROMPT])
        program.decode(ids[PROMPT:])
    finally:
        program.stop()
    counted = program.counters[1:]
    hits, misses = (sum(c[name] for c in counted) for name in ("hits", "misses"))
    return hits / (hits + misses)


@pytest.mark.parametrize("slots", [24, 64, 128, 192])
def test_a_rehearsal_finds_what_the_engine_will_find(vault: Path, slots: int) -> None:
    told = [rehearse(vault, slots, random_ids(1100, vocab=96, seed=seed)) for seed in (2, 3)]
    live = [live_hit_rate(vault, slots, random_ids(PROMPT + 96, vocab=96, seed=seed)) for seed in (1, 4)]
    found = sum(plan["rehearsed_hit_rate"] for plan in told) / 2
    assert abs(found - sum(live) / 2) < 0.08
    assert found > slots / 256 + 0.1  # which even routing would find
    for plan in told:
        assert not plan["predicted_from_history"]
        assert plan["predicted_hit_rate"] == plan["rehearsed_hit_rate"]
        assert plan["rehearsed_layers"] == 8
        assert 16 < plan["rehearsed_prompt_experts"] <= 32


def test_the_first_layers_stand_for_all(vault: Path) -> None:
    ids = random_ids(1100, vocab=96)
    whole, part = rehearse(vault, 64, ids), rehearse(vault, 64, ids, rehearsed_bytes=0)
    assert part["rehearsed_layers"] == 2
    assert abs(part["rehearsed_hit_rate"] - whole["rehearsed_hit_rate"]) < 0.15
    for name in ("rehearsed_token_ms", "rehearsed_prompt_ms"):  # four times as much, where two layers were forgotten
        assert 0.4 < part[name] / whole[name] < 2.5


def test_no_more_is_rehearsed_than_there_is_memory_for(streamed: Path) -> None:
    """Where the engine just fits, all stand-ins may not."""
    small, large = (_core.predict(str(streamed), 0.01, ring=ring, ctx=64) for ring in (8, 384))
    assert 2 <= small["rehearsed_layers"] < large["rehearsed_layers"] == 6
    assert small["predicted_decode_tok_s"] > 0


def test_the_policy_is_rehearsed_too(vault: Path) -> None:
    ids = random_ids(1100, vocab=96)
    assert rehearse(vault, 24, ids, cache_policy="lru")["rehearsed_hit_rate"] == 0  # less than a token asks for
    assert rehearse(vault, 24, ids)["rehearsed_hit_rate"] > 0.1
    assert rehearse(vault, 256, ids)["rehearsed_hit_rate"] == 1


def test_ids_outside_the_vocabulary_are_refused(vault: Path) -> None:
    with pytest.raises(_core.CoreError, match="vocabulary"):
        rehearse(vault, 64, [96])


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_can_be_rehearsed(family: str, tmp_path: Path) -> None:
    plan = _core.predict(str(make(tmp_path, family)), 0.01, chunk=64, ctx=128)
    assert plan["rehearsed_token_ms"] > 0 and plan["rehearsed_prompt_ms"] > 0
    assert plan["predicted_decode_tok_s"] == pytest.approx(1e3 / plan["rehearsed_token_ms"])  # all is resident
    assert plan["predicted_hit_rate"] == 1


def test_what_was_measured_lies_in_the_range_that_was_predicted() -> None:
    """Of the published run: without history and with it, every decode speed."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    assert len(rows) >= 9 and len({row["model"] for row in rows}) >= 3
    for row in rows:
        for when in ("before", "after"):
            low, high = (row[when][f"predicted_decode_{end}_tok_s"] for end in ("low", "high"))
            assert low <= row["measured"]["decode_tok_s"] <= high, (row["model"], row["share"], when)
            assert high / low < 1.51  # 20% either way
