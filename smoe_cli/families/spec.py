"""A model family is one TOML file in this folder: where its numbers stand in config.json, what its tensors are called,
which known blocks it is made of. This module is the schema and the loader; ``arch.py`` turns a family and a config into
numbers. No family name appears in code.

Keys of a family file:

    name, model_types, architectures   how a checkpoint is recognised
    base                               the family whose tables this one starts from; what it states comes on top
    chat_template                      file in chat_templates/ for checkpoints that ship none (optional)
    [config]     our name = "config key", or { key = "k" | ["k1", "k2"], default = v | default_from = "rule",
                 null = v }; "" takes back what the base has
    [rope]       theta_default (only where the family has a documented one), partial (it may rotate part of a head),
                 partial_default, interleaved, dim ("head" | "rope_dim"), latent_scale (yarn's mscale scales attention),
                 by_type (layers with a window have frequencies of their own, local_theta by default),
                 still (beside layers with a window, those without one do not rotate), none (nothing rotates)
    [norm]       kind = rms | layer, place = before | after | both, offset (added to the weights of every norm)
    [recurrent]  block = short_conv | delta | mamba | mamba2, of the layers that config.json's layer_types names by one
                 of types (attention_types are the names of the others); channel_decay
    [attention]  block, qk_norm, norm_after_rope, sinks, gated, bias (parts that have one where attention_bias is true),
                 window_rule, latent_eps
    [moe]        normalize (where it is not a config key), scores, correction, correct_logits (it is added to logits,
                 not to scores), group_score, norm_floor, norm_added, router_bias, shared_gate, shared_like_experts (the
                 shared width is a number of expert widths), scale_input, activation (where it is none of those that
                 config.json names)
    [tensors]    canonical name (vault/FORMAT.md) = checkpoint name, or { name = "...", take = "part" }; {L} is a layer
    [experts]    gate, up, down with {L} and {E}; fused_gate_up, fused_down with {L}, each a name or alternatives;
                 square_is = out_in | in_out; interleaved (gate and up are every other row of the fused matrix);
                 gate_up_bias (or gate_bias and up_bias), down_bias with {L}: [experts, rows]; without {E}, gate, up and
                 down are stacked over the experts; packed = mxfp4 (NAME_blocks and NAME_scales may
                 stand for a fused NAME)
    [skip]       ignore: tensors without a function; optional: tensors that may be left out, with a notice; modalities:
                 tensors of what is not text, likewise
    [gguf]       arch (names, a list), has and lacks (tensors that tell families of one arch apart), pairs (rows of q
                 and k are stored in the order of rotated pairs), config and rope (what the files do not state),
                 scale_like_hidden (numbers of layers at which heads are scaled by hidden / heads), imported (false:
                 files of this arch are read as another family, and only written as this), tensors (part of a layer =
                 its name behind blk.{L}., as in [tensors], or a list of these with the one that is written first),
                 tiled (heads of a recurrent block lie value by value, not key by key), recurrent_list (its layers are
                 listed, else those without key heads), sections (positions of rope are stated in parts), shared_each
                 (the width of one of the shared experts is stated). What llama.cpp takes for granted, so that an
                 export has to be: dense (which layers may be without experts: none, leading, step, any), windows
                 (layers may have one), bias (that attention may have beside q, k, v), heads = all (as many of keys as
                 of queries) | wide (together as wide as the model) | hidden (both), fixed (our number = its value, or
                 list of values), needs (tensors), still_every (of so many layers one does not rotate), lite (numbers
                 of layers at which queries of latent attention may be made directly), one_base (layers with a window
                 rotate as others do). differs: what llama.cpp does otherwise
                 although it loads the file, said at an export. Not inherited
    [prefix]     beginning of tensors' names in a checkpoint, {L} in it, = what [tensors] and [experts] have there
    [refuse]     config key = what it would switch on that no block does
    [require]    config key = the one value, or list of values, that the blocks compute
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from smoe_cli.errors import SmoeError, UnsupportedError

FOLDER = Path(__file__).parent
BLOCKS = ("gqa", "mla")
WINDOW_RULES = ("none", "all", "from_layer", "even_before_layer", "even", "all_but_every", "listed")
QK_NORMS = ("none", "head", "full", "unit")
DEFAULT_RULES = ("heads", "hidden/heads")
RECURRENT = ("short_conv", "delta", "mamba", "mamba2")
TAKES = (
    "first_half",
    "second_half",
    "head_first_half",
    "head_second_half",
    "latent_keys",
    "latent_values",
    "rotated_pairs",
)
RECURRENT_TAKES = (
    *("turned", "turned_q", "turned_k", "turned_v", "joined_q", "joined_k", "joined_v"),
    *("whole_q", "whole_k", "whole_v", "whole_gate", "whole_beta", "whole_decay"),
    *("mixed_q", "mixed_k", "mixed_v", "mixed_gate", "mixed_beta", "mixed_decay"),
)
SCORES = ("softmax", "sigmoid", "sparsemixer")
_REQUIRED_CONFIG = (
    "hidden",
    "vocab",
    "layers",
    "max_positions",
    "norm_eps",
    "activation",
    "tied_head",
    "heads",
)
_REQUIRED = ("name", "model_types", "architectures", "config", "attention", "tensors")
_TABLES: dict[str, tuple[str, ...] | None] = {
    "config": None,
    "rope": (
        "theta_default",
        "partial",
        "partial_default",
        "interleaved",
        "dim",
        "latent_scale",
        "by_type",
        "local_theta",
        "still",
        "none",
    ),
    "norm": ("kind", "place", "offset"),
    "attention": ("block", "qk_norm", "norm_after_rope", "sinks", "gated", "bias", "window_rule", "latent_eps"),
    "recurrent": ("block", "types", "attention_types", "channel_decay"),
    "moe": (
        "normalize",
        "scores",
        "correction",
        "group_score",
        "norm_floor",
        "norm_added",
        "correct_logits",
        "router_bias",
        "shared_gate",
        "shared_like_experts",
        "activation",
        "scale_input",
    ),
    "tensors": None,
    "experts": (
        "gate",
        "up",
        "down",
        "fused_gate_up",
        "fused_down",
        "square_is",
        "interleaved",
        "gate_up_bias",
        "gate_bias",
        "up_bias",
        "down_bias",
        "packed",
    ),
    "skip": ("ignore", "optional", "modalities"),
    "gguf": (
        *("arch", "imported", "has", "lacks", "pairs", "config", "rope", "scale_like_hidden", "tensors", "tiled"),
        *(
            "dense",
            "windows",
            "bias",
            "heads",
            "fixed",
            "recurrent_list",
            "sections",
            "needs",
            "still_every",
            "lite",
            "one_base",
            "shared_each",
            "differs",
        ),
    ),
    "prefix": None,
    "refuse": None,
    "require": None,
}
_FIELDS = {"name", "model_types", "architectures", "chat_template", "base"}


@dataclass(frozen=True)
class Key:
    """One value of config.json: the keys to look under, and what holds where none is there."""

    keys: tuple[str, ...]
    default: Any = None
    has_default: bool = False
    default_from: str = ""
    null: Any = None
    has_null: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, and which part of it is meant: "" = all of it, else one of TAKES (layout.taken_rows)."""

    name: str
    take: str = ""


