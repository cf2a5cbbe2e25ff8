"""Whole conversions: bytes, resuming, refusing, reporting (cases C6, C11, C14, C16 and the command line)."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of, expert_shapes, to_dtype, write_tokenizer

from smoe_cli import _core, registry
from smoe_cli.convert import run, write
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError, ResourceError, SmoeError, UsageError
from smoe_cli.families.arch import resolve, trunk_tensors
from smoe_cli.families.spec import match_family

ROOT = Path(__file__).parents[2]


def make(source: Path, out: Path, quant: str = "q8", ui: Quiet | None = None, **more: Any) -> dict[str, Any]:
    ui = ui or Quiet()
    return convert(prepare(Options(source, out, name="m", quant=quant, **more), ui), ui)


def manifest_of(vault: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(_core.inspect(str(vault))["manifest"])
    return manifest


def scout_tensors(out: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = (out / "m.scout.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    base = 8 + length
    return {
        name: (entry["dtype"], entry["shape"], data[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def records(out: Path) -> bytes:
    """The expert records: what is between the header and the table."""
    info = _core.inspect(str(out / "m.smoe"))
    ffns = [layer["ffn"] for layer in json.loads(info["manifest"])["arch"]["layers"] if layer["ffn"]["block"] == "moe"]
    size = sum(ffn["experts"] * length for ffn, length in zip(ffns, info["record_bytes"], strict=True))
    return (out / "m.smoe").read_bytes()[16384 : 16384 + size]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["q8", "q4_0", "source", "f32"])
def test_the_vault_holds_the_encoded_source(tmp_path: Path, quant: str) -> None:
    fake = FakeCheckpoint(config_of("qwen2_moe"))
    make(fake.write(tmp_path / "src", shards=3), tmp_path, quant)
    manifest, stored = manifest_of(tmp_path / "m.smoe"), scout_tensors(tmp_path)
    q = fake.values("model.layers.0.self_attn.q_proj.weight")
    entry = manifest["tensors"]["layers.0.attn.q.weight"]
    expected = _core.encode(entry["encoding"], q)
    if entry["layout"] == "panel16":
        expected = _core.pack(entry["encoding"], expected, *q.shape)
    assert stored["layers.0.attn.q.weight"][2] == expected
    assert stored["final_norm.weight"] == ("BF16", [64], fake.tensors["model.norm.weight"][2])

    encodings = manifest["arch"]["layers"][2]["ffn"]["encodings"]
    layout = _core.record_layout(64, 32, *encodings.values())
    record = records(tmp_path)[(4 + 3) * layout["length"] :][
        : layout["length"]
    ]  # layer 2 (the second routed), expert 3
    for part, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
        values = fake.values(f"model.layers.2.mlp.experts.3.{part}_proj.weight")
        packed = _core.pack(encodings[part], _core.encode(encodings[part], values), *shape)
        assert record[layout[part] :][: len(packed)] == packed


def test_planned_sizes_are_the_written_sizes(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("mixtral"))
    result = make(fake.write(tmp_path / "src"), tmp_path, "q4_0")
    assert sum(len(data) for _, _, data in scout_tensors(tmp_path).values()) == result["trunk_bytes"]
    info = _core.inspect(str(tmp_path / "m.smoe"))
    assert sum(info["record_bytes"]) * 4 == result["records_bytes"]


def test_c6_three_layouts_give_the_same_vault(tmp_path: Path) -> None:
    found = []
    for how in ("separate", "fused", "turned"):
        fake = FakeCheckpoint(config_of("qwen3_moe", moe_intermediate_size=40))
        if how != "separate":
            for layer in range(3):
                fake.fuse(layer, turned=how == "turned")
        out = tmp_path / how
        make(fake.write(out / "src"), out, "q8")
        manifest = manifest_of(out / "m.smoe")
        del manifest["source"]  # the files differ, and so does their fingerprint
        found.append((records(out), (out / "m.scout.safetensors").read_bytes(), manifest))
    assert found[0] == found[1] == found[2]


def test_chunks_and_threads_do_not_change_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    make(source, tmp_path / "a", "q8", jobs=1)
    monkeypatch.setattr(write, "CHUNK_VALUES", 1)  # one panel of rows at a time
    monkeypatch.setattr(write, "IN_FLIGHT_BYTES", 1)
    make(source, tmp_path / "b", "q8", jobs=4)
    for name in ("m.smoe", "m.scout.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_it_verifies_and_lists(tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    write_tokenizer(source)
    make(source, tmp_path, "q4")
    assert _core.verify(str(tmp_path / "m.smoe"))["ok"]
    (vault,) = registry.find(tmp_path)
    assert vault.describe() == {
        "id": "m", "path": str(tmp_path / "m.smoe"), "quant": "q4", "model_type": "mixtral", "moe_layers": 3,
        "experts_per_layer": 4, "top_k": 2, "bytes": vault.bytes, "complete": True,
    }  # fmt: skip
    parts = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "src"]
    assert vault.bytes == sum(path.stat().st_size for path in parts)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    result = make(FakeCheckpoint(config_of("llama")).write(tmp_path / "src"), tmp_path)
    assert result["experts"] == 0 and registry.find(tmp_path)[0].describe()["moe_layers"] == 0


# -- errors of encoding (C14) -----------------------------------------------------------------------------------------


def test_c14_grouped_scales_keep_both_halves(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    name = "model.layers.0.mlp.up_proj.weight"
    values = fake.values(name).copy()
    values[:, 32:] *= 30
    fake.put(name, values)
    result = make(fake.write(tmp_path / "src"), tmp_path, "q4_0")
    entry = manifest_of(tmp_path / "m.smoe")["tensors"]["layers.0.ffn.up.weight"]
    stored = scout_tensors(tmp_path)["layers.0.ffn.up.weight"][2]
    exact, decoded = fake.values(name), _core.decode("q4_0", stored, 96, 64, "panel16")
    small = np.linalg.norm(decoded[:, :32] - exact[:, :32]) / np.linalg.norm(exact[:, :32])
    assert small < 0.12  # one scale a row would leave nothing of the small half
    assert entry["error"] == pytest.approx(np.linalg.norm(decoded - exact) / np.linalg.norm(exact), rel=1e-3)
    assert result["worst_errors"][0]["error"] >= entry["error"] > 0.05


def test_lossless_encodings_report_no_error(tmp_path: Path) -> None:
    result = make(FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src"), tmp_path, "source")
    assert result["worst_errors"] == []


def test_expert_errors_name_the_worst_expert(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("mixtral"))
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    values = np.full_like(fake.values(name), 1e-3)
    values[:, ::32] = 1.0  # an outlier in every block leaves the rest without levels
    values += np.random.default_rng(0).normal(0, 0.04, values.shape)
    fake.put(name, values)
    make(fake.write(tmp_path / "src"), tmp_path, "q4_0")
    layer = manifest_of(tmp_path / "m.smoe")["expert_errors"]["1"]
    assert layer["gate"]["worst_expert"] == 2 and layer["gate"]["max"] > 1.5 * layer["up"]["max"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_weight_names_tensor_and_place(tmp_path: Path, bad: float) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    values = fake.values(name).copy()
    values[40, 7] = bad
    fake.put(name, values)
    for quant in ("q8", "source"):
        with pytest.raises(SmoeError, match=rf"{name} holds {bad} at \[40, 7\]"):
            make(fake.write(tmp_path / "src"), tmp_path / quant, quant)
        assert registry.find(tmp_path / quant) == []


def test_values_that_an_encoding_cannot_hold(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama"), dtype="F32")
    fake.put("model.layers.1.mlp.down_proj.weight", np.full((64, 96), 1e6))
    with pytest.raises(SmoeError, match=r"down_proj.*f16"):
        make(fake.write(tmp_path / "src"), tmp_path, "f16")


# -- stopping and resuming (C11) --------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer raises after ``count`` outputs, as if the process had ended there."""
    complete = write.VaultWrite._complete
    done = 0

    def counted(self: write.VaultWrite, item: Any) -> int:
        nonlocal done
        if done == count:
            raise Stop
        done += 1
        return complete(self, item)

    monkeypatch.setattr(write.VaultWrite, "_complete", counted)


