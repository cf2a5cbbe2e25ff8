"""Packed weights as sources: GPTQ, AWQ, compressed-tensors, ModelOpt, MLX. Packed here bit by bit from numbers that are
known, or by the ecosystem's own packer; read back exactly, and kept exactly where the engine has affine blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of, to_dtype

from smoe_cli import _core
from smoe_cli.convert.checkpoint import Checkpoint, open_checkpoint
from smoe_cli.convert.encodings import choose_roles
from smoe_cli.convert.packed.affine import AffineTensor
from smoe_cli.convert.packed.floats import FP4
from smoe_cli.convert.plan import make_plan
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError

Array = np.ndarray[Any, Any]
LAYER = "model.layers.0.mlp.up_proj"
OUT, IN = 96, 128
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def fake_of(settings: dict[str, Any]) -> FakeCheckpoint:
    return FakeCheckpoint(config_of("llama", hidden_size=IN, quantization_config=settings))


def words(codes: Array, bits: int, columns: tuple[int, ...] | None = None) -> Array:
    """Codes along the last axis into words, one after the other."""
    count = 32 // bits
    places = columns or tuple(range(count))
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // count), np.uint32)
    for word in range(found.shape[-1]):
        for nibble, column in enumerate(places):
            found[..., word] |= codes[..., word * count + column].astype(np.uint32) << np.uint32(nibble * bits)
    return found


def put_words(fake: FakeCheckpoint, name: str, values: Array) -> None:
    fake.tensors[name] = ("I32", values.shape, np.ascontiguousarray(values, np.uint32).tobytes())


def numbers(bits: int, group: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Codes [out, in], zeros and scales (float16) [out, groups]."""
    rng = np.random.default_rng(seed)
    groups = IN // group
    codes = rng.integers(0, 1 << bits, (OUT, IN))
    zeros = rng.integers(1, 1 << bits, (OUT, groups))
    scales = rng.uniform(0.001, 0.1, (OUT, groups)).astype(np.float16).astype(np.float32)
    return codes, zeros, scales


