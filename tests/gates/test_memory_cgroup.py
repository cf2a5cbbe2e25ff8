"""Peak RSS stays at or below the plan's total, in a memory cgroup of exactly that size, and nothing is killed (R3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smoe_cli import _core
from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from tests.gates.engine_run import random_ids, running


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        with MemoryCgroup(1 << 30, "smoe-gate") as group:
            yield group
    except CgroupUnavailable as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")


def run_in(group: MemoryCgroup, vault: Path, prompt: int, gen: int, **flags: Any) -> tuple[dict[str, Any], list[int]]:
    """Runs with the plan's own figure as the budget and as the group's limit; (plan, ids)."""
    plan = _core.plan(str(vault), **flags)
    group.set_limit(plan["budget_bytes"])
    flags.pop("ring", None)  # the plan's figure stands for it
    with running(vault, group.command, budget=plan["budget_bytes"], **flags) as run:
        ids, _ = run.generate(random_ids(prompt), gen)
        peak, tables = run.memory_bytes("VmHWM"), run.memory_bytes("VmPTE")
    assert len(ids) == gen
    assert group.oom_kills() == 0
    assert peak + tables <= plan["budget_bytes"]
    assert peak >= plan["trunk_bytes"] + plan["slots"] * plan["record_bytes"]  # the figure is that of the engine
    return plan, ids


def test_long_context_and_long_output_at_a_quarter_of_the_model(group: MemoryCgroup, streamed: Path) -> None:
    """The prompt passes the window, the output wraps the ring, and nearly every expert is read anew."""
    plan, _ = run_in(group, streamed, prompt=1500, gen=600, ctx=1024, ring=30)
    assert 3.5 * plan["budget_bytes"] < streamed.stat().st_size


def test_the_smallest_budget_gives_the_same_text(group: MemoryCgroup, streamed: Path) -> None:
    plan, ids = run_in(group, streamed, prompt=700, gen=40, ctx=512, ring=8)
    assert plan["budget_bytes"] == plan["floor_bytes"]
    with running(streamed, ctx=512) as resident:
        assert resident.process.info()["slots"] == plan["total_records"]
        assert resident.generate(random_ids(700), 40)[0] == ids


def test_several_requests_and_threads(group: MemoryCgroup, streamed: Path) -> None:
    plan = _core.plan(str(streamed), ctx=512, ring=20, threads=5, sessions=2)
    group.set_limit(plan["budget_bytes"])
    flags: dict[str, Any] = {"ctx": 512, "threads": 5, "sessions": 2}
    with running(streamed, group.command, budget=plan["budget_bytes"], **flags) as run:
        for turn in range(12):
            run.generate(random_ids(40 + 60 * turn, seed=turn), 5, session="ab"[turn % 2], logprobs=5)
        assert run.memory_bytes("VmHWM") + run.memory_bytes("VmPTE") <= plan["budget_bytes"]
    assert group.oom_kills() == 0


def test_a_second_engine_plans_with_what_is_left(group: MemoryCgroup, streamed: Path, tmp_path: Path) -> None:
    """R18: engines tell each other through the ledger; what a dead one has written no longer counts."""
    group.set_limit(600 << 20)

    def inside(argv: list[str]) -> list[str]:
        return group.command([*argv, "--ledger", str(tmp_path / "engines")])

    with running(streamed, inside, ctx=512) as first:
        taken = first.process.info()["budget_bytes"]
        with running(streamed, inside, ctx=512) as second:
            assert second.process.info()["budget_bytes"] <= ((600 << 20) - taken) * 3 // 4
            assert second.generate(random_ids(50), 5)[0] == first.generate(random_ids(50), 5)[0]
        first.process.kill()
    with running(streamed, inside, ctx=512) as third:
        assert third.process.info()["budget_bytes"] == taken


def test_the_group_is_the_machine(group: MemoryCgroup, streamed: Path) -> None:
    """R1, R2, R6: without --budget the engine plans for the group, not for the host, whatever page cache is in it."""
    group.set_limit(160 << 20)
    with running(streamed, group.command, ctx=512) as run:
        info = run.process.info()
        run.generate(random_ids(300), 10)
        assert run.memory_bytes("VmHWM") <= info["budget_bytes"] <= (160 << 20) * 3 // 4
    assert 8 < info["slots"] < 384
    assert group.oom_kills() == 0
