"""From a family and a config.json to numbers: the architecture as the manifest states it, and the trunk tensors its
blocks need. Refuses what no block can compute. Pure: reads nothing but its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from smoe_cli.errors import CorruptError, UnsupportedError
from smoe_cli.families.rope import Rope, RopeInput, resolve_rope
from smoe_cli.families.spec import Family, Key

# No real model is near these; a number above is a damaged config.
LIMIT, MAX_LAYERS, MAX_EXPERTS = 1 << 24, 4096, 1 << 16


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: q [heads * head_dim, hidden], k and v [kv_heads * head_dim, hidden]. window 0 = all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    qk_norm: str
    clip: float
    bias: tuple[str, ...]


@dataclass(frozen=True)
class Ffn:
    """Dense (experts 0: width) or routed (experts, top_k, expert_width, an always-on expert of shared_width)."""

    width: int = 0
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    normalize: bool = False
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Layer:
    attention: Attention
    ffn: Ffn


@dataclass(frozen=True)
class Arch:
    family: str
    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied_head: bool
    rope: Rope
    layers: tuple[Layer, ...]
    notices: tuple[str, ...] = ()

    def moe_layers(self) -> list[int]:
        """Absolute indices of the routed layers, in order."""
        return [index for index, layer in enumerate(self.layers) if layer.ffn.experts]


@dataclass(frozen=True)
class TrunkTensor:
    """A tensor the blocks need. role: embed head norm bias attention router ffn shared."""

    name: str
    role: str
    shape: tuple[int, ...]


class _Numbers:
    """Reads a family's keys from a config, nested ``text_config`` included."""

    def __init__(self, family: Family, config: dict[str, Any]) -> None:
        self.family = family
        nested = config.get("text_config")
        self.config = {**nested, **config} if isinstance(nested, dict) else config
        self.notices: list[str] = []

    def raw(self, name: str) -> Any:
        key = self.family.config.get(name)
        if key is None:
            return None
        for candidate in key.keys:
            if candidate not in self.config:
                continue
            value = self.config[candidate]
            if value is not None:
                return value
            if key.has_null:
                return key.null
        return self._default(name, key)

    def _default(self, name: str, key: Key) -> Any:
        if key.default_from == "heads":
            return self.integer("heads")
        if key.default_from == "hidden/heads":
            hidden, heads = self.integer("hidden"), self.integer("heads")
            if hidden % heads:
                raise CorruptError(
                    f"config.json states no {key.keys[0]}; hidden {hidden} does not divide by {heads} heads"
                )
            return hidden // heads
        if key.has_default:
            return key.default
        names = " or ".join(key.keys)
        raise CorruptError(f"config.json states no {names}", f"family {self.family.name} needs it for {name}")

    def key(self, name: str) -> str:
        return self.family.config[name].keys[0]

    def integer(self, name: str, least: int = 1, most: int = LIMIT) -> int:
        value = self.raw(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected true or false")
        return bool(value)

    def number(self, name: str) -> float:
        value = self.raw(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a number")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self.raw(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a list of numbers")
        return value


def resolve(family: Family, config: dict[str, Any]) -> Arch:
    """The architecture of a checkpoint. CorruptError names a missing or absurd number."""
    numbers = _Numbers(family, config)
    _refuse(family, numbers)
    layers = numbers.integer("layers", most=MAX_LAYERS)
    rope = _rope(family, numbers)
    windows = _windows(family, numbers, layers)
    return Arch(
        family=family.name,
        model_type=str(numbers.config.get("model_type") or family.model_types[0]),
        hidden=numbers.integer("hidden"),
        vocab=numbers.integer("vocab"),
        max_positions=rope.max_positions,
        norm_eps=numbers.number("norm_eps"),
        tied_head=tied_head(family, config),
        rope=rope,
        layers=tuple(Layer(_attention(family, numbers, windows[i]), _ffn(family, numbers, i)) for i in range(layers)),
        notices=tuple(numbers.notices),
    )


def tied_head(family: Family, config: dict[str, Any]) -> bool:
    """Whether the config says, at the top or in its text_config, that the head is the embedding."""
    nested = config.get("text_config")
    parts = [config, nested] if isinstance(nested, dict) else [config]
    stated = [part[key] for part in parts for key in family.config["tied_head"].keys if part.get(key) is not None]
    if not all(isinstance(value, bool) for value in stated):
        raise CorruptError(f"config.json: {family.config['tied_head'].keys[0]} is {stated!r}, expected true or false")
    return any(stated) if stated else bool(family.config["tied_head"].default)


def _refuse(family: Family, numbers: _Numbers) -> None:
    for key, meaning in family.refuse.items():
        if numbers.config.get(key):
            raise UnsupportedError(f"config.json: {key} switches on {meaning}, which is not supported")
    activation = numbers.raw("activation")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"config.json: activation {activation!r} is not supported", "supported: silu")