@dataclass(frozen=True)
class Experts:
    """Names of the routed experts' matrices, per expert and fused over a layer's experts; alternatives in order."""

    gate: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    fused_gate_up: tuple[str, ...] = ()
    fused_down: tuple[str, ...] = ()
    square_is: str = ""
    interleaved: bool = False
    gate_up_bias: str = ""
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    packed: str = ""


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    config: dict[str, Key]
    tensors: dict[str, Source]
    chat_template: str = ""
    theta_default: float | None = None
    partial_rotary: bool = False
    partial_default: float = 1.0
    interleaved: bool = False
    rope_dim: str = "head"
    latent_scale: bool = False
    norm: str = "rms"
    by_type: bool = False
    local_theta: float | None = None
    still: bool = False
    norm_place: str = "before"
    norm_offset: float = 0.0
    block: str = "gqa"
    qk_norm: str = "none"
    norm_after_rope: bool = False
    sinks: bool = False
    gated: bool = False
    bias: tuple[str, ...] = ()
    window_rule: str = "none"
    latent_eps: float = 1e-6
    recurrent: str = ""
    recurrent_types: tuple[str, ...] = ("linear_attention",)
    attention_types: tuple[str, ...] = ("full_attention",)
    channel_decay: bool = False
    tiled: bool = False  # RecurrentSpec in engine/include/smoe/model.h; no family has it, but how a file states one
    negative_rates: bool = False  # likewise
    unrotated: bool = False
    normalize: bool | None = None
    scores: str = "softmax"
    correction: bool = False
    group_score: str = "best"
    norm_floor: float = 0.0
    norm_added: float = 0.0
    correct_logits: bool = False
    router_bias: bool = False
    activation: str = ""
    scale_input: bool = False
    shared_gate: bool = False
    shared_like_experts: bool = False
    experts: Experts | None = None
    ignore: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    gguf: dict[str, Any] = field(default_factory=dict)
    prefix: dict[str, str] = field(default_factory=dict)
    refuse: dict[str, str] = field(default_factory=dict)
    require: dict[str, Any] = field(default_factory=dict)

    def source(self, canonical: str) -> Source:
        """The checkpoint's tensor of a canonical trunk tensor; KeyError where the family has none."""
        match = re.match(r"layers\.(\d+)\.", canonical)
        if match is None:
            return self.tensors[canonical]
        found = self.tensors["layers.{L}." + canonical[match.end() :]]
        return Source(found.name.replace("{L}", match[1]), found.take)

    def source_name(self, canonical: str) -> str:
        return self.source(canonical).name


