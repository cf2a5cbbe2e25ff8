"""Peak RSS never above the plan over a long run: whole windows and 2,000 tokens, in a cgroup of its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe_cli import _core
from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from tests.gates.engine_run import random_ids, running


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [1, 2])
def test_r3_a_full_window_and_two_thousand_tokens(streamed: Path, tmp_path: Path, sessions: int) -> None:
    flags = {"ctx": 4096, "sessions": sessions}
    plan = _core.plan(str(streamed), ring=40, **flags)
    keeping = ["--history", str(tmp_path / "usage"), "--trace", str(tmp_path / "trace")]
    try:
        with (
            MemoryCgroup(plan["budget_bytes"], "smoe-gate") as group,
            running(
                streamed, lambda argv: group.command([*argv, *keeping]), budget=plan["budget_bytes"], **flags
            ) as run,
        ):
            for turn in range(2):
                ids, counters = run.generate(random_ids(4096, seed=turn), 1000, session="ab"[turn % sessions])
                assert len(ids) == 1000 and counters["misses"] > 0
                assert run.memory_bytes("VmHWM") + run.memory_bytes("VmPTE") <= plan["budget_bytes"]
            assert group.oom_kills() == 0
            assert run.memory_bytes("VmSwap") == 0
    except CgroupUnavailable as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
