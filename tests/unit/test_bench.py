"""The scripts that measure: the arithmetic of their reports, and that both programs are given the same weights."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_report
import bench_routing
import bench_vs_llama
import make_bench_model

from smoe_cli import _core
from smoe_cli.bench import machine as bench_machine
from smoe_cli.bench.model import describe_vault

ROOT = Path(__file__).parents[2]
SMALL = {"HIDDEN": 256, "VOCAB": 320, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "EXPERTS": 6, "TOP_K": 2, "WIDTH": 96}


def test_entropy_of_uniform_and_of_collapsed_routing() -> None:
    uniform = np.arange(128).reshape(16, 1, 8)
    assert bench_routing.entropy_bits(uniform, 128) == pytest.approx(7.0)
    assert bench_routing.entropy_bits(np.zeros((16, 2, 8), int), 128) == pytest.approx(0.0)


def test_repeated_share_counts_experts_of_the_token_before() -> None:
    trace = np.array([[[0, 1]], [[1, 2]], [[3, 4]], [[4, 3]]])
    assert bench_routing.repeated_share(trace) == pytest.approx((1 + 0 + 2) / 6)


def test_lru_misses_of_a_cycle() -> None:
    trace = np.array([[[i % 3]] for i in range(12)])
    cycle = [(0, 0), (0, 1), (0, 2)]
    assert bench_routing.lru_misses(trace, slots=2, measured=6) == 2 * cycle  # three in turn never hit in two slots
    assert bench_routing.lru_misses(trace, slots=3, measured=6) == []
    assert bench_routing.lru_misses(trace, slots=3, measured=12) == cycle


def test_arms_take_turns_at_going_first() -> None:
    assert ["".join(bench_vs_llama.rotated(list("abc"), i)) for i in range(4)] == ["abc", "bca", "cab", "abc"]


def test_report_compares_medians_with_the_best_peer() -> None:
    part = {
        "decode_tok_s": {"smoe": [6.0, 5.0, 9.0], "llama.cpp": [3.0], "llama.cpp no-repack": [4.0]},
        "first_token_cold_ms": {"smoe": [2000.0], "llama.cpp": [1000.0]},
    }
    lines = bench_report.part_table(part)
    assert lines[2] == "| decode, tok/s | 6 (5-9) | 3 | 4 | **1.50** |"
    assert lines[3] == "| first token, cold process, s | 2 | 1 |  | **2.00** |"


def test_disk_reads_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8 << 20))
    rate = bench_machine.disk_bytes_per_second(file, 1 << 20, reads=8)
    assert rate >= 0  # 0 says: no direct reads here


@pytest.fixture(scope="module")
def bench_vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The measured geometry, small, through the real scripts and the real convert."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(make_bench_model, name, value)
        make_bench_model.write_checkpoint(folder / "ckpt", layers=2, seed=3)
    argv = ["convert", str(folder / "ckpt"), "--out", str(folder), "--name", "b"]
    argv += ["--quant", "q4_0", "--role", "head=q6_k"]
    subprocess.run([sys.executable, "-m", "smoe_cli", *argv], check=True, capture_output=True, cwd=ROOT)
    return folder / "b.smoe"


def test_embedding_is_scaled_and_norms_are_one(bench_vault: Path) -> None:
    source = source_tensors(bench_vault.parent / "ckpt")
    assert float(source["model.embed_tokens.weight"].std()) == pytest.approx(0.02 * 64, rel=0.05)
    assert float(source["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert np.all(source["model.layers.1.input_layernorm.weight"] == 1)


def test_described_bytes_are_those_of_one_token(bench_vault: Path) -> None:
    model = describe_vault(bench_vault)
    matrices = 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256) // 32 * 18  # attention of two layers, q4_0
    head = 320 * 256 // 256 * 210
    plain = 2 * (6 * 256 + 2 * 256 + 2 * 64) * 2 + 256 * 2  # routers and norms, bf16
    assert model["active_expert_bytes"] == 2 * 2 * model["record_bytes"][0]
    assert model["active_bytes"] == model["active_expert_bytes"] + matrices + head + plain
    # Under the head and the first attention nobody knows which experts will be asked for.
    assert model["alone_bytes"] == head + matrices // 2 + (plain - 256 * 2) // 2 + 256 * 2


def test_the_serial_floor_adds_what_cannot_overlap() -> None:
    result = {
        "routing": {
            "entropy_bits": 6.0, "uniform_bits": 7.0, "repeated_share": 0.1,
            "1/2": {"lru_missed_bytes_per_token": 40e6, "slots": 100},
        },
        "model": {"active_bytes": 500e6, "alone_bytes": 250e6},
        "memory_read_bytes_s": 50e9,
    }  # fmt: skip
    part = {"read_bytes_s": {"disk": [4e9]}, "decode_tok_s": {"smoe": [50.0]}}
    said = "".join(bench_report.floor_lines(result, "cgroup 1/2", part))
    assert "so the floor is 100.0 tok/s; smoe makes 0.50 of it" in said  # 10 ms of disk, 10 of memory
    assert "250 MB" in said and "the floor is 66.7 tok/s, and smoe makes 0.75 of it" in said  # 5 + 10


def test_gguf_holds_the_same_weights(bench_vault: Path) -> None:
    gguf = pytest.importorskip("gguf")
    export = importlib.import_module("bench_model_to_gguf")
    out = bench_vault.parent / "b.gguf"
    export.export(export.Vault(bench_vault), out)
    reader = gguf.GGUFReader(out)
    tensors = {t.name: t for t in reader.tensors}
    assert len(tensors) == 3 + 2 * 12
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    source = source_tensors(bench_vault.parent / "ckpt")
    for name, ours in {
        "blk.1.ffn_down_exps.weight": [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(6)],
        "blk.0.attn_q.weight": ["model.layers.0.self_attn.q_proj.weight"],
        "output.weight": ["lm_head.weight"],
    }.items():
        tensor = tensors[name]
        encoding = tensor.tensor_type.name.lower()
        expected = b"".join(_core.encode(encoding, source[part]) for part in ours)
        assert tensor.data.tobytes() == expected, name
    router = tensors["blk.0.ffn_gate_inp.weight"]
    assert np.array_equal(router.data, source["model.layers.0.mlp.gate.weight"])


def source_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The checkpoint as float32, read without our code."""
    result = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + o for o in entry["data_offsets"])
                bits = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
                result[name] = bits.view(np.float32).reshape(entry["shape"])
    return result


def test_rope_theta_is_found_and_scaling_refused() -> None:
    export = importlib.import_module("bench_model_to_gguf")
    plain = [1e6 ** (-i / 64) for i in range(64)]
    assert export.rope_theta(plain) == 1e6
    with pytest.raises(Exception, match="scaled"):
        export.rope_theta([f / (1 + i / 64) for i, f in enumerate(plain)])