def _rope(family: Family, numbers: _Numbers) -> Rope:
    given = RopeInput(
        numbers.integer("head_dim"), numbers.integer("max_positions"), family.theta_default, family.partial_rotary
    )
    return resolve_rope(numbers.config, given, numbers.notices)


def _windows(family: Family, numbers: _Numbers, layers: int) -> list[int]:
    """Window of each layer, 0 where a query sees everything."""
    window = numbers.integer("window", least=0)
    enabled = numbers.flag("window_on") if "window_on" in family.config else True
    if family.window_rule == "none" or not enabled or not window:
        return [0] * layers
    types = numbers.raw("layer_types") or []
    if types:
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise CorruptError(f"config.json: layer_types is {types!r}, expected a list of names")
        if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedError(f"config.json: layer_types {types!r} for {layers} layers is not supported")
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = numbers.integer("window_layers", least=0)
    if family.window_rule == "from_layer":
        return [window if index >= first else 0 for index in range(layers)]
    if family.window_rule == "even_before_layer":
        return [window if index % 2 == 0 and index < first else 0 for index in range(layers)]
    return [window] * layers


def _attention(family: Family, numbers: _Numbers, window: int) -> Attention:
    heads, kv_heads = numbers.integer("heads"), numbers.integer("kv_heads")
    if heads % kv_heads:
        raise CorruptError(f"config.json: {heads} query heads do not divide by {kv_heads} key-value heads")
    biased = numbers.flag("attention_bias") if "attention_bias" in family.config else bool(family.bias)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=numbers.integer("head_dim"),
        window=window,
        qk_norm=family.qk_norm,
        clip=numbers.number("clip"),
        bias=family.bias if biased else (),
    )


def _ffn(family: Family, numbers: _Numbers, index: int) -> Ffn:
    experts = numbers.integer("experts", least=0, most=MAX_EXPERTS)
    step = numbers.integer("sparse_step") if "sparse_step" in family.config else 1
    if not experts or index in numbers.integers("dense_layers") or (index + 1) % step:
        if "width" not in family.config:
            raise CorruptError(f"config.json makes layer {index} dense, which family {family.name} has no form for")
        return Ffn(width=numbers.integer("width"))
    top_k = numbers.integer("top_k")
    if top_k > experts:
        raise CorruptError(f"config.json: {top_k} experts per token of {experts}")
    return Ffn(
        experts=experts,
        top_k=top_k,
        expert_width=numbers.integer("expert_width"),
        normalize=numbers.flag("normalize") if family.normalize is None else family.normalize,
        shared_width=numbers.integer("shared_width", least=0),
        shared_gate=family.shared_gate and numbers.integer("shared_width", least=0) > 0,
    )


