"""compressed-tensors. pack-quantized: NAME.weight_packed I32 [out, in / n], NAME.weight_scale [out, groups] and, where
it is not symmetric, NAME.weight_zero_point I32 [out / n, groups]; codes are unsigned, half of their range above zero.
nvfp4-pack-quantized and mxfp4-pack-quantized: see floats.py and mxfp4.py. float-quantized: 8-bit floats with a scale
for each row or tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smoe_cli.convert.packed.affine import (
    AffineTensor,
    Codes,
    Floats,
    expect,
    read_some,
    size_of,
    take,
    unpack_words,
    whole_number,
)
from smoe_cli.convert.packed.floats import join_float8, join_nvfp4
from smoe_cli.convert.packed.mxfp4 import Mxfp4Tensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor, to_float32
from smoe_cli.errors import CorruptError, UnsupportedError


@dataclass(frozen=True)
class PackTensor(AffineTensor):
    packed: SourceTensor | None = None
    scale: SourceTensor | None = None
    zero: SourceTensor | None = None

    def parts(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        assert self.packed is not None and self.scale is not None
        words = read_some(reader, self.packed, first, count).view("<u4")
        codes = unpack_words(words, self.bits)[:, : self.shape[-1]]
        raw = read_some(reader, self.scale, first, count).reshape(-1)
        scales = to_float32(raw, self.scale.dtype).reshape(count, -1)
        zeros: Floats = np.full_like(scales, 1 << (self.bits - 1))
        if self.zero is not None:
            each = 32 // self.bits  # words down the output
            begin, end = first // each, -(-(first + count) // each)
            stored = read_some(reader, self.zero, begin, end - begin).view("<u4")
            every = unpack_words(np.ascontiguousarray(stored.T), self.bits).T
            zeros = every[first - begin * each :][:count].astype(np.float32)
        return codes, scales, -(scales * zeros)


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    groups = settings.get("config_groups")
    every = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in every if isinstance(group, dict)]
    stated = [found for found in weights if isinstance(found, dict)]
    form = str(settings.get("format"))
    joins = {"pack-quantized": _pack, "nvfp4-pack-quantized": _nvfp4, "mxfp4-pack-quantized": _mxfp4}
    joins |= {"float-quantized": _float8, "naive-quantized": _float8}
    if form not in joins or len(stated) != 1:
        raise UnsupportedError(
            f"config.json: compressed-tensors of format {form!r} with {len(stated)} groups is not supported",
            f"formats: {', '.join(joins)}, with one group of settings",
        )
    joins[form](tensors, stated[0])


def _pack(tensors: dict[str, SourceTensor], weights: dict[str, Any]) -> None:
    bits = whole_number({"num_bits": weights.get("num_bits")}, "num_bits", (4, 8))
    if weights.get("type", "int") != "int":
        raise UnsupportedError(f"config.json: packed weights of type {weights.get('type')!r} are not supported")
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        made = _packed(tensors, stem, bits, bool(weights.get("symmetric", True)))
        _require_group(weights, made.group, made.shape[-1], f"{stem}.weight_scale")
        tensors[f"{stem}.weight"] = made


def _require_group(weights: dict[str, Any], group: int, inputs: int, name: str) -> None:
    """CorruptError where config.json states other groups of columns than the scales have."""
    stated = weights.get("group_size")
    if weights.get("strategy") == "channel" or stated == -1:
        stated = inputs
    if isinstance(stated, int) and stated != group:
        raise CorruptError(
            f"config.json states groups of {stated} columns, {name} has one scale for {group}",
            "config.json belongs to another checkpoint; download both again",
        )


def _packed(tensors: dict[str, SourceTensor], stem: str, bits: int, symmetric: bool) -> PackTensor:
    packed, scale = (take(tensors, f"{stem}.{part}", stem) for part in ("weight_packed", "weight_scale"))
    tensors.pop(f"{stem}.weight_shape", None)
    order = tensors.pop(f"{stem}.weight_g_idx", None)
    if order is not None:
        raise UnsupportedError(f"{order.name}: groups of columns that are not neighbours are not supported")
    outputs, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    inputs, groups = words * (32 // bits), scale.shape[-1]
    expect(packed, ("I32", "U32"), (outputs, words))
    expect(scale, ("F16", "BF16", "F32"), (outputs, groups))
    if not groups or inputs % groups:
        raise UnsupportedError(f"{scale.name} has {groups} groups for rows of {inputs}, which is not supported")
    zero = None
    if not symmetric:
        zero = expect(
            take(tensors, f"{stem}.weight_zero_point", stem), ("I32", "U32"), (-(-outputs // (32 // bits)), groups)
        )
    return PackTensor(
        f"{stem}.weight",
        f"INT{bits}",
        (outputs, inputs),
        packed.path,
        0,
        size_of(packed, scale, zero),
        bits=bits,
        group=inputs // groups,
        scales=scale.dtype if symmetric else "F32",
        packed=packed,
        scale=scale,
        zero=zero,
    )


def _nvfp4(tensors: dict[str, SourceTensor], weights: dict[str, Any]) -> None:
    _require_float4(weights, 16)
    join_nvfp4(tensors, "weight_packed", "weight_scale", "weight_global_scale", divides=True)


def _require_float4(weights: dict[str, Any], group: int) -> None:
    whole_number({"num_bits": weights.get("num_bits", 4)}, "num_bits", (4,))
    whole_number({"group_size": weights.get("group_size") or group}, "group_size", (group,))


def _mxfp4(tensors: dict[str, SourceTensor], weights: dict[str, Any]) -> None:
    _require_float4(weights, 32)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        codes, scale = take(tensors, name, stem), take(tensors, f"{stem}.weight_scale", stem)
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        expect(codes, ("U8",), codes.shape)
        expect(scale, ("U8", "F8_E8M0"), (*shape[:-1], shape[-1] // 32))
        tensors[f"{stem}.weight"] = Mxfp4Tensor(
            f"{stem}.weight", "MXFP4", shape, codes.path, 0, size_of(codes, scale), codes=codes, scale=scale
        )


def _float8(tensors: dict[str, SourceTensor], weights: dict[str, Any]) -> None:
    join_float8(tensors, "weight_scale")
