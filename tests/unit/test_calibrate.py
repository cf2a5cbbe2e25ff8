"""Importance weights: what is counted, what is made of it, and a conversion that uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of, write_tokenizer

from smoe_cli import _core
from smoe_cli.commands.convert import command
from smoe_cli.convert.calibrate import PRIOR_ROWS, _averages, collect
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import UsageError

ROOT = Path(__file__).parents[2]
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 60, 700)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "src"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    FakeCheckpoint(config_of("mixtral", **sizes)).write(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def q8(source: Path) -> Path:
    ui = Quiet()
    return Path(convert(prepare(Options(source, source.parent / "q8", "m", "q8"), ui), ui)["path"])


def test_every_matrix_is_counted_once_a_token(q8: Path) -> None:
    engine = _core.Engine(str(q8), watch_columns=True, ctx=256)
    engine.score(IDS[:200])
    sums = engine.column_sums()
    arch = json.loads(_core.inspect(str(q8))["manifest"])["arch"]
    ffn = arch["layers"][0]["ffn"]
    for part in "qkvo":
        assert sums[f"layers.0.attn.{part}.weight"][1] == 200
    assert np.array_equal(sums["layers.0.attn.q.weight"][0], sums["layers.0.attn.v.weight"][0])  # they read the same
    for part, cols in (("input", arch["hidden"]), ("middle", ffn["expert_width"])):
        every = [sums[f"layers.0.experts.{e}.{part}"] for e in range(ffn["experts"])]
        assert sum(rows for _, rows in every) == 200 * ffn["top_k"]
        assert all(squares.shape == (cols,) and (squares >= 0).all() for squares, _ in every)


def test_counting_changes_nothing_and_is_off_unless_asked_for(q8: Path) -> None:
    plain, watching = _core.Engine(str(q8), ctx=256), _core.Engine(str(q8), watch_columns=True, ctx=256)
    assert np.array_equal(plain.score(IDS[:100]), watching.score(IDS[:100]))
    assert plain.column_sums() == {}


def test_collect_reads_all_windows_and_names_the_text(q8: Path) -> None:
    seen: list[int] = []
    importance = collect(q8, IDS, seen.append)
    assert seen == [512, 700] and importance.tokens == 700
    assert importance.name == collect(q8, IDS, lambda *_: None).name != collect(q8, IDS[:-1], lambda *_: None).name
    gate, down = importance.of("layers.1.experts.2.gate"), importance.of("layers.1.experts.2.down")
    assert gate is not None and down is not None
    assert gate is importance.of("layers.1.experts.2.up")
    assert importance.of("layers.0.attn.q.weight") is not None
    assert importance.of("layers.0.attn_norm.weight") is None


def test_rare_experts_lean_on_their_layer() -> None:
    sums = {
        "layers.0.experts.0.input": (np.array([100.0, 0.0]), 100),
        "layers.0.experts.1.input": (np.array([0.0, 4.0]), 1),
        "layers.0.experts.2.input": (np.zeros(2), 0),
        "head.weight": (np.array([3.0, 6.0]), 3),
        "layers.0.attn.q.weight": (np.zeros(2), 0),  # never used: no weights rather than none that count
    }
    found = _averages(sums)
    layer = np.array([100.0, 4.0]) / 101
    assert np.allclose(found["layers.0.experts.2.input"], layer)
    assert np.allclose(found["layers.0.experts.1.input"], (np.array([0, 4.0]) + PRIOR_ROWS * layer) / (1 + PRIOR_ROWS))
    assert np.allclose(found["head.weight"], [1, 2])
    assert "layers.0.attn.q.weight" not in found


def test_a_calibrated_conversion_weighs_its_fits_and_says_so(source: Path, q8: Path) -> None:
    ui, out = Quiet(), source.parent / "calibrated"
    importance = collect(q8, IDS, lambda *_: None)
    convert(prepare(Options(source, out, "plain", "q3"), ui), ui)
    first = convert(prepare(Options(source, out, "weighed", "q3", importance=importance), ui), ui)
    assert (out / "plain.smoe").read_bytes()[8192:] != (out / "weighed.smoe").read_bytes()[8192:]
    manifest = json.loads(_core.inspect(first["path"])["manifest"])
    assert manifest["calibration"] == {"ids": importance.name, "tokens": 700}
    assert convert(prepare(Options(source, out, "weighed", "q3", importance=importance), ui), ui)["unchanged"]
    with pytest.raises(UsageError, match="calibrated"):
        convert(prepare(Options(source, out, "weighed", "q3"), ui), ui)


def test_the_command_calibrates_and_cleans_up(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 40)
    command = [sys.executable, "-m", "smoe_cli", "convert", str(source), "--out", str(tmp_path / "v"), "--name", "m"]
    done = subprocess.run(
        [*command, "--quant", "q2", "--calibrate", str(text), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads(_core.inspect(json.loads(done.stdout)["path"])["manifest"])
    assert manifest["calibration"]["tokens"] > 1 and manifest["quant"] == "q2"
    assert not list((tmp_path / "v").glob(".calibrate-*"))
    assert "--calibrate" not in done.stderr  # only who leaves it out is told
    bare = subprocess.run([*command, "--quant", "q2", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert "2 bits without --calibrate" in bare.stderr
    missing = subprocess.run([*command, "--calibrate", str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2 and "cannot be read" in missing.stderr


def test_a_text_is_judged_before_anything_is_made_of_it(source: Path, tmp_path: Path, capsys: Any) -> None:
    empty, binary, out = tmp_path / "empty", tmp_path / "binary", tmp_path / "v"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe" * 100)
    for text in (empty, binary, tmp_path, tmp_path / "no"):
        with pytest.raises(UsageError, match=r"cannot be read|has no text"):
            command(str(source), out=out, name="m", quant="q4", calibrate=text)
        assert "8-bit" not in capsys.readouterr().err and not list(out.iterdir())
    with pytest.raises(UsageError, match="source keeps what is there"):
        command(str(source), out=out, name="m", quant="source", calibrate=empty)


def test_a_calibration_that_is_stopped_continues_and_a_finished_one_is_not_repeated(
    source: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "v"
    text.write_text("one two three four " * 40)
    made: list[float] = []

    def stop(vault: Path, *_: Any) -> None:
        made.append(vault.stat().st_mtime_ns)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("smoe_cli.convert.calibrate.collect", stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                command(str(source), out=out, name="m", quant="q4", calibrate=text)
    assert made[0] == made[1]  # the 8-bit vault was kept
    command(str(source), out=out, name="m", quant="q4", calibrate=text)
    assert sorted(path.name for path in out.iterdir()) == ["m.scout.safetensors", "m.smoe", "m.tokenizer"]
    capsys.readouterr()
    command(str(source), out=out, name="m", quant="q4", calibrate=text)
    said = capsys.readouterr().err
    assert "up to date" in said and "calibrating" not in said
    text.write_text("five six " * 40)
    with pytest.raises(UsageError, match="calibrated with another text"):
        command(str(source), out=out, name="m", quant="q4", calibrate=text)


def test_what_a_stopped_calibration_of_another_source_left_is_replaced(source: Path, tmp_path: Path, q8: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "v"
    text.write_text("one two three four " * 40)
    other = tmp_path / "other"
    FakeCheckpoint(config_of("mixtral"), seed=9).write(other)
    write_tokenizer(other)
    convert(prepare(Options(other, out / ".calibrate-m", "calibrate", "q8"), Quiet()), Quiet())
    command(str(source), out=out, name="m", quant="q4", calibrate=text)
    assert (out / "m.smoe").is_file() and not (out / ".calibrate-m").exists()
