"""Recurrent blocks: which layers of a model have one, its numbers from config.json, its tensors, and how the manifest
states it (vault/FORMAT.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from smoe_cli.errors import CorruptError, UnsupportedError
from smoe_cli.families.model import Groups, Recurrent, TrunkTensor
from smoe_cli.families.numbers import Numbers
from smoe_cli.families.spec import Family

MAX_TAPS, MAX_KEYS = 16, 1024  # engine/include/smoe/model.h


def recurrent_layers(family: Family, numbers: Numbers, layers: int) -> list[bool]:
    """For each layer whether it has the family's recurrent block."""
    types = numbers.names("layer_types", layers, {*family.recurrent_types, *family.attention_types})
    if types:
        return [kind in family.recurrent_types for kind in types]
    listed = numbers.integers("attention_layers")  # counted from one
    if listed:
        return [index + 1 not in listed for index in range(layers)]
    if numbers.has("attention_every"):
        every = numbers.integer("attention_every")
        at = numbers.integer("attention_at", least=0) if numbers.has("attention_at") else every - 1
        return [index % every != at for index in range(layers)]
    raise UnsupportedError(f"config.json states no {numbers.key('layer_types')}, which says what layers are recurrent")


def recurrent_of(family: Family, numbers: Numbers) -> Recurrent:
    """The block of a family's recurrent layers."""
    found = _block(family, numbers)
    tiled = family.tiled and found.key_heads != found.heads
    return replace(found, tiled=tiled, negative_rates=family.negative_rates)