def _key(where: str, value: Any) -> Key:
    if isinstance(value, str):
        return Key((value,))
    if not isinstance(value, dict) or "key" not in value or set(value) - {"key", "default", "default_from", "null"}:
        raise SmoeError(f"{where}: expected a config key or {{ key, default, default_from, null }}, found {value!r}")
    rule = value.get("default_from", "")
    if rule and rule not in DEFAULT_RULES:
        raise SmoeError(f"{where}: unknown default_from {rule!r}; known: {', '.join(DEFAULT_RULES)}")
    names = (value["key"],) if isinstance(value["key"], str) else tuple(value["key"])
    return Key(names, value.get("default"), "default" in value, rule, value.get("null"), "null" in value)


def read_source(where: str, value: Any) -> Source:
    """A tensor's name, or a table of name and take."""
    if isinstance(value, str):
        return Source(value)
    if not isinstance(value, dict) or "name" not in value or set(value) - {"name", "take"}:
        raise SmoeError(f"{where}: expected a tensor's name or {{ name, take }}, found {value!r}")
    return Source(value["name"], _one_of(where, value.get("take", ""), ("", *TAKES, *RECURRENT_TAKES)))


def _one_of(where: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise SmoeError(f"{where}: {value!r} is not one of {', '.join(known)}")
    return value


def _experts(where: str, raw: dict[str, Any]) -> Experts:
    names = ("gate", "up", "down", "fused_gate_up", "fused_down")
    lists = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in raw.items() if key in names}
    experts = Experts(**{**raw, **lists})
    _one_of(f"{where} [experts] packed", experts.packed, ("", "mxfp4"))
    if experts.fused_gate_up:
        _one_of(f"{where} [experts] square_is", experts.square_is, ("out_in", "in_out"))
    return experts


