"""A model family is one TOML file in this folder: where its numbers stand in config.json, what its tensors are called,
which known blocks it is made of. This module is the schema and the loader; ``arch.py`` turns a family and a config into
numbers. No family name appears in code.

Keys of a family file:

    name, model_types, architectures   how a checkpoint is recognised
    chat_template                      file in chat_templates/ for checkpoints that ship none (optional)
    [config]     our name = "config key", or { key = "k" | ["k1", "k2"], default = v | default_from = "rule", null = v }
    [rope]       theta_default (only where the family has a documented one), partial (it may rotate part of a head)
    [attention]  block, qk_norm, bias (parts that have one where attention_bias is true), window_rule
    [moe]        normalize (where it is not a config key), shared_gate
    [tensors]    canonical name (vault/FORMAT.md) = checkpoint name; {L} is the layer
    [experts]    gate, up, down with {L} and {E}; fused_gate_up, fused_down with {L}; square_is = out_in | in_out
    [skip]       ignore: tensors without a function; optional: tensors that may be left out, with a notice
    [refuse]     config key = what it would switch on that no block does
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from smoe_cli.errors import SmoeError, UnsupportedError

FOLDER = Path(__file__).parent
WINDOW_RULES = ("none", "all", "from_layer", "even_before_layer")
QK_NORMS = ("none", "head", "full")
DEFAULT_RULES = ("heads", "hidden/heads")
_REQUIRED_CONFIG = (
    "hidden",
    "vocab",
    "layers",
    "max_positions",
    "norm_eps",
    "activation",
    "tied_head",
    "heads",
    "kv_heads",
    "head_dim",
)
_REQUIRED = ("name", "model_types", "architectures", "config", "attention", "tensors")
_TABLES = {"config", "rope", "attention", "moe", "tensors", "experts", "skip", "refuse"}
_FIELDS = {"name", "model_types", "architectures", "chat_template"}


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
class Experts:
    """Names of the routed experts' matrices, per expert and fused over all experts of a layer."""

    gate: str
    up: str
    down: str
    fused_gate_up: str = ""
    fused_down: str = ""
    square_is: str = ""


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    config: dict[str, Key]
    tensors: dict[str, str]
    chat_template: str = ""
    theta_default: float | None = None
    partial_rotary: bool = False
    block: str = "gqa"
    qk_norm: str = "none"
    bias: tuple[str, ...] = ()
    window_rule: str = "none"
    normalize: bool | None = None
    shared_gate: bool = False
    experts: Experts | None = None
    ignore: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    refuse: dict[str, str] = field(default_factory=dict)

    def source_name(self, canonical: str) -> str:
        """The checkpoint's name of a canonical trunk tensor; KeyError where the family has none."""
        match = re.match(r"layers\.(\d+)\.", canonical)
        if match is None:
            return self.tensors[canonical]
        pattern = "layers.{L}." + canonical[match.end() :]
        return self.tensors[pattern].replace("{L}", match[1])


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


def _one_of(where: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise SmoeError(f"{where}: {value!r} is not one of {', '.join(known)}")
    return value


def parse_family(text: str, where: str) -> Family:
    """A family from the text of its file. Errors name the file and the key."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SmoeError(f"{where}: {error}") from error
    if unknown := set(raw) - _TABLES - _FIELDS:
        raise SmoeError(f"{where}: unknown keys {', '.join(sorted(unknown))}")
    if missing := [key for key in _REQUIRED if key not in raw]:
        raise SmoeError(f"{where}: missing {', '.join(missing)}")
    config = {name: _key(f"{where} [config] {name}", value) for name, value in raw["config"].items()}
    if missing := [name for name in _REQUIRED_CONFIG if name not in config]:
        raise SmoeError(f"{where} [config]: missing {', '.join(missing)}")
    attention, moe, rope, skip = raw["attention"], raw.get("moe", {}), raw.get("rope", {}), raw.get("skip", {})
    experts = Experts(**raw["experts"]) if "experts" in raw else None
    if experts is not None and experts.fused_gate_up:
        _one_of(f"{where} [experts] square_is", experts.square_is, ("out_in", "in_out"))
    return Family(
        name=raw["name"],
        model_types=tuple(raw["model_types"]),
        architectures=tuple(raw["architectures"]),
        config=config,
        tensors=raw["tensors"],
        chat_template=raw.get("chat_template", ""),
        theta_default=rope.get("theta_default"),
        partial_rotary=rope.get("partial", False),
        block=_one_of(f"{where} [attention] block", attention["block"], ("gqa",)),
        qk_norm=_one_of(f"{where} [attention] qk_norm", attention.get("qk_norm", "none"), QK_NORMS),
        bias=tuple(attention.get("bias", ())),
        window_rule=_one_of(f"{where} [attention] window_rule", attention.get("window_rule", "none"), WINDOW_RULES),
        normalize=moe.get("normalize"),
        shared_gate=moe.get("shared_gate", False),
        experts=experts,
        ignore=tuple(skip.get("ignore", ())),
        optional=tuple(skip.get("optional", ())),
        refuse=raw.get("refuse", {}),
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
