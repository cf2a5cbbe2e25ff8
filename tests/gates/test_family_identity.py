"""The gates of test_identity.py for every family, on the fastest ISA: what streaming, chunks, threads and reuse must
not change, and what the plan says of the state they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import _core
from smoe_cli.families.spec import load_families

# Those of test_identity.py itself, and dense ones made of the same blocks, are left out.
FAMILIES = [f.name for f in load_families() if f.name not in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")]


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, count)]


def engine(path: Path, **options: Any) -> Any:
    return _core.Engine(str(path), **{"ctx": 128, "threads": 2, **options})


@pytest.fixture(scope="module", params=FAMILIES)
def vault(request: pytest.FixtureRequest, tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault(request.param, "q8_0", seed=3)[1]


def least_ring(vault: Path) -> int:
    plan = engine(vault).plan()
    return int(plan["min_expert_cache_bytes"] // plan["record_bytes"]) if plan["record_bytes"] else 0


def test_streaming_chunks_threads_and_decode_change_no_bit(vault: Path) -> None:
    ids = ids_of(110)
    truth = np.asarray(engine(vault, threads=1).logits(ids))
    assert np.isfinite(truth).all()
    small = engine(vault, ring=least_ring(vault), chunk=32, threads=3)
    assert (np.asarray(small.logits(ids)) == truth).all()
    assert (np.asarray(small.logits(ids, prefill=60)) == truth).all(), "decode is prefill of one token"


def test_warm_equals_cold(vault: Path) -> None:
    warm = engine(vault, chunk=32)

    def both(ids: list[int]) -> list[int]:
        got = list(warm.generate(ids, 6, temperature=0.0)[0])
        assert got == list(engine(vault, chunk=32).generate(ids, 6, temperature=0.0)[0])
        return got

    first = ids_of(40)
    longer = first + both(first) + ids_of(9, seed=2)
    both(longer)
    both(longer)
    both(longer[:30] + ids_of(25, seed=3))
    long = ids_of(200, seed=4)  # more than the window: the rings have wrapped
    both(long + both(long))
    both(long[:190] + ids_of(5, seed=5))
    both(first)
