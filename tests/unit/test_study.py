"""scripts/study.py on a tiny vault: each part adds to what is there, and the report shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "study.py"


@pytest.fixture(scope="module")
def arguments(tiny_vault: Callable[..., tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for kind, words in (("fox", "the quick brown fox jumps over the lazy dog "), ("sea", "she sells sea shells ")):
        (folder / kind).write_text(words * 12)
    exact, coarse = (tiny_vault("qwen3_moe", quant, head_dim=64)[1] for quant in ("f32", "q4_0"))
    return [
        *("--vault", str(exact), "--encoding", f"f32={exact}", "--encoding", f"q4_0={coarse}"),
        *("--text", f"fox={folder / 'fox'}", "--text", f"sea={folder / 'sea'}", "--tokens", "160"),
    ]


def study(part: str, arguments: list[str], out: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), part, *arguments, "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((out / "raw.json").read_text())
    return result


def test_parts_add_up_to_one_report(arguments: list[str], tmp_path: Path) -> None:
    first = study("quality", arguments, tmp_path)["quality"]
    for kind in ("fox", "sea"):
        assert first["Encoding"]["q4_0"][kind]["kl_mean"] > 10 * abs(first["Encoding"]["f32"][kind]["kl_mean"])
        assert first["Experts a token"]["top-1"][kind]["kl_mean"] > 1e-4
    first["Encoding"]["q4_0"]["sea"]["kl_mean"] = 77.0  # what is there is not measured again
    raw = json.loads((tmp_path / "raw.json").read_text()) | {"quality": first}
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    assert study("quality", arguments, tmp_path)["quality"] == first

    cache = study("cache", arguments, tmp_path)["cache"]["Cache policy"]
    for kind in ("fox", "sea", "all in turn"):
        assert max(rate for arm in cache.values() for rate in arm[kind]["hit_rate"]) <= 1
        assert cache["optimal"][kind]["hit_rate"][2] >= cache["lru"][kind]["hit_rate"][2]

    few = ("--rounds", "3", "--gen", "8", "--only", "Cache size")
    speed = study("speed", arguments, tmp_path, *few)["speed"]
    assert set(speed) == {"Cache size"} and speed["Cache size"]["95% of the experts"]["fox"]["ratio"] == 1
    tables = (tmp_path / "tables.md").read_text()
    assert "77.0000" in tables and "Cache policy: all in turn" in tables and "Cache size: speed" in tables
    for plot in ("quality", "cache", "speed"):
        assert (tmp_path / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
