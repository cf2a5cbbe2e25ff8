"""``smoe plan``: what people and scripts see of it. The arithmetic is proven in C++ (tests/engine/test_plan.cpp)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FakeCheckpoint, config_of, write_tokenizer

from smoe_cli import _core, sizes
from smoe_cli.commands import plan as plan_module
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import ResourceError, UsageError
from tests.unit.tiny_vault import TinyVault

ROOT = Path(__file__).parents[2]
# The keys that scripts rely on.
KEYS = {
    "model", "ctx", "trunk_bytes", "state_bytes", "scratch_bytes", "min_expert_cache_bytes", "floor_bytes",
    "working_set_bytes", "recommended_bytes", "all_experts_bytes", "process_bytes", "physical_ram_bytes",
    "usable_ram_bytes", "reserved_bytes", "ceiling_bytes", "budget_bytes", "budget_reason", "expert_cache_bytes",
    "slots", "record_bytes", "disk_read_bytes_s", "direct_io", "memory_read_bytes_s", "warnings",
    "predicted_decode_tok_s", "predicted_decode_low_tok_s", "predicted_decode_high_tok_s", "predicted_prefill_tok_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vaults")
    TinyVault().make(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short probes, no model chosen outside, and a ledger without the engines that happen to run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(plan_module, "PROBE_S", 0.02)
    monkeypatch.delenv("SMOE_MODEL", raising=False)


def make(folder: Path, **flags: Any) -> dict[str, Any]:
    return plan_module.plan_vault(folder / "tiny.smoe", EngineFlags(**flags))


def smoe(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_every_key_is_there_and_the_parts_add_up(folder: Path) -> None:
    plan = make(folder)
    assert plan.keys() >= KEYS
    assert plan["model"] == "tiny"
    assert plan["ctx"] == 4096
    assert plan["total_records"] == plan["slots"] == 8
    parts = ("trunk", "state", "scratch", "process", "min_expert_cache")
    assert plan["floor_bytes"] == sum(plan[f"{part}_bytes"] for part in parts)
    assert plan["all_experts_bytes"] == 8 * plan["record_bytes"]
    assert plan["budget_bytes"] == plan["all_resident_bytes"]
    more = plan["budget_bytes"] - plan["floor_bytes"] - plan["all_experts_bytes"] + plan["min_expert_cache_bytes"]
    assert 0 <= more <= plan["all_experts_bytes"] / 256  # page tables
    assert plan["disk_read_bytes_s"] > 0
    assert plan["memory_read_bytes_s"] > 1e8
    assert isinstance(plan["direct_io"], bool)
    assert plan["predicted_prefill_tok_s"] > 0
    low, middle, high = (plan[f"predicted_decode{part}_tok_s"] for part in ("_low", "", "_high"))
    assert 0.8 * middle <= low * 1.0001 and low < middle < high and high <= 1.2001 * middle


def test_the_default_comes_from_the_plan_not_from_a_constant(folder: Path) -> None:
    """R6: with room for all experts they are all resident; the budget moves with what the model needs."""
    small, large = make(folder, ctx=64), make(folder, ctx=4096)
    assert small["slots"] == large["slots"] == 8
    assert large["budget_bytes"] - small["budget_bytes"] >= large["state_bytes"] - small["state_bytes"] > 0
    assert small["budget_bytes"] < small["ceiling_bytes"]


def test_ring_and_budget(folder: Path) -> None:
    ring = make(folder, ring=6)
    assert ring["slots"] == 6
    assert make(folder, budget=ring["budget_bytes"])["slots"] >= 6
    floor = make(folder, ring=4)  # 2 x top-2: the smallest
    assert floor["budget_bytes"] == floor["floor_bytes"]
    with pytest.raises(ResourceError, match="at least 4 slots"):
        make(folder, ring=3)
    with pytest.raises(UsageError):
        make(folder, ring=4, budget=1 << 40)


def test_a_cache_below_one_token_says_so(tmp_path: Path) -> None:
    """R4: three mixture layers of top-2 ask for 6 records a token; a cache of 5 has lost each before it comes again."""
    source = FakeCheckpoint(config_of("qwen3_moe")).write(tmp_path / "checkpoint")
    write_tokenizer(source)
    convert(prepare(Options(source, tmp_path, name="tiny", quant="q8"), Quiet()), Quiet())
    assert any("about 0% were hits" in warning for warning in make(tmp_path, ring=5)["warnings"])
    assert make(tmp_path, ring=6)["warnings"] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cache-policy", "bogus"), "lru, decayed, floors, lfru, least-stale"),
        (("--experts-per-token", "99"), "1 to 2"),
        (("--draft", "bogus"), "ngram:N"),
    ],
)
def test_flags_that_mean_nothing_are_usage_errors_that_name_what_is_allowed(
    folder: Path, flags: tuple[str, str], said: str
) -> None:
    engine = [str(ROOT / "smoe_cli" / "smoe-engine"), "--serve", "--vault", str(folder / "tiny.smoe"), *flags]
    started = subprocess.run(engine, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    for run in (smoe("plan", folder / "tiny.smoe", *flags), started):
        assert run.returncode == 2, run.stderr
        assert run.stdout == ""
        assert said in run.stderr
        assert "smoe-engine" not in run.stderr


def test_the_state_is_called_what_it_is(folder: Path) -> None:
    plan = make(folder) | {"recurrent_state_bytes": 0}
    attention = "\n".join(plan_module.describe(plan))
    assert "keys and values" in attention and "recurrent" not in attention
    hybrid = "\n".join(plan_module.describe(plan | {"recurrent_state_bytes": plan["state_bytes"] // 4}))
    shown = sizes.show(plan["state_bytes"] // 4), sizes.show(plan["state_bytes"] - plan["state_bytes"] // 4)
    assert f"recurrent state{shown[0]:>19}" in hybrid and f"keys and values{shown[1]:>19}" in hybrid


def test_below_the_floor_is_refused_with_both_numbers_and_exit_3(folder: Path) -> None:
    run = smoe("plan", folder / "tiny.smoe", "--budget", "1M")
    assert run.returncode == 3
    assert run.stdout == ""
    assert "the budget is 1.0 MB" in run.stderr
    floor = int(run.stderr.split("--budget ")[1].split()[0])
    assert f"at least {sizes.show(floor)}" in run.stderr
    assert smoe("plan", folder / "tiny.smoe", "--budget", floor).returncode == 0


def test_json_is_one_value_with_warnings_on_the_way(folder: Path) -> None:
    """R13."""
    run = smoe("plan", "tiny", "--vault-dir", folder, "--json", "--budget", "100T")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert plan["budget_bytes"] == 100 << 40
    assert any("3/4 of the usable memory" in warning for warning in plan["warnings"])
    assert "3/4 of the usable memory" in run.stderr


def test_text_is_plain_when_redirected(folder: Path) -> None:
    """R14, and what the table says is what JSON says."""
    run = smoe("plan", "tiny", "--vault-dir", folder)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    plan = make(folder)
    for label, key in (("floor", "floor_bytes"), ("budget", "budget_bytes"), ("all experts", "all_experts_bytes")):
        assert f"  {label:<24}{sizes.show(plan[key]):>10}" in run.stdout
    assert plan["budget_reason"] in run.stdout
    assert "reads of whole records" in run.stdout or "page cache" in run.stdout


def test_without_a_model_the_machine_and_every_vault(folder: Path, tmp_path: Path) -> None:
    TinyVault(seed=1).make(tmp_path)
    (tmp_path / "broken.smoe").write_bytes(b"no vault")
    run = smoe("plan", "--vault-dir", tmp_path, "--json")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["machine"] == {**_core.machine_memory(), "available_bytes": told["machine"]["available_bytes"]}
    broken, tiny = told["models"]
    assert (broken["model"], tiny["model"]) == ("broken", "tiny")
    assert "error" in broken and tiny.keys() >= KEYS
    assert "broken" in run.stderr
    text = smoe("plan", "--vault-dir", tmp_path).stdout
    assert "cannot run here" in text and "8 of 8" in text
    empty = smoe("plan", "--vault-dir", tmp_path / "nothing")
    assert empty.returncode == 0 and "no vaults" in empty.stdout


def test_what_other_engines_take_is_not_there(folder: Path, tmp_path: Path) -> None:
    """R18: this test's process stands for a running engine, the command for the one that plans."""
    since = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (tmp_path / "smoe").mkdir()
    (tmp_path / "smoe" / "engines").write_text(f"{os.getpid()} {since} {1 << 30}\n")
    plan = json.loads(smoe("plan", folder / "tiny.smoe", "--json").stdout)
    assert plan["reserved_bytes"] == 1 << 30
    assert plan["usable_ram_bytes"] == _core.machine_memory()["usable_ram_bytes"] - (1 << 30)
    assert json.loads(smoe("plan", "--vault-dir", folder, "--json").stdout)["machine"]["reserved_bytes"] == 1 << 30


