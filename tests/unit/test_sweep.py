"""``smoe sweep``: arms, paired comparison, recommendation, profiles; and the verb on a tiny vault."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smoe_cli import profile
from smoe_cli.bench import compare, sweep
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.process import engine_path
from smoe_cli.errors import UsageError


def arm(name: str, speeds: list[float], budget: int = 100, kl: float = 0.0) -> sweep.Arm:
    made = sweep.Arm({"threads": name}, EngineFlags(), False)
    made.runs = [{"decode_tok_s": speed, "prefill_tok_s": speed, "hit_rate": 1.0} for speed in speeds]
    made.decodes = [1e3 / speed for speed in speeds]
    made.prefills = [1e3 for _ in speeds]
    made.budget_bytes = budget
    made.quality = {"kl_mean": kl}
    return made


def test_all_combinations_and_the_first_is_the_reference() -> None:
    arms = sweep.parse_arms(["top_k=8,4", "threads=2,1"], EngineFlags(ctx=99))
    assert [one.name for one in arms] == [
        "top_k=8 threads=2",
        "top_k=8 threads=1",
        "top_k=4 threads=2",
        "top_k=4 threads=1",
    ]
    assert arms[3].flags == EngineFlags(ctx=99, experts_per_token=4, threads=1)
    assert [one.changes_output for one in arms] == [False, False, True, True]
    assert sweep.parse_arms(["budget=1G,2G"], EngineFlags())[1].flags.budget == 2 << 30


def paired(one: sweep.Arm, reference: sweep.Arm) -> dict[str, Any]:
    return compare.paired(one.decodes, reference.decodes)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x=1"],
        ["top_k"],
        ["top_k="],
        ["top_k=1,,2"],
        ["top_k=a"],
        ["instrument=yes"],
        ["engine=/nowhere/smoe-engine"],
        ["top_k=1", "top_k=2"],
        ["draft=off,ngram:8"],  # given ids are decoded one at a time: guesses would change nothing here
        ["slots=9", "budget=1G"],
        ["slots=" + ",".join(map(str, range(25)))],
    ],
)
def test_arms_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        sweep.parse_arms(words, EngineFlags())


def test_the_same_arm_twice_is_two_arms() -> None:
    """An A/A run: two engines, told apart by name, of which the second is no other output."""
    arms = sweep.parse_arms(["threads=2,2,1"], EngineFlags())
    assert [one.name for one in arms] == ["threads=2", "threads=2 (again 1)", "threads=1"]
    assert not any(one.changes_output for one in arms)


def test_few_pairs_must_all_agree_and_fewer_say_nothing() -> None:
    speeds = [10.0, 20, 30, 40, 50, 60, 70, 80]
    reference = arm("a", speeds)
    assert paired(arm("b", [1.1 * speed for speed in speeds]), reference)["differs"]
    assert paired(arm("b", [0.9 * speed for speed in speeds]), reference)["differs"]
    assert not paired(arm("b", [1.1 * speed for speed in speeds[:7]] + [79]), reference)["differs"]
    assert not paired(arm("b", [1.001 * speed for speed in speeds]), reference)["differs"]  # next to nothing
    few = paired(arm("b", [1.1 * speed for speed in speeds[:7]]), arm("a", speeds[:7]))
    assert (few["differs"], few["ratio_low"]) == (False, None)


def test_the_intervals_rank_is_that_of_the_sign_test() -> None:
    assert [compare.trimmed(n) for n in (1, 7, 8, 10, 11, 20, 40)] == [0, 0, 1, 1, 1, 4, 12]  # binomial tables, 0.005


def test_the_same_thing_twice_is_seldom_told_apart() -> None:
    """Pairs with noise of 5%: equal arms differ by chance in 1 of 100; a slowdown of 5% shows nearly always."""
    rng = random.Random(4)

    def noisy(speed: float) -> list[float]:
        return [speed * rng.gauss(1, 0.05) for _ in range(96)]

    equal = sum(paired(arm("b", noisy(100)), arm("a", noisy(100)))["differs"] for _ in range(400))
    slower = sum(paired(arm("b", noisy(95)), arm("a", noisy(100)))["differs"] for _ in range(400))
    assert equal < 400 * 0.02
    assert slower > 400 * 0.9


def test_recommended_is_the_fastest_that_is_close_enough() -> None:
    arms = [arm("a", [10] * 8), arm("b", [12] * 8, kl=0.004), arm("c", [20] * 8, kl=0.5), arm("d", [9] * 8, budget=50)]
    result = compare.summary(arms, most_kl=0.01)
    assert result["recommended"] == "threads=b"
    assert "20% faster than threads=a" in result["recommendation"] and "KL 0.0040" in result["recommendation"]
    assert [row["pareto"] for row in result["arms"]] == [True, True, True, True]
    assert compare.summary(arms[:1] + arms[3:], 0.01)["recommendation"].startswith("Keep threads=a")
    beaten = compare.summary([arm("a", [10] * 8), arm("b", [12] * 8)], 0.01)
    assert [row["pareto"] for row in beaten["arms"]] == [False, True]


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_gives_way_to_what_was_asked(tmp_path: Path) -> None:
    vault = tmp_path / "m.smoe"
    assert profile.load(vault) == ({}, "")
    profile.save(vault, {"threads": 3, "ring": 40}, "because")
    flags, notice = profile.load(vault)
    assert (flags, notice) == ({"threads": 3, "ring": 40}, "")
    assert profile.apply(EngineFlags(ctx=7), flags) == EngineFlags(ctx=7, threads=3, ring=40)
    assert profile.apply(EngineFlags(threads=1), flags) == EngineFlags(threads=1, ring=40)
    assert profile.apply(EngineFlags(budget=5), flags) == EngineFlags(budget=5, threads=3)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"flags": 3}', '{"flags": {"isa": "x"}}', '{"flags": {"threads": []}}']
)
def test_a_broken_profile_is_left_alone_and_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.profile.json").write_text(text)
    flags, notice = profile.load(tmp_path / "m.smoe")
    assert flags == {} and "m.profile.json" in notice


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("qwen3_moe", "q8", seed=5)[1]


def run(vault: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", "sweep", str(vault), "--rounds", "3", "--gen", "4", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_sweep_compares_speed_and_quality(vault: Path, tmp_path: Path) -> None:
    argv = ["--prompt-tokens", "9", "--arm", "top_k=2,1", "--quality-tokens", "40", "--out", str(tmp_path), "--json"]
    done = run(vault, *argv)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    reference, fewer = result["arms"]
    assert (reference["arm"], reference["kl_mean"], reference["ratio"]) == ("top_k=2", 0, 1)
    assert fewer["kl_mean"] > 1e-4 and fewer["perplexity"] > 0
    assert result["recommended"] == "top_k=2"  # the other one is another model
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "sweep.json").read_text())["recommended"] == "top_k=2"


def test_other_encodings_are_arms_and_prefill_is_a_goal(
    vault: Path, tiny_vault: Callable[..., tuple[Path, Path]]
) -> None:
    _, source = tiny_vault("qwen3_moe", "source", seed=5)
    argv = ["--prompt-tokens", "9", "--goal", "prefill", "--quality-tokens", "40", "--json"]
    done = run(vault, "--arm", f"vault={source},{vault}", "--arm", "chunk=4,64", *argv)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [set(row["values"]) for row in result["arms"]] == [{"vault", "chunk"}] * 4
    assert [row["ratio"] for row in result["arms"]] == [row["prefill_ratio"] for row in result["arms"]]
    kls = [row["kl_mean"] for row in result["arms"]]
    assert kls[0] == kls[1] == 0 and kls[2] == kls[3] > 0  # a chunk changes nothing, an encoding does
    assert run(vault, "--arm", f"vault={source},{vault}", "--save-profile").returncode == 2


def test_a_saved_profile_is_used_and_said(vault: Path) -> None:
    done = run(vault, "--prompt-tokens", "5", "--arm", "threads=1", "--save-profile")
    assert done.returncode == 0, done.stderr
    assert "Keep threads=1" in done.stdout
    file = profile.path_for(vault)
    try:
        assert json.loads(file.read_text())["flags"] == {"threads": 1}
    finally:
        file.unlink()


SLOWED = Path(__file__).resolve().parents[2] / "build" / "smoe-engine-slowed"


@pytest.mark.slow
@pytest.mark.skipif(not SLOWED.exists(), reason="build/smoe-engine-slowed is not built (cmake -DSMOE_TESTS=ON)")
def test_an_engine_made_slower_is_found_out_and_a_copy_is_not(
    tiny_vault: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """smoe-engine-slowed makes each call of a matrix kernel last 5% longer. Three engines, taking turns in one run."""
    wide = {"hidden_size": 512, "num_hidden_layers": 6, "moe_intermediate_size": 512, "num_experts": 16}
    _, vault = tiny_vault("qwen3_moe", "q8", **wide)
    copy = tmp_path / "smoe-engine-copy"
    shutil.copy(engine_path(), copy)
    argv = ["--arm", f"engine={engine_path()},{copy},{SLOWED}", "--prompt-tokens", "32", "--gen", "128", "--json"]
    done = run(vault, *argv, "--rounds", "6", "--threads", "1")
    assert done.returncode == 0, done.stderr
    same, slower = json.loads(done.stdout)["arms"][1:]
    assert not same["differs"], same
    assert slower["differs"] and 0.92 < slower["ratio"] < 0.985, slower


@pytest.mark.parametrize(("argv", "code"), [(["--arm", "x=1"], 2), ([], 2), (["--arm", "budget=1K,1G"], 3)])
def test_refused(vault: Path, argv: list[str], code: int) -> None:
    done = run(vault, "--prompt-tokens", "9", *argv)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