def _block(family: Family, numbers: Numbers) -> Recurrent:
    taps = numbers.integer("conv_taps", least=2, most=MAX_TAPS)
    hidden, eps = numbers.integer("hidden"), numbers.number("norm_eps")
    conv_bias, bias = numbers.flag("conv_bias"), numbers.flag("recurrent_bias")
    biases = ("conv",) * conv_bias + ("in", "out") * bias
    if family.recurrent == "short_conv":
        return Recurrent("short_conv", taps, 1, hidden, bias=biases)
    keys = numbers.integer("recurrent_key_dim", most=MAX_KEYS)
    if family.recurrent == "mamba":
        rank = -(-hidden // 16) if numbers.raw("recurrent_rank") == "auto" else numbers.integer("recurrent_rank")
        values = numbers.integer("recurrent_expand") * hidden
        return Recurrent("mamba", taps, 1, values, key_dim=keys, rank=rank, eps=eps, bias=(*biases, "dt"))
    heads, key_heads = numbers.integer("recurrent_heads"), numbers.integer("recurrent_key_heads")
    if heads % key_heads:
        raise CorruptError(f"config.json: {heads} recurrent heads do not divide by {key_heads}")
    if family.recurrent == "mamba2":
        width = numbers.integer("recurrent_expand") * hidden // heads
        values = width if numbers.raw("recurrent_value_dim") == "auto" else numbers.integer("recurrent_value_dim")
        return Recurrent("mamba2", taps, heads, values, key_heads, keys, eps=eps, bias=biases)
    found = Recurrent("delta", taps, heads, numbers.integer("recurrent_value_dim"), key_heads, keys, eps=eps)
    if not family.channel_decay:
        return replace(found, bias=("decay",))
    rank = numbers.integer("recurrent_rank")
    return replace(found, bias=("decay",), rank=rank, channel_decay=True, sigmoid_gate=True)


def recurrent_tensors(prefix: str, r: Recurrent, hidden: int) -> list[TrunkTensor]:
    """In the order of a forward pass. What is used value by value keeps the source's precision, and so do the small
    matrices that decide, as routers do."""
    parts = {"short_conv": _short_conv, "delta": _delta, "mamba": _mamba, "mamba2": _mamba2}[r.block](r, hidden)
    found = []
    for part, (role, shape) in {**parts, "out": ("attention", (hidden, r.values))}.items():
        whole = part.endswith((".bias", "rate", "skip"))
        found.append(TrunkTensor(prefix + (part if whole else part + ".weight"), role, shape))
        if part in r.bias:
            found.append(TrunkTensor(f"{prefix}{part}.bias", "bias", shape[-1:] if "conv" in part else shape[:1]))
    return found


Parts = dict[str, tuple[str, tuple[int, ...]]]


def _short_conv(r: Recurrent, hidden: int) -> Parts:
    return {"in": ("attention", (3 * r.values, hidden)), "conv": ("bias", (r.taps, r.values))}


def _delta(r: Recurrent, hidden: int) -> Parts:
    found: Parts = {
        name: ("attention", (rows, hidden)) for name, rows in (("q", r.keys), ("k", r.keys), ("v", r.values))
    }
    found |= {name + "_conv": ("bias", (r.taps, found[name][1][0])) for name in "qkv"}
    found["beta"] = ("router", (r.heads, hidden))
    if r.rank:
        found |= dict.fromkeys(("decay_in", "gate_in"), ("attention", (r.rank, hidden)))
    cols = r.rank or hidden
    found["decay"] = ("attention", (r.keys, cols)) if r.channel_decay else ("router", (r.heads, cols))
    found["gate"] = ("attention", (r.values, cols))
    return {**found, "rate": ("bias", (r.heads,)), "norm": ("bias", (r.value_dim,))}


def _mamba(r: Recurrent, hidden: int) -> Parts:
    return {
        "in": ("attention", (2 * r.values, hidden)),
        "conv": ("bias", (r.taps, r.values)),
        "x": ("attention", (r.rank + 2 * r.key_dim, r.values)),
        "dt": ("attention", (r.values, r.rank)),
        "dt_norm": ("bias", (r.rank,)),
        "k_norm": ("bias", (r.key_dim,)),
        "q_norm": ("bias", (r.key_dim,)),
        "rate": ("bias", (r.key_dim, r.values)),
        "skip": ("bias", (r.values,)),
    }


def _mamba2(r: Recurrent, hidden: int) -> Parts:
    channels = 2 * r.keys + r.values
    return {
        "in": ("attention", (r.values + channels + r.heads, hidden)),
        "conv": ("bias", (r.taps, channels)),
        **dict.fromkeys(("dt.bias", "rate", "skip"), ("bias", (r.heads,))),
        "norm": ("bias", (r.values,)),
    }


def recurrent_rows(r: Recurrent, needed: TrunkTensor, take: str) -> Groups:
    """Rows of a checkpoint's tensor meant by a ``take``. "turned": of a matrix stored [channels, taps] all; "turned_q",
    k, v: of one for queries, keys and values together that part. "joined_*": the same of a projection. "whole_*": of
    one for these, gates, betas and decays, in this order. "mixed_*": of one stored key head by key head, each with its
    query, key, values and gate, or with its betas and decays."""
    if take == "turned":
        return Groups(1, needed.shape[1], 0, needed.shape[1], transposed=True)
    kind, _, part = take.partition("_")
    per_key = r.heads // r.key_heads
    if kind in ("turned", "joined"):
        first = {"q": 0, "k": r.keys, "v": 2 * r.keys}[part]
        rows = r.values if part == "v" else r.keys
        return Groups(1, 2 * r.keys + r.values, first, rows, transposed=kind == "turned")
    if kind == "whole":
        sizes = {"q": r.keys, "k": r.keys, "v": r.values, "gate": r.values, "beta": r.heads, "decay": r.heads}
        names = list(sizes)
        return Groups(1, sum(sizes.values()), sum(sizes[name] for name in names[: names.index(part)]), sizes[part])
    if part in ("beta", "decay"):
        return Groups(r.key_heads, 2 * per_key, per_key if part == "decay" else 0, per_key)
    values = per_key * r.value_dim
    first = {"q": 0, "k": r.key_dim, "v": 2 * r.key_dim, "gate": 2 * r.key_dim + values}[part]
    return Groups(r.key_heads, 2 * r.key_dim + 2 * values, first, r.key_dim if part in "qk" else values)


def recurrent_json(r: Recurrent) -> dict[str, Any]:
    stated: dict[str, Any] = {"block": r.block, "taps": r.taps, "value_dim": r.value_dim}
    if r.block == "short_conv":
        return stated
    stated |= {"key_dim": r.key_dim, "eps": float(str(np.float32(r.eps)))}
    if r.block != "mamba":
        stated |= {"heads": r.heads, "key_heads": r.key_heads}
    if r.rank:
        stated["rank"] = r.rank
    switches = ("channel_decay", "sigmoid_gate", "tiled", "negative_rates")
    return stated | {name: True for name in switches if getattr(r, name)}