def _merge(base: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The tables of a base with those of a family on top; its own fields are not inherited."""
    merged = {name: dict(table) for name, table in base.items() if name in _TABLES and name != "gguf"}
    for name, value in raw.items():
        if name in _TABLES and isinstance(value, dict):
            merged[name] = {key: item for key, item in {**merged.get(name, {}), **value}.items() if item != ""}
        else:
            merged[name] = value
    return merged


def parse_toml(text: str, where: str, read: Callable[[str], str] | None = None) -> dict[str, Any]:
    """The tables of a family file with its bases merged in; ``read`` gives the text of another family's file."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SmoeError(f"{where}: {error}") from error
    if unknown := set(raw) - set(_TABLES) - _FIELDS:
        raise SmoeError(f"{where}: unknown keys {', '.join(sorted(unknown))}")
    for name, known in _TABLES.items():
        if known is not None and (unknown := set(raw.get(name, {})) - set(known)):
            raise SmoeError(f"{where} [{name}]: unknown keys {', '.join(sorted(unknown))}")
    if "base" not in raw:
        return raw
    file = f"{raw['base']}.toml"
    base = (read or _read)(file)
    return _merge(parse_toml(base, file, read), raw)


def _read(file: str) -> str:
    return (FOLDER / file).read_text("utf-8")


def parse_family(text: str, where: str) -> Family:
    """A family from the text of its file. Errors name the file and the key."""
    raw = parse_toml(text, where)
    if missing := [key for key in _REQUIRED if key not in raw]:
        raise SmoeError(f"{where}: missing {', '.join(missing)}")
    config = {name: _key(f"{where} [config] {name}", value) for name, value in raw["config"].items()}
    if missing := [name for name in _REQUIRED_CONFIG if name not in config]:
        raise SmoeError(f"{where} [config]: missing {', '.join(missing)}")
    attention, moe, rope, skip = raw["attention"], raw.get("moe", {}), raw.get("rope", {}), raw.get("skip", {})
    norm, recurrent = raw.get("norm", {}), raw.get("recurrent", {})
    return Family(
        name=raw["name"],
        model_types=tuple(raw["model_types"]),
        architectures=tuple(raw["architectures"]),
        config=config,
        tensors={name: read_source(f"{where} [tensors] {name}", value) for name, value in raw["tensors"].items()},
        chat_template=raw.get("chat_template", ""),
        theta_default=rope.get("theta_default"),
        partial_rotary=rope.get("partial", False),
        partial_default=rope.get("partial_default", 1.0),
        interleaved=rope.get("interleaved", False),
        rope_dim=_one_of(f"{where} [rope] dim", rope.get("dim", "head"), ("head", "rope_dim")),
        latent_scale=rope.get("latent_scale", False),
        norm=_one_of(f"{where} [norm] kind", norm.get("kind", "rms"), ("rms", "layer")),
        by_type=rope.get("by_type", False),
        local_theta=rope.get("local_theta"),
        still=rope.get("still", False),
        norm_offset=norm.get("offset", 0.0),
        norm_place=_one_of(f"{where} [norm] place", norm.get("place", "before"), ("before", "after", "both")),
        block=_one_of(f"{where} [attention] block", attention["block"], BLOCKS),
        qk_norm=_one_of(f"{where} [attention] qk_norm", attention.get("qk_norm", "none"), QK_NORMS),
        norm_after_rope=attention.get("norm_after_rope", False),
        sinks=attention.get("sinks", False),
        gated=attention.get("gated", False),
        bias=tuple(attention.get("bias", ())),
        window_rule=_one_of(f"{where} [attention] window_rule", attention.get("window_rule", "none"), WINDOW_RULES),
        latent_eps=attention.get("latent_eps", 1e-6),
        recurrent=_one_of(f"{where} [recurrent] block", recurrent.get("block", ""), ("", *RECURRENT)),
        recurrent_types=tuple(recurrent.get("types", ("linear_attention",))),
        attention_types=tuple(recurrent.get("attention_types", ("full_attention",))),
        channel_decay=recurrent.get("channel_decay", False),
        unrotated=rope.get("none", False),
        normalize=moe.get("normalize"),
        scores=_one_of(f"{where} [moe] scores", moe.get("scores", "softmax"), SCORES),
        correction=moe.get("correction", False),
        group_score=_one_of(f"{where} [moe] group_score", moe.get("group_score", "best"), ("best", "best_two")),
        norm_floor=moe.get("norm_floor", 0.0),
        norm_added=moe.get("norm_added", 0.0),
        correct_logits=moe.get("correct_logits", False),
        router_bias=moe.get("router_bias", False),
        activation=_one_of(f"{where} [moe] activation", moe.get("activation", ""), ("", "swiglu_clamped")),
        scale_input=moe.get("scale_input", False),
        shared_gate=moe.get("shared_gate", False),
        shared_like_experts=moe.get("shared_like_experts", False),
        experts=_experts(where, raw["experts"]) if "experts" in raw else None,
        ignore=tuple(skip.get("ignore", ())),
        optional=tuple(skip.get("optional", ())),
        modalities=tuple(skip.get("modalities", ())),
        gguf=raw.get("gguf", {}),
        prefix=raw.get("prefix", {}),
        refuse=raw.get("refuse", {}),
        require=raw.get("require", {}),
    )


@cache
def load_families() -> tuple[Family, ...]:
    """Every family, by file name."""
    return tuple(parse_family(path.read_text("utf-8"), path.name) for path in sorted(FOLDER.glob("*.toml")))


def match_family(config: dict[str, Any]) -> Family:
    """The family of a config.json, by model_type, else by architectures. UnsupportedError lists what there is."""
    model_type = config.get("model_type")
    stated = config.get("architectures")
    architectures = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    for family in load_families():
        if model_type in family.model_types:
            return family
    if model_type is None:
        for family in load_families():
            if set(architectures) & set(family.architectures):
                return family
    found = f"model_type {model_type!r}" if model_type else f"architectures {architectures!r}"
    raise UnsupportedError(
        f"unknown model family: {found} in config.json",
        "families: " + ", ".join(family.name for family in load_families()),
    )
