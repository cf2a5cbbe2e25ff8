"""One small mixture in every format that convert reads, for tests that hold over all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import FakeCheckpoint, config_of, to_dtype
from ggufs import fake_of, write_gguf
from test_packed import AWQ_COLUMNS, compressed, mlx_folder, put_words, words
from test_seismic import write_vault

Array = np.ndarray[Any, Any]
Pack = Callable[[FakeCheckpoint, str, Array], None]
GROUP, SIZES = 32, {"hidden_size": 128, "moe_intermediate_size": 96, "intermediate_size": 96, "head_dim": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
INT4 = compressed("pack-quantized", num_bits=4, type="int", symmetric=False, group_size=GROUP)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float")
MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float")
ROWS8 = compressed("float-quantized", num_bits=8, type="float")
BLOCKS8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def base(**more: Any) -> FakeCheckpoint:
    return FakeCheckpoint(config_of("qwen3_moe", **{**SIZES, **more}))


def affine(values: Array) -> tuple[Array, Array, Array]:
    """Codes [out, in], zeros and scales [out, groups], of 4 bits; the zero is a code of its own."""
    grouped = values.reshape(len(values), -1, GROUP)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    scales = np.maximum((high - low) / 15, 1e-6).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 15).astype(np.int64)
    codes = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, 15).astype(np.int64)
    return codes.reshape(values.shape), zeros, scales


def put_scales(fake: FakeCheckpoint, name: str, scales: Array) -> None:
    fake.tensors[name] = ("F16", scales.shape, to_dtype(scales, "F16"))


def pack_gptq(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    codes, zeros, scales = affine(values)
    put_words(fake, f"{stem}.qweight", words(codes, 4).T)
    put_words(fake, f"{stem}.qzeros", words(zeros.T - 1, 4))
    put_scales(fake, f"{stem}.scales", scales.T)
    places = (np.arange(values.shape[1]) // GROUP).astype(np.int32)
    fake.tensors[f"{stem}.g_idx"] = ("I32", places.shape, places.tobytes())


def pack_awq(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    codes, zeros, scales = affine(values)
    put_words(fake, f"{stem}.qweight", words(codes.T, 4, AWQ_COLUMNS))
    put_words(fake, f"{stem}.qzeros", words(zeros.T, 4, AWQ_COLUMNS))
    put_scales(fake, f"{stem}.scales", scales.T)


def pack_int4(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    codes, zeros, scales = affine(values)
    put_words(fake, f"{stem}.weight_packed", words(codes, 4))
    put_words(fake, f"{stem}.weight_zero_point", words(zeros.T, 4).T)
    put_scales(fake, f"{stem}.weight_scale", scales)


def e2m1(values: Array, scales: Array) -> Array:
    """The nearest four-bit float of each value over its group's scale, two to a byte."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    grouped = values.reshape(*scales.shape, -1) / scales[..., None]
    codes = np.abs(np.abs(grouped)[..., None] - levels).argmin(axis=-1).astype(np.uint8)
    flat = (codes | np.where(grouped < 0, 8, 0).astype(np.uint8)).reshape(len(values), -1)
    return (flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8)