def trunk_tensors(arch: Arch) -> list[TrunkTensor]:
    """Every trunk tensor the blocks need, in the order of a forward pass."""
    hidden = arch.hidden
    found = [TrunkTensor("embed.weight", "embed", (arch.vocab, hidden))]
    for index, layer in enumerate(arch.layers):
        prefix = f"layers.{index}."
        found.append(TrunkTensor(prefix + "attn_norm.weight", "norm", (hidden,)))
        found += _attention_tensors(prefix + "attn.", layer.attention, hidden)
        found.append(TrunkTensor(prefix + "ffn_norm.weight", "norm", (hidden,)))
        found += _ffn_tensors(prefix, layer.ffn, hidden)
    found.append(TrunkTensor("final_norm.weight", "norm", (hidden,)))
    if not arch.tied_head:
        found.append(TrunkTensor("head.weight", "head", (arch.vocab, hidden)))
    return found


def _attention_tensors(prefix: str, attention: Attention, hidden: int) -> list[TrunkTensor]:
    q_rows, kv_rows = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    found = [TrunkTensor(f"{prefix}{part}.weight", "attention", shape) for part, shape in shapes.items()]
    found += [TrunkTensor(f"{prefix}{part}.bias", "bias", (shapes[part][0],)) for part in attention.bias]
    if attention.qk_norm != "none":
        per_head = attention.qk_norm == "head"
        found.append(TrunkTensor(prefix + "q_norm.weight", "norm", (attention.head_dim if per_head else q_rows,)))
        found.append(TrunkTensor(prefix + "k_norm.weight", "norm", (attention.head_dim if per_head else kv_rows,)))
    return found


def _ffn_tensors(prefix: str, ffn: Ffn, hidden: int) -> list[TrunkTensor]:
    def matrices(name: str, role: str, width: int) -> list[TrunkTensor]:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return [TrunkTensor(f"{prefix}{name}.{part}.weight", role, shape) for part, shape in shapes.items()]

    if not ffn.experts:
        return matrices("ffn", "ffn", ffn.width)
    found = [TrunkTensor(prefix + "router.weight", "router", (ffn.experts, hidden))]
    if ffn.shared_width:
        found += matrices("shared", "shared", ffn.shared_width)
    if ffn.shared_gate:
        found.append(TrunkTensor(prefix + "shared_gate.weight", "router", (1, hidden)))
    return found


def exact(value: float) -> float:
    """A float32 value as the shortest decimal that comes back exactly."""
    return float(str(np.float32(value)))


def arch_json(arch: Arch, encodings: dict[int, dict[str, str]]) -> dict[str, Any]:
    """The manifest's ``arch`` (vault/FORMAT.md). ``encodings`` gives gate, up and down for each routed layer."""
    return {
        "hidden": arch.hidden,
        "vocab": arch.vocab,
        "max_positions": arch.max_positions,
        "norm_eps": exact(arch.norm_eps),
        "tied_head": arch.tied_head,
        "ropes": [{"inv_freq": [exact(value) for value in arch.rope.inv_freq], "scale": exact(arch.rope.scale)}],
        "layers": [
            {"attention": _attention_json(layer.attention), "ffn": _ffn_json(layer.ffn, encodings.get(index, {}))}
            for index, layer in enumerate(arch.layers)
        ],
    }


def _attention_json(attention: Attention) -> dict[str, Any]:
    return {
        "block": "gqa",
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "scale": exact(attention.head_dim**-0.5),
        "window": attention.window,
        "qk_norm": attention.qk_norm,
        "qkv_clip": exact(attention.clip),
        "rope": 0,
    }


def _ffn_json(ffn: Ffn, encodings: dict[str, str]) -> dict[str, Any]:
    if not ffn.experts:
        return {"block": "ffn", "width": ffn.width, "activation": "silu"}
    return {
        "block": "moe",
        "experts": ffn.experts,
        "top_k": ffn.top_k,
        "expert_width": ffn.expert_width,
        "normalize": ffn.normalize,
        "scaling": 1.0,
        "activation": "silu",
        "shared_width": ffn.shared_width,
        "shared_gate": ffn.shared_gate,
        "encodings": encodings,
    }
