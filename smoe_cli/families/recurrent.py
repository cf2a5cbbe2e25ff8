"""Recurrent blocks: which layers of a model have one, its numbers from config.json, its tensors, and how the manifest
states it (vault/FORMAT.md)."""

from __future__ import annotations

from typing import Any

from smoe_cli.errors import UnsupportedError
from smoe_cli.families.model import Recurrent, TrunkTensor
from smoe_cli.families.numbers import Numbers
from smoe_cli.families.spec import Family

MAX_TAPS = 16


def recurrent_layers(family: Family, numbers: Numbers, layers: int) -> list[bool]:
    """For each layer whether it has the family's recurrent block; no layer of a family without one."""
    if not family.recurrent:
        return [False] * layers
    types = numbers.names("layer_types", layers, {*family.recurrent_types, *family.attention_types})
    if types:
        return [kind in family.recurrent_types for kind in types]
    raise UnsupportedError(f"config.json states no {numbers.key('layer_types')}, which says what layers are recurrent")


def recurrent_of(family: Family, numbers: Numbers) -> Recurrent:
    taps = numbers.integer("conv_taps", least=2, most=MAX_TAPS)
    bias = ("in", "conv", "out") if numbers.flag("conv_bias") else ()
    return Recurrent("short_conv", taps, 1, numbers.integer("hidden"), bias=bias)


def recurrent_tensors(prefix: str, r: Recurrent, hidden: int) -> list[TrunkTensor]:
    """In the order of a forward pass. Convolutions and what is used value by value keep the source's precision."""

    def matrix(part: str, rows: int, cols: int, role: str = "attention") -> list[TrunkTensor]:
        found = [TrunkTensor(f"{prefix}{part}.weight", role, (rows, cols))]
        return found + ([TrunkTensor(f"{prefix}{part}.bias", "bias", (rows,))] if part in r.bias else [])

    def conv(part: str, channels: int) -> list[TrunkTensor]:
        found = [TrunkTensor(f"{prefix}{part}.weight", "bias", (r.taps, channels))]
        return found + ([TrunkTensor(f"{prefix}{part}.bias", "bias", (channels,))] if part in r.bias else [])

    return [*matrix("in", 3 * r.values, hidden), *conv("conv", r.values), *matrix("out", hidden, r.values)]


def recurrent_json(r: Recurrent) -> dict[str, Any]:
    return {"block": r.block, "taps": r.taps, "value_dim": r.value_dim}
