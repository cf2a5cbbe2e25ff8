"""``smoe replay`` and the locality of a trace: definitions on traces made by hand, and the verb on a real one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from smoe_cli import _core
from smoe_cli.bench.locality import Fetch, locality


def test_reuse_distance_is_what_an_lru_needs() -> None:
    rng = random.Random(2)
    fetches: list[Fetch] = [(0, 1, rng.sample(range(12), 3), []) for _ in range(200)]
    distances = locality(fetches)["distances"]
    for slots in (3, 5, 8, 12):
        held: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for _, _, experts, _ in fetches:
            for expert in experts:
                hits += expert in held
                held[expert] = None
                held.move_to_end(expert)
                if len(held) > slots:
                    held.popitem(last=False)
        assert hits == sum(distance < slots for distance in distances)


def test_overlap_and_hot_set() -> None:
    fetches: list[Fetch] = [
        (0, 4, [0, 1, 2, 3], [5, 1, 1, 1]),
        (0, 1, [0, 1], []),
        (0, 1, [0, 2], []),
        (0, 1, [0, 2], []),
    ]
    about = locality(fetches)
    assert about["overlap"] == {0: 0.75}  # a prompt is no step before
    assert about["records"] == 4 and about["accesses"] == 10 and about["first_uses"] == 0.4
    assert about["hot_set"]["50%"] == 0.25  # expert 0 has 8 of 14 uses


def test_nothing_asked_for_is_no_error() -> None:
    about = locality([])
    assert (about["accesses"], about["reuse_distance"], about["first_uses"]) == (0, {}, 0.0)


@pytest.fixture(scope="module")
def trace(tiny_vault: Callable[..., tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    file = tmp_path_factory.mktemp("trace") / "trace"
    engine = _core.Engine(str(tiny_vault("qwen3_moe", "q8", **every_layer)[1]), ctx=256, trace=str(file))
    engine.generate(list(range(3, 40)), 30, temperature=1.0, seed=3)
    del engine
    return file


def replay(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smoe_cli", "replay", *argv], capture_output=True, text=True, timeout=120
    )


def test_the_verb(trace: Path, tmp_path: Path) -> None:
    done = replay(str(trace), "--cache-policy", "lru,optimal", "--slots", "6,12", "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    lru, optimal = result["hit_rate"]["lru"], result["hit_rate"]["optimal"]
    assert lru[0] <= lru[1] and all(a <= b for a, b in zip(lru, optimal, strict=True))
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    table = replay(str(trace))
    assert table.returncode == 0 and "shared with the token before" in table.stdout, table.stderr


def test_refused(trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(trace.read_bytes()[:20])
    for argv, code in (
        ([str(trace), "--cache-policy", "x"], 2),
        ([str(trace), "--slots", "0"], 2),
        ([str(broken)], 4),
        ([str(tmp_path / "nowhere")], None),
    ):
        done = replay(*argv)
        assert done.returncode != 0 and code in (None, done.returncode), (argv, done.stderr)
        assert "Traceback" not in done.stderr and not done.stdout