def pack_nvfp4(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    exponents = np.ceil(np.log2(np.abs(values.reshape(len(values), -1, 16)).max(axis=2) / 6 + 1e-9)).clip(-6, 8)
    packed = e2m1(values, np.exp2(exponents).astype(np.float32))
    scales = ((exponents.astype(np.int64) + 7) << 3).astype(np.uint8)  # powers of two in float8 e4m3
    fake.tensors[f"{stem}.weight_packed"] = ("U8", packed.shape, packed.tobytes())
    fake.tensors[f"{stem}.weight_scale"] = ("F8_E4M3", scales.shape, scales.tobytes())
    fake.tensors[f"{stem}.weight_global_scale"] = ("F32", (1,), np.float32(1).tobytes())


def pack_mxfp4(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    exponents = np.ceil(np.log2(np.abs(values.reshape(len(values), -1, 32)).max(axis=2) / 6 + 1e-9))
    packed = e2m1(values, np.exp2(exponents).astype(np.float32))
    scales = (exponents + 127).astype(np.uint8)
    fake.tensors[f"{stem}.weight_packed"] = ("U8", packed.shape, packed.tobytes())
    fake.tensors[f"{stem}.weight_scale"] = ("U8", scales.shape, scales.tobytes())


def e4m3(values: Array) -> Array:
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    known = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    nearest = np.searchsorted((known[1:] + known[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return nearest | np.where(values < 0, 0x80, 0).astype(np.uint8)


def pack_rows8(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    scales = (np.abs(values).max(axis=1, keepdims=True) / 448).astype(np.float32)
    fake.tensors[f"{stem}.weight"] = ("F8_E4M3", values.shape, e4m3(values / scales).tobytes())
    fake.tensors[f"{stem}.weight_scale"] = ("F32", scales.shape, scales.tobytes())


def pack_blocks8(fake: FakeCheckpoint, stem: str, values: Array) -> None:
    scales = np.zeros([-(-size // 128) for size in values.shape], np.float32)
    codes = np.zeros(values.shape, np.uint8)
    for row, col in np.ndindex(*scales.shape):
        block = np.s_[128 * row : 128 * (row + 1), 128 * col : 128 * (col + 1)]
        scales[row, col] = np.abs(values[block]).max() / 448
        codes[block] = e4m3(values[block] / scales[row, col])
    fake.tensors[f"{stem}.weight"] = ("F8_E4M3", values.shape, codes.tobytes())
    fake.tensors[f"{stem}.weight_scale_inv"] = ("F32", scales.shape, scales.tobytes())


PACKED: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, pack_gptq), "awq": (AWQ, pack_awq), "int4": (INT4, pack_int4), "nvfp4": (NVFP4, pack_nvfp4),
    "mxfp4": (MXFP4, pack_mxfp4), "fp8-rows": (ROWS8, pack_rows8), "fp8-blocks": (BLOCKS8, pack_blocks8),
}  # fmt: skip


def linears(fake: FakeCheckpoint) -> Iterator[str]:
    """Names of the matrices that such checkpoints pack: not the embedding, the head, or routers."""
    for name, (_, shape, _) in list(fake.tensors.items()):
        if len(shape) == 2 and "layers." in name and not name.endswith("mlp.gate.weight"):
            yield name


def uneven(values: Array) -> Array:
    """The first half of the columns thirty times as large."""
    return np.concatenate([values[:, : values.shape[1] // 2] * 30, values[:, values.shape[1] // 2 :]], axis=1)


def packed_fake(form: str, change: Callable[[Array], Array] = np.asarray, **more: Any) -> FakeCheckpoint:
    settings, pack = PACKED[form]
    fake = base(quantization_config=settings, **more)
    for name in linears(fake):
        values = change(fake.values(name))
        del fake.tensors[name]
        pack(fake, name.removesuffix(".weight"), values)
    return fake


def folder_fake(form: str, **more: Any) -> FakeCheckpoint:
    """A checkpoint that is a folder of safetensors, before it is written."""
    if form in PACKED:
        return packed_fake(form, **more)
    fake = base(**more)
    if form.startswith("fused"):
        for layer in range(3):
            fake.fuse(layer, turned=form == "fused-turned")
    if form == "mlx":
        mlx_folder(fake, 4, 32, "bf16")
    return fake


FOLDERS = ("separate", "fused", "fused-turned", "mlx", *PACKED)
FILES = ("gguf-q8_0", "gguf-q4_1", "gguf-split", "s-moe")
FORMATS = (*FOLDERS, *FILES)


def write(form: str, folder: Path, **more: Any) -> Path:
    """What convert is given."""
    if form in FOLDERS:
        return folder_fake(form, **more).write(folder / "src", shards=2)
    if form == "s-moe":
        folder.mkdir(parents=True, exist_ok=True)
        write_vault(folder / "src", 4)
        return folder / "src" / "old.smoe"
    folder.mkdir(parents=True, exist_ok=True)
    fake = fake_of("qwen3_moe", **{**SIZES, **more})
    kind = "Q4_1" if form == "gguf-q4_1" else "Q8_0"
    return write_gguf(fake, "qwen3_moe", folder / "m.gguf", kind, split=8 if form == "gguf-split" else 0)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    change(config)
    path.write_text(json.dumps(config))
