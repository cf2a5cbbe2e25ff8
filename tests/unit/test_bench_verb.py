"""``smoe bench`` on a tiny vault and the real engine: its figures, its refusals, a peer beside it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.bench import measure, report
from smoe_cli.bench.energy import EnergyMeter
from smoe_cli.bench.ids import RandomIds, TextIds

KEYS = [
    "prefill_tok_s",
    "ttft_ms",
    "decode_tok_s",
    "hit_rate",
    "read_bytes_per_token",
    "disk_read_bytes_s",
    "memory_read_bytes_s",
]

FAKE_PEER = """#!/bin/sh
exec "{python}" -c '
import json, sys
print(json.dumps({{"base_rss_bytes": 1}}), flush=True)
sys.stdin.readline()
print(json.dumps({{"ready": True, "vocab": 64}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    open("{log}", "a").write(line)
    answer = {{"ms": 1.0, "top": 1}} if request["op"] == "prefill" else {{"ms": [1.0] * len(request["ids"]), "top": 1}}
    print(json.dumps(answer), flush=True)
'
"""


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("qwen3_moe", "q8")[1]


def bench(vault: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", "bench", str(vault), "--random", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_limit_that_the_model_does_not_fit_into_is_a_matter_of_resources(vault: Path) -> None:
    for argv in (["--limit", "1M"], ["--limit", "1M", "--ring", "8"]):
        done = bench(vault, "--prompt-tokens", "4", "--gen", "3", *argv)
        assert done.returncode == 3, done.stderr
        assert "1.0 MB" in done.stderr


def test_json_is_one_value_with_every_figure(vault: Path, tmp_path: Path) -> None:
    argv = ["--prompt-tokens", "4,9", "--gen", "3", "--repeat", "2", "--out", str(tmp_path / "out"), "--json"]
    done = bench(vault, *argv, "--energy")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["model"] == vault.stem
    for key in KEYS:
        assert result[f"{key}_min"] <= result[key] <= result[f"{key}_max"]
    assert result["peak_rss_bytes"] <= result["budget_bytes"]
    assert [(run["round"], run["prompt_tokens"]) for run in result["runs"]] == [(0, 4), (0, 9), (1, 4), (1, 9)]
    assert [column["prompt_tokens"] for column in result["prompts"]] == [4, 9]
    assert 0 < result["engine_start_ms"] < result["cold_ttft_ms"]
    with (tmp_path / "out" / "runs.csv").open() as file:
        assert [float(row["ttft_ms"]) for row in csv.DictReader(file)] == [run["ttft_ms"] for run in result["runs"]]
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_dense_model_is_planned_and_measured(tiny_vault: Callable[..., tuple[Path, Path]]) -> None:
    """It has no records: the disk that counts is that of its trunk."""
    _, dense = tiny_vault("llama", "q8")
    done = bench(dense, "--prompt-tokens", "4", "--gen", "2", "--repeat", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["hit_rate"] is None and result["disk_read_bytes_s"] > 0
    command = [sys.executable, "-m", "smoe_cli", "plan", str(dense), "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert plan["disk_read_bytes_s"] > 0 and plan["predicted_decode_tok_s"] > 0
    assert plan["all_experts_bytes"] == 0


def test_people_get_a_table_and_progress_apart(vault: Path) -> None:
    done = bench(vault, "--prompt-tokens", "4", "--gen", "2", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    assert "decode" in done.stdout and "2 of 2" not in done.stdout
    assert "2 of 2: smoe, prompt of 4" in done.stderr and "s left" in done.stderr


def test_buckets_add_up_to_what_a_token_takes(vault: Path) -> None:
    done = bench(vault, "--prompt-tokens", "30", "--gen", "20", "--repeat", "3", "--instrument", "--json")
    assert done.returncode == 0, done.stderr
    assert "instrument:" not in done.stderr  # the engine's own lines, one a request, are not for a measurement
    result = json.loads(done.stdout)
    buckets = result["buckets"]
    assert set(buckets) == {*measure.BUCKETS, "unaccounted", "wire"}
    for run in result["runs"]:
        parts = sum(run[f"{name}_ms"] for name in measure.BUCKETS)
        assert abs(run["unaccounted_ms"]) <= 0.02 * parts
        assert parts + run["unaccounted_ms"] + run["wire_ms"] == pytest.approx(1e3 / run["decode_tok_s"])
    assert buckets["attention"] > 0 and buckets["expert_compute"] > 0 and buckets["wire"] > 0


def test_one_conversation_grows_to_each_context(vault: Path, tmp_path: Path) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE_PEER.format(python=sys.executable, log=log))
    python.chmod(0o755)
    (tmp_path / "x.gguf").touch()
    argv = ["--vs", f"llama.cpp:{tmp_path / 'x.gguf'}", "--peer-python", str(python), "--json"]
    done = bench(vault, "--contexts", "0,10,30", "--gen", "4", "--repeat", "1", *argv)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [column["prompt_tokens"] for column in result["prompts"]] == [1, 10, 30]
    sent = [json.loads(line) for line in log.read_text().splitlines()][1:]
    text = RandomIds(vocab_of(vault)).take(34, 0)
    assert [one["ids"] for one in sent] == [text[:1], text[1:5], text[5:10], text[10:14], text[14:30], text[30:34]]
    assert [one["keep"] for one in sent if one["op"] == "prefill"] == [0, 5, 14]


def test_a_peer_is_fed_the_same_ids_and_compared(vault: Path, tmp_path: Path) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE_PEER.format(python=sys.executable, log=log))
    python.chmod(0o755)
    (tmp_path / "x.gguf").touch()
    argv = ["--vs", f"llama.cpp:{tmp_path / 'x.gguf'}", "--peer-python", str(python)]
    done = bench(vault, *argv, "--prompt-tokens", "4", "--gen", "2", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [run["program"] for run in result["runs"]] == ["smoe", "llama.cpp", "llama.cpp", "smoe"]
    peer = result["peers"][0]["prompts"][0]
    assert peer["decode_tok_s"] == 1000
    assert peer["decode_tok_s_ratio"] == pytest.approx(result["prompts"][0]["decode_tok_s"] / 1000)
    assert peer["ttft_ms_ratio"] == pytest.approx(peer["ttft_ms"] / result["prompts"][0]["ttft_ms"])
    sent = [json.loads(line) for line in log.read_text().splitlines()][1:]  # after the warm-up
    ids = RandomIds(vocab_of(vault))
    assert [request["ids"] for request in sent[:2]] == [ids.take(6, 0)[:4], ids.take(6, 0)[4:]]


def vocab_of(vault: Path) -> int:
    from smoe_cli.bench.model import describe_vault

    return int(describe_vault(vault)["vocab"])


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--prompt-tokens", "4,x"], 2, "--prompt-tokens"),
        (["--prompt-tokens", "0"], 2, "--prompt-tokens"),
        (["--contexts", "0,x"], 2, "--contexts"),
        (["--contexts", "0,60", "--gen", "64"], 2, "room"),
        (["--text", "/nowhere"], 2, "--random and --text"),
        (["--prompt-tokens", "4", "--vs", "ollama:x"], 2, "--vs takes"),
        (["--prompt-tokens", "4", "--vs", "llama.cpp:/nowhere.gguf"], 2, "--vs takes"),
        (["--prompt-tokens", "40", "--ctx", "41", "--gen", "2"], 2, "window is 41"),
        (["--prompt-tokens", "4", "--budget", "1K"], 3, "at least"),
        (["--prompt-tokens", "4", "--out", "/dev/null/x"], 1, "/dev/null"),
    ],
)
def test_refused(vault: Path, argv: list[str], code: int, said: str) -> None:
    done = bench(vault, *argv)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert "tok/s" not in done.stderr  # before anything was measured


def test_a_text_begins_elsewhere_each_round_and_again_at_its_end() -> None:
    text = TextIds(list(range(10)), "x")
    assert text.take(12, 0) == [*range(10), 0, 1]
    assert text.take(3, 1) == [9, 0, 1]  # 7919 mod 10
    assert RandomIds(5).take(20, 3) == RandomIds(5).take(20, 3) != RandomIds(5).take(20, 4)


def test_medians_have_their_spread_and_say_what_is_missing() -> None:
    runs: list[dict[str, Any]] = [{"decode_tok_s": value, "hit_rate": None} for value in (3.0, 1.0, 2.0)]
    figures = measure.medians(runs)
    assert [figures[f"decode_tok_s{end}"] for end in ("", "_min", "_max")] == [2, 1, 3]
    assert figures["hit_rate"] is None and figures["joules_per_token"] is None
    assert report.cell(figures, "decode_tok_s", 1) == "2 (1-3)"
    assert report.cell(figures, "hit_rate", 100) == "-"


def test_energy_is_net_of_idle_and_a_counter_may_wrap(tmp_path: Path) -> None:
    assert EnergyMeter.open(tmp_path) is None
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    (folder / "max_energy_range_uj").write_text("1000000000")
    counter = folder / "energy_uj"
    counter.write_text("990000000")

    def sleep(_: float) -> None:
        counter.write_text("995000000")

    meter = EnergyMeter.open(tmp_path, idle_s=2.0, sleep=sleep)
    assert meter is not None
    assert meter.idle_watts == pytest.approx(2.5, rel=0.05)
    before = meter.counters()
    counter.write_text("15000000")  # 20 J later, past the wrap
    assert meter.joules(before, meter.counters()) == pytest.approx(20)
    assert meter.net_joules(before, meter.counters(), 4.0) == pytest.approx(10, rel=0.05)