def test_a_ledger_that_cannot_be_used_is_a_warning(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "smoe").write_text("no folder")
    run = smoe("plan", folder / "tiny.smoe", "--json")
    assert run.returncode == 0
    assert "other running engines are not counted" in run.stderr
    run = smoe("plan", "--vault-dir", folder, "--json")
    assert run.returncode == 0
    assert "other running engines are not counted" in run.stderr
    assert json.loads(run.stdout)["models"][0]["model"] == "tiny"


def test_flags_the_engine_does_not_have_are_usage_errors(folder: Path) -> None:
    assert smoe("plan", folder / "tiny.smoe", "--kv", "q8").returncode == 2
    assert smoe("plan", folder / "tiny.smoe", "--budget", "1G", "--ring", "4").returncode == 2
    assert smoe("plan", "nothing", "--vault-dir", folder).returncode == 2


def test_machine_memory_takes_the_cgroup_for_the_machine(tmp_path: Path) -> None:
    """R1, R2: the smallest finite limit up the tree. Page cache in the group changes nothing: only limits are read."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/app\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    pod = tmp_path / "sys/fs/cgroup/pod"
    (pod / "app").mkdir(parents=True)
    (pod / "app/memory.max").write_text("max\n")
    (pod / "memory.max").write_text(f"{8 << 30}\n")
    (pod / "app/memory.stat").write_text(f"file {6 << 30}\n")
    machine = _core.machine_memory(str(tmp_path))
    assert machine == {
        "physical_ram_bytes": 64 << 30,
        "usable_ram_bytes": 8 << 30,
        "reserved_bytes": 0,
        "available_bytes": 32 << 30,
        "limited_by": "/sys/fs/cgroup/pod/memory.max",
    }


def test_probes_refuse_what_they_cannot_measure(tmp_path: Path) -> None:
    with pytest.raises(_core.CoreError, match="cannot open"):
        _core.probe_disk(str(tmp_path / "none"), 4096)
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(_core.CoreError, match="smaller than one record"):
        _core.probe_disk(str(tmp_path / "short"), 4096)
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    speed = _core.probe_disk(str(tmp_path / "file"), 65536, 0.02)
    assert speed["read_bytes_s"] > 0
    assert _core.probe_disk(str(tmp_path / "file"), 65536, 0.02, buffered=True)["direct"] is False