def values_of(codes: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    found = np.zeros(codes.shape, np.float32)
    for column, group in enumerate(groups):
        found[:, column] = (codes[:, column] - zeros[:, group]).astype(np.float32) * scales[:, group]
    return found


def gptq(bits: int, group: int, order: Array | None = None, version: str = "gptq") -> tuple[FakeCheckpoint, Array]:
    codes, zeros, scales = numbers(bits, group)
    places = np.arange(IN) // group if order is None else order
    fake = fake_of({"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version})
    del fake.tensors[f"{LAYER}.weight"]
    put_words(fake, f"{LAYER}.qweight", words(codes, bits).T)
    put_words(fake, f"{LAYER}.qzeros", words((zeros - (version == "gptq")).T, bits))
    fake.tensors[f"{LAYER}.scales"] = ("F16", scales.T.shape, to_dtype(scales.T, "F16"))
    fake.tensors[f"{LAYER}.g_idx"] = ("I32", (IN,), places.astype(np.int32).tobytes())
    return fake, values_of(codes, zeros, scales, places)


def awq() -> tuple[FakeCheckpoint, Array]:
    codes, zeros, scales = numbers(4, 64)
    fake = fake_of({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True})
    del fake.tensors[f"{LAYER}.weight"]
    put_words(fake, f"{LAYER}.qweight", words(codes.T, 4, AWQ_COLUMNS))
    put_words(fake, f"{LAYER}.qzeros", words(zeros.T, 4, AWQ_COLUMNS))
    fake.tensors[f"{LAYER}.scales"] = ("F16", scales.T.shape, to_dtype(scales.T, "F16"))
    return fake, values_of(codes, zeros, scales, np.arange(IN) // 64)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def pack_quantized(symmetric: bool) -> tuple[FakeCheckpoint, Array]:
    """Packed by the library compressed-tensors itself."""
    torch = pytest.importorskip("torch", reason="compressed-tensors packs with torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="the packer")
    codes, zeros, scales = numbers(4, 32)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    fake = fake_of(compressed("pack-quantized", num_bits=4, type="int", symmetric=symmetric, group_size=32))
    del fake.tensors[f"{LAYER}.weight"]
    packed = helpers.pack_to_int32(torch.tensor(codes - 8, dtype=torch.int8), 4).numpy()
    put_words(fake, f"{LAYER}.weight_packed", packed.view(np.uint32))
    fake.tensors[f"{LAYER}.weight_scale"] = ("F16", scales.shape, to_dtype(scales, "F16"))
    fake.tensors[f"{LAYER}.weight_shape"] = ("I64", (2,), np.array([OUT, IN], np.int64).tobytes())
    if not symmetric:
        below = torch.tensor(zeros - 8, dtype=torch.int8)
        put_words(
            fake, f"{LAYER}.weight_zero_point", helpers.pack_to_int32(below, 4, packed_dim=0).numpy().view(np.uint32)
        )
    return fake, values_of(codes, zeros, scales, np.arange(IN) // 32)


def nvfp4(modelopt: bool) -> tuple[FakeCheckpoint, Array]:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (OUT, IN), np.uint8)
    scales = rng.integers(0x20, 0x60, (OUT, IN // 16), np.uint8)  # e4m3 of ordinary size
    whole = np.float32(0.37 if modelopt else 1 / 0.37)
    settings = {"quant_algo": "NVFP4"} if modelopt else compressed("nvfp4-pack-quantized", num_bits=4, type="float")
    names = ("weight", "weight_scale", "weight_scale_2") if modelopt else (
        "weight_packed", "weight_scale", "weight_global_scale")  # fmt: skip
    fake = fake_of(settings)
    del fake.tensors[f"{LAYER}.weight"]
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    fake.tensors[f"{LAYER}.{names[0]}"] = ("U8", packed.shape, packed.tobytes())
    fake.tensors[f"{LAYER}.{names[1]}"] = ("F8_E4M3", scales.shape, scales.tobytes())
    fake.tensors[f"{LAYER}.{names[2]}"] = ("F32", (1,), whole.tobytes())
    if modelopt:
        fake.tensors[f"{LAYER}.input_scale"] = ("F32", (), np.float32(1).tobytes())
    e4m3 = (1 + (scales & 7) / 8) * 2.0 ** ((scales >> 3).astype(int) - 7)
    spread = np.repeat(e4m3 * float(whole) if modelopt else e4m3 / float(whole), 16, axis=1)
    return fake, (FP4[codes] * spread).astype(np.float32)


def mxfp4() -> tuple[FakeCheckpoint, Array]:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (OUT, IN), np.uint8)
    scales = rng.integers(118, 134, (OUT, IN // 32), np.uint8)
    fake = fake_of(compressed("mxfp4-pack-quantized", num_bits=4, type="float"))
    del fake.tensors[f"{LAYER}.weight"]
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    fake.tensors[f"{LAYER}.weight_packed"] = ("U8", packed.shape, packed.tobytes())
    fake.tensors[f"{LAYER}.weight_scale"] = ("U8", scales.shape, scales.tobytes())
    return fake, (FP4[codes] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)).astype(np.float32)


def float8(rows: bool) -> tuple[FakeCheckpoint, Array]:
    rng = np.random.default_rng(5)
    codes = rng.integers(8, 0x70, (OUT, IN), np.uint8)
    scale = rng.uniform(0.5, 2, (OUT, 1) if rows else (1,)).astype(np.float32)
    fake = fake_of(compressed("float-quantized", num_bits=8, type="float"))
    fake.tensors[f"{LAYER}.weight"] = ("F8_E4M3", codes.shape, codes.tobytes())
    fake.tensors[f"{LAYER}.weight_scale"] = ("F32", scale.shape, scale.tobytes())
    e4m3 = (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3).astype(int) - 7)
    return fake, (e4m3.astype(np.float32) * scale).astype(np.float32)


SHUFFLED = np.random.default_rng(9).permutation(np.arange(IN) // 64)
CASES: dict[str, Callable[[], tuple[FakeCheckpoint, Array]]] = {
    "gptq-4": lambda: gptq(4, 128),
    "gptq-8": lambda: gptq(8, 32),
    "gptq-2": lambda: gptq(2, 64),
    "gptq-v2": lambda: gptq(4, 64, version="gptq_v2"),
    "gptq-act-order": lambda: gptq(4, 64, SHUFFLED),
    "awq": awq,
    "int4-symmetric": lambda: pack_quantized(True),
    "int4-zero-points": lambda: pack_quantized(False),
    "nvfp4-modelopt": lambda: nvfp4(True),
    "nvfp4-compressed": lambda: nvfp4(False),
    "mxfp4": mxfp4,
    "float8-tensor": lambda: float8(False),
    "float8-rows": lambda: float8(True),
}
KEPT = {
    "gptq-4": "mlx4_g128_f32", "gptq-8": "mlx8_g32_f32", "gptq-2": "mlx2_g64_f32", "gptq-v2": "mlx4_g64_f32",
    "gptq-act-order": "q8_0", "awq": "mlx4_g64_f32", "int4-symmetric": "mlx4_g32_f16", "int4-zero-points":
    "mlx4_g32_f32", "nvfp4-modelopt": "q8_0", "nvfp4-compressed": "q8_0", "mxfp4": "mxfp4", "float8-tensor": "f32",
    "float8-rows": "f32",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_format(tmp_path: Path, name: str) -> None:
    fake, want = CASES[name]()
    checkpoint = open_checkpoint(fake.write(tmp_path))
    plan = make_plan(checkpoint, "source", choose_roles("source"))
    out = next(tensor for tensor in plan.tensors if tensor.name == "layers.0.ffn.up.weight")
    assert np.allclose(out.source.read(checkpoint.reader, 0, OUT), want, rtol=1e-6, atol=0)
    assert np.allclose(out.source.read(checkpoint.reader, 16, 50), want[16:50], rtol=1e-6, atol=0)
    assert out.encoding == KEPT[name]
    if out.source.native:
        raw = out.source.read_native(checkpoint.reader, 16, 80)
        assert np.array_equal(_core.decode(out.encoding, raw.tobytes(), 64, IN).reshape(64, IN), want[16:80])


@pytest.mark.parametrize("name", ["gptq-4", "gptq-act-order", "awq", "nvfp4-modelopt"])
def test_whole_conversions(tmp_path: Path, name: str) -> None:
    fake, _ = CASES[name]()
    job = prepare(Options(fake.write(tmp_path / "src"), tmp_path, name="m"), Quiet())
    result = convert(job, Quiet())
    assert job.options.quant == "source"
    exact = KEPT[name].startswith("mlx")
    assert [fallback["name"] for fallback in result["fallbacks"]] == ([] if exact else ["layers.0.ffn.up.weight"])
    assert np.asarray(_core.Engine(str(job.vault)).logits([1, 2, 3])).shape[0] == 3


# -- refusals ---------------------------------------------------------------------------------------------------------


def opened(fake: FakeCheckpoint, folder: Path) -> Checkpoint:
    return open_checkpoint(fake.write(folder))


def test_c5_an_unknown_method_is_refused_by_name(tmp_path: Path) -> None:
    for settings in ({"quant_method": "bitsandbytes"}, {"quant_method": "exl2"}, {"bits": 4}):
        with pytest.raises(UnsupportedError, match=settings.get("quant_method", "unnamed")):
            opened(fake_of(settings), tmp_path)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "group_size 100"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "gemv"),
        ({"quant_algo": "W4A8"}, "W4A8"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": 1.5}, "0 groups"),
        ({"quant_method": "compressed-tensors", "format": ["x"]}, "x"),
    ],
)
def test_settings_that_are_not_read(tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        opened(fake_of(settings), tmp_path)


@pytest.mark.parametrize("part", ["qzeros", "scales", "qweight"])
def test_a_part_that_is_missing_or_of_another_shape(tmp_path: Path, part: str) -> None:
    fake, _ = gptq(4, 64)
    kept = fake.tensors[f"{LAYER}.{part}"]
    fake.tensors[f"{LAYER}.{part}"] = (kept[0], (1, *kept[1]), kept[2])
    with pytest.raises(SmoeError, match=LAYER):
        opened(fake, tmp_path)
    del fake.tensors[f"{LAYER}.{part}"]
    with pytest.raises(CorruptError):
        make_plan(opened(fake, tmp_path), "source", choose_roles("source"))


def test_groups_that_no_block_has_are_read_all_the_same(tmp_path: Path) -> None:
    fake, want = gptq(4, 16)
    checkpoint = opened(fake, tmp_path)
    tensor = checkpoint.tensors[f"{LAYER}.weight"]
    assert isinstance(tensor, AffineTensor) and not tensor.native
    assert np.allclose(tensor.rows(checkpoint.reader, 0, OUT), want, rtol=1e-6, atol=0)


# -- MLX --------------------------------------------------------------------------------------------------------------


def mlx_folder(fake: FakeCheckpoint, bits: int, group: int, scales: str, **own: Any) -> dict[str, bytes]:
    """Turns every matrix of a checkpoint into MLX's three arrays, experts stacked; the blocks by their new names."""
    fake.config["quantization"] = fake.config["quantization_config"] = {"group_size": group, "bits": bits, **own}
    size, dtype = (4, "F32") if scales == "f32" else (2, scales.upper())
    stacks: dict[str, list[Array]] = {}
    for name in [name for name in fake.tensors if len(fake.tensors[name][1]) == 2 and "gate.weight" not in name]:
        stem = name.removesuffix(".weight")
        values = fake.values(name)
        del fake.tensors[name]
        parts = stem.split(".experts.")
        stacked = f"{parts[0]}.switch_mlp.{parts[1].split('.')[1]}" if len(parts) > 1 else stem
        stacks.setdefault(stacked, []).append(values)
    found = {}
    for stem, matrices in stacks.items():
        rows, cols = matrices[0].shape
        lead = (len(matrices), rows) if ".switch_mlp." in stem else (rows,)
        blocks = [np.frombuffer(_core.encode(f"mlx{bits}_g{group}_{scales}", each), np.uint8) for each in matrices]
        found[stem] = b"".join(block.tobytes() for block in blocks)
        split = np.concatenate(blocks).reshape(-1, 2 * size + group * bits // 8)
        for key, part, kind, width in (
            ("scales", split[:, :size], dtype, cols // group),
            ("biases", split[:, size : 2 * size], dtype, cols // group),
            ("weight", split[:, 2 * size :], "U32", cols * bits // 32),
        ):
            fake.tensors[f"{stem}.{key}"] = (kind, (*lead, width), np.ascontiguousarray(part).tobytes())
    return found


@pytest.mark.parametrize(
    ("bits", "group", "scales"), [(4, 64, "bf16"), (3, 32, "f16"), (6, 64, "f32"), (8, 32, "bf16")]
)
def test_mlx_folders_keep_their_blocks(tmp_path: Path, bits: int, group: int, scales: str) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe", moe_intermediate_size=64), dtype="F32")
    blocks = mlx_folder(fake, bits, group, scales)
    checkpoint = open_checkpoint(fake.write(tmp_path))
    plan = make_plan(checkpoint, "source", choose_roles("source"))
    name = f"mlx{bits}_g{group}_{scales}"
    assert checkpoint.kind == "mlx" and {e for record in plan.experts for e in record.encodings} == {name}
    for part, key in enumerate(("gate_proj", "up_proj", "down_proj")):
        records = [record for record in plan.experts if record.layer == 1]
        raw = b"".join(r.parts[part].read_native(checkpoint.reader, 0, r.parts[part].rows).tobytes() for r in records)
        assert raw == blocks[f"model.layers.1.mlp.switch_mlp.{key}"]
    matrix = plan.experts[0].parts[0]
    kept = np.frombuffer(blocks["model.layers.0.mlp.switch_mlp.gate_proj"], np.uint8)
    want = _core.decode(name, kept.tobytes(), 4 * matrix.rows, matrix.cols).reshape(4, matrix.rows, matrix.cols)[0]
    assert np.array_equal(matrix.read(checkpoint.reader, 0, matrix.rows), want)


def test_mlx_layers_with_settings_of_their_own(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama", intermediate_size=128), dtype="F32")
    other = "model.layers.0.mlp.up_proj"
    values = fake.tensors.pop(f"{other}.weight")
    kept = FakeCheckpoint(config_of("llama", intermediate_size=128), dtype="F32")
    for name in [name for name in kept.tensors if name != f"{other}.weight"]:
        del kept.tensors[name]
    assert kept.tensors[f"{other}.weight"] == values
    mlx_folder(kept, 8, 32, "bf16")
    mlx_folder(fake, 4, 64, "bf16", **{other: {"group_size": 32, "bits": 8}})
    fake.tensors |= kept.tensors
    found = open_checkpoint(fake.write(tmp_path)).tensors
    natives = {name: tensor.native for name, tensor in found.items() if isinstance(tensor, AffineTensor)}
    assert natives.pop(f"{other}.weight") == "mlx8_g32_bf16"
    assert set(natives.values()) == {"mlx4_g64_bf16"}


@pytest.mark.parametrize("settings", [{"bits": 7}, {"group_size": 100}, {"mode": "nvfp4"}])
def test_mlx_settings_that_are_not_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    fake = FakeCheckpoint(config_of("llama"), dtype="F32")
    mlx_folder(fake, 4, 32, "bf16")
    fake.config["quantization"] |= settings
    fake.config["quantization_config"] = fake.config["quantization"]
    with pytest.raises(UnsupportedError, match=str(next(iter(settings.values())))):
        opened(fake, tmp_path)