@pytest.mark.parametrize("count", [0, 1, 20, 35])
def test_c11_stopped_anywhere_it_continues_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    make(source, tmp_path / "whole", "q8")
    with monkeypatch.context() as patch:
        stop_after(count, patch)
        with pytest.raises(Stop):
            make(source, tmp_path / "out", "q8")
    assert registry.find(tmp_path / "out") == []
    with pytest.raises(UsageError):
        registry.resolve(None, tmp_path / "out")
    ui = Quiet()
    result = make(source, tmp_path / "out", "q8", ui)
    assert result["resumed"] == (count > 0)
    for name in ("m.smoe", "m.scout.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "out").glob("*.part"))


def test_c11_errors_lost_with_a_cut_journal_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    make(source, tmp_path / "whole", "q8")
    with monkeypatch.context() as patch:
        stop_after(30, patch)
        with pytest.raises(Stop):
            make(source, tmp_path / "out", "q8")
    journal = tmp_path / "out" / "m.errors.part"
    journal.write_text(journal.read_text()[:200])
    make(source, tmp_path / "out", "q8")
    assert manifest_of(tmp_path / "out" / "m.smoe") == manifest_of(tmp_path / "whole" / "m.smoe")


def test_fresh_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    with monkeypatch.context() as patch:
        stop_after(30, patch)
        with pytest.raises(Stop):
            make(source, tmp_path / "out", "q8")
    assert not make(source, tmp_path / "out", "q8", fresh=True)["resumed"]


def test_c11_other_options_do_not_continue_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    with monkeypatch.context() as patch:
        stop_after(30, patch)
        with pytest.raises(Stop):
            make(source, tmp_path / "out", "q8")
    with pytest.raises(UsageError, match=r"with q8, which is now .* with q4_0"):
        make(source, tmp_path / "out", "q4_0")
    with pytest.raises(UsageError, match=r"with q8, which is now .* with q8 head=f16"):
        make(source, tmp_path / "out", "q8", roles=("head=f16",))


# -- changed sources, targets without room (C16) ----------------------------------------------------------------------


def edit_last_byte(source: Path) -> None:
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_c16_a_source_that_changed_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    with monkeypatch.context() as patch:
        stop_after(30, patch)
        with pytest.raises(Stop):
            make(source, tmp_path / "out", "q8")
    edit_last_byte(source)
    with pytest.raises(UsageError) as caught:
        make(source, tmp_path / "out", "q8")
    assert "--fresh" in caught.value.text + caught.value.hint


def test_c16_a_finished_vault_is_left_alone_unless_fresh(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("mixtral"))
    source = fake.write(tmp_path / "src")
    make(source, tmp_path, "q8")
    before = (tmp_path / "m.smoe").read_bytes()
    assert make(source, tmp_path, "q8")["unchanged"]
    with pytest.raises(UsageError, match="other encodings"):
        make(source, tmp_path, "q4_0")
    write_tokenizer(source)
    with pytest.raises(UsageError, match="another tokenizer"):
        make(source, tmp_path, "q8")
    edit_last_byte(source)
    with pytest.raises(UsageError, match="made from other files") as caught:
        make(source, tmp_path, "q8")
    assert "--fresh" in caught.value.hint
    assert (tmp_path / "m.smoe").read_bytes() == before
    make(source, tmp_path, "q8", fresh=True)
    assert (tmp_path / "m.smoe").read_bytes() != before and _core.verify(str(tmp_path / "m.smoe"))["ok"]


def test_c16_a_target_without_room_is_refused_before_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(ResourceError, match="free, the vault needs") as caught:
        make(source, tmp_path / "out")
    assert caught.value.exit_code == 3


def test_c16_a_target_that_takes_no_files(tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")
    (tmp_path / "file").touch()
    with pytest.raises(SmoeError, match="cannot be written to"):
        make(source, tmp_path / "file" / "out")


def test_c16_a_disk_that_fills_up_or_fails_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")

    def fail(number: int) -> None:
        def raised(*_: object) -> int:
            raise OSError(number, os.strerror(number), "somewhere")

        monkeypatch.setattr(write.Journal, "add", raised)

    fail(errno.ENOSPC)
    with pytest.raises(ResourceError, match="somewhere: no room left") as caught:
        make(source, tmp_path / "out")
    assert caught.value.exit_code == 3
    fail(errno.EIO)
    with pytest.raises(SmoeError, match="somewhere: Input/output error"):
        make(source, tmp_path / "out")
    monkeypatch.undo()
    assert make(source, tmp_path / "out")["unchanged"] is False


def test_a_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeCheckpoint(config_of("mixtral")).write(tmp_path / "src")

    def raised(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", raised)
    with pytest.raises(SmoeError, match=r"model\.safetensors: Input/output error"):
        make(source, tmp_path / "out")


def test_names_that_cannot_be_files(tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("llama")).write(tmp_path / "src")
    for name in ("../m", "a/b", ".hidden", "a b"):
        with pytest.raises(UsageError, match="cannot name a vault"):
            prepare(Options(source, tmp_path, name=name), Quiet())


def test_fp8_source_becomes_plain_encodings(tmp_path: Path) -> None:
    quantisation = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    fake = FakeCheckpoint(config_of("llama", quantization_config=quantisation))
    name = "model.layers.0.mlp.up_proj.weight"
    codes = np.random.default_rng(0).integers(0, 0x70, (96, 64)).astype(np.uint8)
    fake.tensors[name] = ("F8_E4M3", (96, 64), codes.tobytes())
    fake.put(name + "_scale_inv", np.full((3, 2), 0.25), "F32")
    make(fake.write(tmp_path / "src"), tmp_path, "source")
    from smoe_cli.convert.safetensors import to_float32

    dtype, shape, data = scout_tensors(tmp_path)["layers.0.ffn.up.weight"]
    assert (dtype, shape) == ("F32", [96, 64])
    assert data == to_dtype(to_float32(codes.reshape(-1), "F8_E4M3") * np.float32(0.25), "F32")


def test_a_shard_that_is_cut_after_planning(tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("llama")).write(tmp_path / "src")
    job = prepare(Options(source, tmp_path, name="m"), Quiet())
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptError, match="cut short"):
        convert(job, Quiet())


# -- the command ------------------------------------------------------------------------------------------------------


def smoe(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **more)


def test_command_dry_run_then_convert_then_verify(tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("qwen3_moe")).write(tmp_path / "src")
    planned = smoe("convert", source, "--out", tmp_path / "v", "--dry-run", "--json")
    assert planned.returncode == 0 and not (tmp_path / "v").exists()
    report = json.loads(planned.stdout)
    assert report["id"] == "src-q4" and report["output_bytes"] == report["trunk_bytes"] + report["records_bytes"] > 0
    assert {fallback["used"] for fallback in report["fallbacks"]} == {"q5_0", "q8_0"}

    done = smoe("convert", source, "--out", tmp_path / "v", "--verify", "--json", "--role", "attention=f32")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verified"] is True and result["source_bytes_s"] > 0
    assert result["output_bytes"] != report["output_bytes"]
    lines = done.stderr.splitlines()
    assert "output" in lines[1] and "MB/s of source" in lines[-1]


def test_command_errors_are_one_line_and_a_code(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, code in [([tmp_path / "empty"], 2), ([tmp_path / "x.gguf"], 2), ([tmp_path, "--quant", "q3"], 2)]:
        run_ = smoe("convert", *arguments, "--out", tmp_path / "v")
        assert run_.returncode == code and "Traceback" not in run_.stderr and run_.stderr.startswith("error: ")
    assert not (tmp_path / "v").exists()


def slow_source(folder: Path) -> Path:
    """A checkpoint that takes a second or more to convert."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 4096, "num_hidden_layers": 5}
    return FakeCheckpoint(config_of("mixtral", **sizes)).write(folder)


def start_convert(source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "smoe_cli", "convert", str(source), "--out", str(out), "--name", "m"]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_parts(out: Path, process: subprocess.Popen[str], at_least: int) -> None:
    """Until some outputs are written (the journal of errors has lines), or the process ends."""
    journal = out / "m.errors.part"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if journal.is_file() and journal.read_text().count("\n") >= at_least:
            return
        time.sleep(0.005)
    raise AssertionError(f"no parts were seen (exit {process.poll()})")


@pytest.mark.parametrize(("kind", "points"), [(signal.SIGKILL, (3, 30)), (signal.SIGINT, (10,))])
def test_c11_killed_or_interrupted_in_the_middle(tmp_path: Path, kind: signal.Signals, points: tuple[int, ...]) -> None:
    source, out = slow_source(tmp_path / "src"), tmp_path / "v"
    for at_least in points:
        process = start_convert(source, out)
        wait_for_parts(out, process, at_least)
        os.killpg(process.pid, kind)
        stderr = process.communicate(timeout=60)[1]
        if kind == signal.SIGINT:
            assert process.returncode == 130 and "continues from here" in stderr and "Traceback" not in stderr
    assert json.loads(smoe("list", "--vault-dir", out, "--json").stdout) == []
    done = smoe("convert", source, "--out", out, "--name", "m", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["resumed"] is True
    make(source, tmp_path / "w", "q4")
    for name in ("m.smoe", "m.scout.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "w" / name).read_bytes()


PEAK = """
import json, re, sys
from pathlib import Path
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
job = prepare(Options(Path(sys.argv[1]), Path(sys.argv[2]), name="m", quant=sys.argv[3]), Quiet())
largest = max(tensor.nbytes for tensor in job.checkpoint.tensors.values())
convert(job, Quiet())
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([peak, largest, job.checkpoint.source_bytes]))
"""


def large_source(folder: Path) -> Path:
    """Mixtral of 1.7 GB whose largest tensor has 0.2 GB; its weights repeat one random block."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 100_000, "num_hidden_layers": 12,
             "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
    config = config_of("mixtral", **sizes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    family = match_family(config)
    arch = resolve(family, config)
    shapes = {family.source_name(tensor.name): tensor.shape for tensor in trunk_tensors(arch)}
    shapes |= expert_shapes(family, arch)
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    block = to_dtype(np.random.default_rng(0).normal(0, 0.1, 1 << 22), "BF16")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, offset, len(block)):
            file.write(block[: offset - start])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q4", "f32"])
def test_peak_memory_is_the_largest_tensor_plus_a_gibibyte(tmp_path: Path, quant: str) -> None:
    source = large_source(tmp_path / "src")
    command = [sys.executable, "-c", PEAK, str(source), str(tmp_path / "v"), quant]
    run_ = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    peak, largest, total = json.loads(run_.stdout)
    assert total > largest + (1 << 30) > peak, f"peak {peak}, largest tensor {largest}, source {total}"
