"""Opening checkpoints: shards, index and config reconciled, or refused with the reason (cases C1-C5, C10, C19)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of, to_dtype

from smoe_cli.convert.checkpoint import INDEX, Checkpoint, open_checkpoint
from smoe_cli.convert.matrix import Matrix
from smoe_cli.convert.safetensors import FileReader, SourceTensor, read_header, to_float32
from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError, UsageError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return FakeCheckpoint(config_of("mixtral")).write(tmp_path / "ckpt", shards=4)


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_checkpoint_opens(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.family.name == "mixtral" and not checkpoint.notices
    assert len(checkpoint.files) == 4
    assert checkpoint.tensors["model.embed_tokens.weight"].shape == (96, 64)


# -- C1, C2, C3 -------------------------------------------------------------------------------------------------------


def test_c1_an_optional_layer_in_a_missing_shard_is_left_out(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"mtp.0.weight": "mtp.safetensors", "mtp.1.weight": "mtp.safetensors"}))
    checkpoint = open_checkpoint(sharded)
    assert any("mtp.safetensors" in notice and "2 optional" in notice for notice in checkpoint.notices)


def test_c1_layers_that_predict_ahead_are_optional_where_the_config_counts_them(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe", num_nextn_predict_layers=1))
    folder = fake.write(tmp_path, shards=2)
    edit_index(folder, lambda m: m.update({"model.layers.3.eh_proj.weight": "last.safetensors"}))
    assert any("last.safetensors" in notice for notice in open_checkpoint(folder).notices)


def test_c1_missing_files_are_one_error_that_lists_them(sharded: Path) -> None:
    for number in (2, 4):
        (sharded / f"model-0000{number}-of-00004.safetensors").unlink()
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(sharded)
    assert "00002" in caught.value.text and "00004" in caught.value.text and "00001" not in caught.value.text


def test_c2_index_and_shards_are_reconciled_both_ways(sharded: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        weight_map["model.layers.9.ghost.weight"] = next(iter(weight_map.values()))
        del weight_map["model.norm.weight"]

    edit_index(sharded, change)
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(sharded)
    assert "no shard holds model.layers.9.ghost.weight" in caught.value.text
    assert "does not name model.norm.weight" in caught.value.text


def test_c2_a_tensor_in_another_shard_than_stated(sharded: Path) -> None:
    name = "model.norm.weight"
    other = next(path.name for path in sharded.glob("*.safetensors") if name not in read_header(path)[0])
    edit_index(sharded, lambda weight_map: weight_map.update({name: other}))
    with pytest.raises(CorruptError, match=r"other shards.*model\.norm\.weight"):
        open_checkpoint(sharded)


def test_c3_strays_are_not_read(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"garbage")
    checkpoint = open_checkpoint(sharded)
    assert any("consolidated.safetensors" in notice for notice in checkpoint.notices)
    assert all(path.name != "consolidated.safetensors" for path in checkpoint.files)


def test_an_index_may_not_leave_the_folder(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"model.norm.weight": "../other.safetensors"}))
    with pytest.raises(CorruptError, match="outside the folder"):
        open_checkpoint(sharded)


# -- C4, C5: stored quantisations -------------------------------------------------------------------------------------


def fp8_checkpoint(folder: Path, rows: int = 200, cols: int = 150) -> tuple[Checkpoint, np.ndarray]:
    """A llama whose first up projection is fp8 with ragged 128x128 blocks; and what it must dequantise to."""
    sizes = {"hidden_size": cols, "intermediate_size": rows, "num_attention_heads": 3, "num_key_value_heads": 1}
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    fake = FakeCheckpoint(config_of("llama", quantization_config=quantisation, **sizes))
    rng = np.random.default_rng(5)
    name = "model.layers.0.mlp.up_proj.weight"
    codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1  # no NaN
    scales = rng.uniform(0.5, 2.0, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
    fake.tensors[name] = ("F8_E4M3", (rows, cols), codes.tobytes())
    fake.put(name + "_scale_inv", scales, "F32")
    expected = to_float32(codes.reshape(-1), "F8_E4M3").reshape(rows, cols).astype(np.float32)
    for row in range(rows):
        for col in range(cols):
            expected[row, col] *= scales[row // 128, col // 128]
    return open_checkpoint(fake.write(folder)), expected


def test_c4_fp8_is_dequantised_by_block_and_scales_stay_out_of_the_matcher(tmp_path: Path) -> None:
    checkpoint, expected = fp8_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not any("scale_inv" in key for key in checkpoint.tensors)
    matrix = Matrix(checkpoint.tensors[name], 200, 150, scale=checkpoint.scales[name])
    assert np.array_equal(matrix.read(checkpoint.reader, 0, 200), expected)
    assert np.array_equal(matrix.read(checkpoint.reader, 112, 144), expected[112:144])  # across a block's edge
    turned = Matrix(checkpoint.tensors[name], 150, 200, scale=checkpoint.scales[name], transposed=True)
    assert np.array_equal(turned.read(checkpoint.reader, 96, 150), expected.T[96:150])


def test_e4m3_codes() -> None:
    values = to_float32(np.arange(256, dtype=np.uint8), "F8_E4M3")
    assert values[0x38] == 1.0 and values[0x7E] == 448.0 and values[0x01] == 2.0**-9 and values[0xB8] == -1.0
    assert np.isnan(values[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(values, [0x7F, 0xFF])).all()


def test_c4_scales_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    quantisation = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    fake = FakeCheckpoint(config_of("llama", quantization_config=quantisation))
    name = "model.layers.0.mlp.up_proj.weight"
    fake.tensors[name] = ("F8_E4M3", (96, 64), bytes(96 * 64))
    with pytest.raises(UnsupportedError, match="without block scales"):
        open_checkpoint(fake.write(tmp_path / "a"))
    fake.put(name + "_scale_inv", np.ones((1, 1)), "F32")
    with pytest.raises(CorruptError, match=r"expected \[2, 1\]"):
        open_checkpoint(fake.write(tmp_path / "b"))


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "exl2", "quanto"])
def test_c5_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    fake = FakeCheckpoint(config_of("llama", quantization_config={"quant_method": method, "bits": 4}))
    fake.tensors["model.layers.0.mlp.up_proj.weight"] = ("U8", (96, 32), bytes(96 * 32))
    with pytest.raises(UnsupportedError, match=repr(method)):
        open_checkpoint(fake.write(tmp_path))


# -- C10: damaged shards ----------------------------------------------------------------------------------------------


def test_c10_cut_shards_are_named_with_both_sizes(sharded: Path) -> None:
    sizes = {}
    for number, keep in ((1, 0.5), (3, 0.99)):
        path = sharded / f"model-0000{number}-of-00004.safetensors"
        sizes[path.name] = path.stat().st_size
        path.write_bytes(path.read_bytes()[: int(sizes[path.name] * keep)])
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(sharded)
    for name, size in sizes.items():
        assert name in caught.value.text and f"{size} bytes expected" in caught.value.text


def header_of(entries: Any) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 100) + b"{}", header_of(b"{"), header_of(b"[1]"),
        header_of(b"\xff\xfe"), header_of({"a": 1}), header_of({"a": {"dtype": "F32", "shape": [2]}}),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}) + bytes(8),
        header_of({"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]}}),
        header_of({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}) + bytes(8),
        header_of({"a": {"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
    ],
)  # fmt: skip
def test_damaged_headers_are_errors_that_name_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(SmoeError, match=r"bad\.safetensors"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10))
    with pytest.raises(CorruptError, match="10 bytes there, 16 bytes expected"):
        FileReader().read(path, 0, 16)


# -- C19: not a checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ([], "is empty"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["config.json", "pytorch_model.bin"], r"\.bin"),
        (["README.md"], "not a checkpoint"),
        (["config.json"], "looked for"),
    ],
)
def test_c19_one_line_with_what_was_looked_for(tmp_path: Path, files: list[str], what: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=what) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.text
    assert "model.safetensors" in caught.value.text


def test_c19_other_things_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        open_checkpoint(tmp_path / "missing")
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UsageError, match="neither a folder nor a GGUF"):
        open_checkpoint(tmp_path / "a.txt")


def test_config_that_is_not_json(tmp_path: Path) -> None:
    FakeCheckpoint(config_of("llama")).write(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SmoeError, match=r"config\.json"):
        open_checkpoint(tmp_path)


# -- matrices inside tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_reads_one_expert_of_a_fused_tensor(tmp_path: Path, dtype: str, turned: bool) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, 40, 24)).astype(np.float32)
    stored = values.transpose(0, 2, 1) if turned else values
    path = tmp_path / "t"
    path.write_bytes(b"x" * 5 + to_dtype(stored, dtype))
    tensor = SourceTensor("t", dtype, stored.shape, path, 5, stored.size * (4 if dtype == "F32" else 2))
    exact = to_float32(np.frombuffer(to_dtype(values, dtype), np.uint8), dtype).reshape(values.shape)
    matrix = Matrix(tensor, 16, 24, expert=2, first=20, transposed=turned)
    assert np.array_equal(matrix.read(FileReader(), 3, 11), exact[2, 23:31])
    assert matrix.nbytes == 16 * 24 * (4 if dtype == "F32" else 2)


# -- fingerprint ------------------------------------------------------------------------------------------------------


def test_fingerprint_knows_content_and_stamp_knows_every_edit(sharded: Path) -> None:
    before = open_checkpoint(sharded)
    fingerprint, stamp = before.fingerprint(), before.stamp()
    assert open_checkpoint(sharded).fingerprint() == fingerprint
    path = sharded / "model-00002-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    after = open_checkpoint(sharded)
    assert after.fingerprint() != fingerprint and after.stamp() != stamp
