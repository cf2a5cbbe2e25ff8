"""MLX's folders: NAME.weight U32 [..., out, words], NAME.scales and NAME.biases [..., out, groups] of affine layers; or
of layers in mode mxfp4, NAME.scales U8 and no biases. config.json's ``quantization`` has the numbers, by layer where
they differ. A row's words are one stream of bits, the lowest first."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.packed.affine import (
    SCALES,
    AffineTensor,
    Codes,
    Floats,
    expect,
    read_some,
    size_of,
    take,
    whole_number,
)
from smoe_cli.convert.packed.mxfp4 import Mxfp4Tensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor, to_float32
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.spec import Experts, Family, Source

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class MlxTensor(AffineTensor):
    words: SourceTensor | None = None
    scale: SourceTensor | None = None
    bias: SourceTensor | None = None

    def raw_rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.uint8]:
        assert self.words is not None and self.scale is not None and self.bias is not None
        groups = self.shape[-1] // self.group
        parts = [
            read_some(reader, part, first, count).reshape(count, groups, -1)
            for part in (self.scale, self.bias, self.words)
        ]
        return np.concatenate(parts, axis=2).reshape(count, -1)

    def parts(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        assert self.words is not None and self.scale is not None and self.bias is not None
        scales, biases = (
            to_float32(read_some(reader, part, first, count).reshape(-1), part.dtype).reshape(count, -1)
            for part in (self.scale, self.bias)
        )
        raw = read_some(reader, self.words, first, count)
        bits = np.unpackbits(raw, axis=1, bitorder="little").reshape(count, -1, self.bits)
        places = (1 << np.arange(self.bits)).astype(np.uint8)
        return (bits * places).sum(axis=2, dtype=np.uint8), scales, biases


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith(".scales")]:
        stem = name.removesuffix(".scales")
        tensors[f"{stem}.weight"] = _joined(tensors, stem, _settings(settings, stem))


def _settings(settings: dict[str, Any], stem: str) -> dict[str, Any]:
    own = settings.get(stem)
    return {**settings, **own} if isinstance(own, dict) else settings


def _joined(tensors: dict[str, SourceTensor], stem: str, settings: dict[str, Any]) -> SourceTensor:
    mode = settings.get("mode", "affine")
    weight, scale = take(tensors, f"{stem}.weight", stem), take(tensors, f"{stem}.scales", stem)
    lead, words = weight.shape[:-1], weight.shape[-1]
    if mode == "mxfp4":
        shape = (*lead, words * 8)
        expect(weight, ("U32",), weight.shape)
        expect(scale, ("U8",), (*lead, words * 8 // 32))
        return Mxfp4Tensor(
            f"{stem}.weight", "MXFP4", shape, weight.path, 0, size_of(weight, scale), codes=weight, scale=scale
        )
    if mode != "affine":
        raise UnsupportedError(f"config.json: MLX quantisation of mode {mode!r} is not supported: {stem}")
    bits, group = whole_number(settings, "bits", BITS), whole_number(settings, "group_size", GROUP_SIZES)
    shape = (*lead, words * 32 // bits)
    expect(weight, ("U32",), weight.shape)
    bias = take(tensors, f"{stem}.biases", stem)
    for part in (scale, bias):
        expect(part, tuple(SCALES), (*lead, shape[-1] // group))
    expect(bias, (scale.dtype,), bias.shape)
    return MlxTensor(
        f"{stem}.weight",
        f"MLX{bits}",
        shape,
        weight.path,
        0,
        size_of(weight, scale, bias),
        bits=bits,
        group=group,
        scales=scale.dtype,
        words=weight,
        scale=scale,
        bias=bias,
    )


def view(family: Family, tensors: dict[str, SourceTensor]) -> Family:
    """The family with the names that mlx-lm gives: experts stacked, of latent attention the two halves of kv_b."""
    renamed = dict(family.tensors)
    halves = {"k_up": "embed_q", "v_up": "unembed_out"}
    for ours, theirs in halves.items():
        canonical = f"layers.{{L}}.attn.{ours}.weight"
        stored = [name for name in tensors if name.endswith(f".{theirs}.weight")]
        if canonical in renamed and stored:
            for name in stored:
                shape = tensors[name].shape
                tensors[name] = replace(tensors[name], shape=(shape[0] * shape[1], shape[2]))
            renamed[canonical] = Source(renamed[canonical].name.replace("kv_b_proj", theirs))
    experts = _stacked(family.experts) if family.experts else None
    return replace(family, tensors=renamed, experts=experts)


def place_of(family: Family) -> str:
    """Where mlx-lm has a family's stacked experts, with {L}; "" where that is not known."""
    if family.experts is None or not family.experts.gate:
        return ""
    return re.sub(r"\.experts\.\{E\}\..*", ".switch_mlp", family.experts.gate[0])


def _stacked(experts: Experts) -> Experts:
    """One tensor over all experts for each part: under switch_mlp, or where the checkpoint has its experts."""
    roots = {re.sub(r"\.\{E\}\..*", "", name) for name in experts.gate}
    roots |= {re.sub(r"\.(gate_up_proj|input_linear)(\.weight)?$", "", name) for name in experts.fused_gate_up}
    places = sorted({place for root in roots for place in (root, f"{root.removesuffix('.experts')}.switch_mlp")})
    gate, up, down = (tuple(f"{place}.{PARTS[part]}.weight" for place in places) for part in PARTS)
    if not experts.down_bias:
        return replace(experts, gate=experts.gate + gate, up=experts.up + up, down=experts.down + down)
    gate_bias, up_bias, down_bias = (f"{places[0]}.{PARTS[part]}.bias" for part in PARTS)
    return replace(experts, gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
