"""A GGUF's metadata as what the rest of convert knows: the family, a config.json, and the family's tensor names there.

A family's ``[gguf]`` table says which architecture it is and what differs; its other tables say what a number is called
in config.json. Sizes are taken from the tensors where those show them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from smoe_cli.convert.gguf import names
from smoe_cli.errors import CorruptError, UnsupportedError
from smoe_cli.families.arch import MAX_LAYERS
from smoe_cli.families.spec import Experts, Family, Key, Source, load_families

Shapes = Mapping[str, tuple[int, ...]]

# Our number -> the keys of a GGUF that state it, behind the architecture's name.
KEYS = {
    "hidden": ("embedding_length",),
    "max_positions": ("context_length",),
    "norm_eps": ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    "heads": ("attention.head_count",),
    "kv_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "width": ("feed_forward_length",),
    "window": ("attention.sliding_window",),
    "experts": ("expert_count",),
    "top_k": ("expert_used_count",),
    "groups": ("expert_group_count",),
    "top_groups": ("expert_group_used_count",),
    "scaling": ("expert_weights_scale",),
    "normalize": ("expert_weights_norm",),
    "clip": ("attention.clamp_kqv",),
    "conv_taps": ("shortconv.l_cache", "ssm.conv_kernel"),
    "recurrent_key_dim": ("ssm.state_size", "kda.head_dim"),
    "recurrent_key_heads": ("ssm.group_count",),
    "attention_scale": ("attention.scale",),
    "embed_scale": ("embedding_scale",),
    "residual_scale": ("residual_scale",),
    "logit_divisor": ("logit_scale",),
    "kv_rank": ("attention.kv_lora_rank",),
    "q_rank": ("attention.q_lora_rank",),
    "rope_dim": ("rope.dimension_count",),
    "v_dim": ("attention.value_length_mla", "attention.value_length"),
}
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax"}
ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
# Config keys of ours: which layers hold experts, which kind each layer is.
MOE_LAYERS, LAYER_KINDS = "moe_layers_of_the_file", "layer_types"


@dataclass(frozen=True)
class Opened:
    """``family`` is the file's view of it: the same model, tensors by their GGUF names."""

    family: Family
    config: dict[str, Any]
    notices: tuple[str, ...] = ()


class Metadata:
    """The pairs of a file; those of its architecture without its name."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self.pairs = pairs
        self.arch = pairs.get("general.architecture")
        if not isinstance(self.arch, str):
            raise CorruptError("the GGUF file states no general.architecture", "it is not a model, or it is damaged")

    def get(self, *keys: str) -> Any:
        """The first of the keys that is there; one number for a list of equal ones."""
        value = next((self.pairs[f"{self.arch}.{key}"] for key in keys if f"{self.arch}.{key}" in self.pairs), None)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value

    def counts(self, key: str) -> list[int]:
        """One number for each layer, or []."""
        value = self.pairs.get(f"{self.arch}.{key}")
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            return []
        return value

    def whole(self, key: str, least: int = 0) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CorruptError(f"the GGUF file states {self.arch}.{key} as {value!r}", "it is damaged")
        return value


def open_config(pairs: Mapping[str, Any], shapes: Shapes) -> Opened:
    """Family and config of a file. UnsupportedError names an architecture that no family is."""
    stated = Metadata(pairs)
    family = _match(stated, shapes)
    blocks = stated.whole("block_count", 1)
    layers = blocks - stated.whole("nextn_predict_layers") if stated.get("nextn_predict_layers") else blocks
    if not 1 <= layers <= MAX_LAYERS or blocks > MAX_LAYERS:
        raise CorruptError(f"the GGUF file states {blocks} blocks, {layers} of them layers", "it is damaged")
    config: dict[str, Any] = {"model_type": family.model_types[0], "architectures": list(family.architectures)}
    view = _view(family, shapes, layers, blocks)
    _put(view, config, "layers", layers)
    for name, keys in KEYS.items():
        _put(view, config, name, stated.get(*keys))
    _sizes(view, config, stated, shapes, layers)
    if view.recurrent:
        _recurrent(view, config, stated, shapes, layers)
    _switches(view, config, stated, shapes)
    _windows(view, config, stated, layers)
    config |= _rope(view, config, stated)
    config |= view.gguf.get("config", {})
    return Opened(view, config)


def _match(stated: Metadata, shapes: Shapes) -> Family:
    known = [family for family in load_families() if family.gguf.get("imported", bool(family.gguf))]
    found = [family for family in known if stated.arch in family.gguf["arch"]]
    if not found:
        listed = sorted({arch for family in known for arch in family.gguf["arch"]})
        raise UnsupportedError(
            f"GGUF architecture {stated.arch!r} is not supported", f"architectures: {', '.join(listed)}"
        )
    held = {stem.removesuffix(".weight").removesuffix(".bias") for stem in names.stems(shapes)}
    held = {re.sub(r"\.\d+$", "_exps", stem) for stem in held}
    fitting = [
        family
        for family in found
        if held.issuperset(family.gguf.get("has", ())) and held.isdisjoint(family.gguf.get("lacks", ()))
    ]
    scores = GATING.get(stated.get("expert_gating_func") or 0)
    if scores:
        fitting = [family for family in fitting if family.scores in (scores, "sparsemixer") or not family.experts]
    elif len(fitting) > 1:
        fitting = [family for family in fitting if family.scores == "softmax"]
    if not fitting:
        raise UnsupportedError(
            f"this form of GGUF architecture {stated.arch!r} is not supported"
            + (f" (experts scored by {scores})" if scores else "")
        )
    return fitting[0]


def _put(view: Family, config: dict[str, Any], name: str, value: Any) -> None:
    """Under the key by which the family knows it, if it does."""
    if value is not None and name in view.config:
        config[view.config[name].keys[0]] = value


def _view(family: Family, shapes: Shapes, layers: int, blocks: int) -> Family:
    """The family as this file stores it: names, orientation, order of rows, which layers have experts."""
    held = {re.sub(r"^blk\.\d+\.", "blk.{L}.", name) for name in shapes}
    tensors = {}
    for canonical in family.tensors:
        options = names.sources(family, canonical) or (Source(""),)
        tensors[canonical] = next((option for option in options if option.name in held), options[0])
    config = {name: key for name, key in family.config.items() if name not in ("ffn_types", "q_rank")}
    if "q_rank" in family.config:
        config["q_rank"] = Key(family.config["q_rank"].keys, default=0, has_default=True)
    config["moe_layers"] = Key((MOE_LAYERS,), default=[], has_default=True)
    if family.recurrent:
        config["layer_types"] = Key((LAYER_KINDS,))
    return replace(
        family,
        tensors=tensors,
        config=config,
        norm_offset=0.0,  # the file's norms have it in them
        negative_rates=family.recurrent in ("delta", "mamba", "mamba2"),
        tiled=family.gguf.get("tiled", False),
        experts=_experts(family) if family.experts else None,
        ignore=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "*.input_scale"),
        optional=("blk.*.nextn.*", *(f"blk.{layer}.*" for layer in range(layers, blocks))),
        modalities=("v.*", "mm.*", "a.*"),
        prefix={},
        bias=tuple(part for part in family.bias if any(_bias(part, held))),
    )


def _bias(part: str, held: set[str]) -> list[bool]:
    return [name in held for name in names.alternatives(f"layers.{{L}}.attn.{part}.bias")]


def _experts(family: Family) -> Experts:
    assert family.experts is not None
    biased = bool(family.experts.down_bias)
    stacked, single = names.EXPERTS, names.SEPARATE
    return Experts(
        gate=(stacked["gate"], single["gate"]),
        up=(stacked["up"], single["up"]),
        down=(stacked["down"], single["down"]),
        fused_gate_up=(names.FUSED,),
        fused_down=(stacked["down"],),
        square_is="out_in",
        gate_bias=names.EXPERT_BIASES["gate"] if biased else "",
        up_bias=names.EXPERT_BIASES["up"] if biased else "",
        down_bias=names.EXPERT_BIASES["down"] if biased else "",
    )


def _sizes(view: Family, config: dict[str, Any], stated: Metadata, shapes: Shapes, layers: int) -> None:
    """What the tensors show."""
    embed = shapes.get("token_embd.weight")
    if embed is None or len(embed) != 2:
        raise CorruptError("the GGUF file holds no token_embd.weight", "it is not a whole model")
    _put(view, config, "vocab", embed[0])
    _put(view, config, "tied_head", "output.weight" not in shapes)
    routed = {name: int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d+)\.ffn_gate_inp\.weight", name))}
    moe_layers = sorted(layer for layer in routed.values() if layer < layers)
    config[MOE_LAYERS] = moe_layers
    if moe_layers:
        _put(view, config, "first_dense", moe_layers[0])
    if not stated.get("expert_count"):
        _put(view, config, "experts", 0)
    if stated.get("expert_count") and not moe_layers:
        raise CorruptError(f"the GGUF file states {stated.arch}.expert_count and holds no experts", "it is damaged")
    down = _first(shapes, r"blk\.\d+\.ffn_down_exps\.weight") or _first(shapes, r"blk\.\d+\.ffn_down\.\d+\.weight")
    width = down[-1] if down else 0
    if width:
        _put(view, config, "expert_width", width)
    shared = _first(shapes, r"blk\.\d+\.ffn_down_shexp\.weight")
    if shared and width and view.shared_like_experts:
        if shared[-1] % width:
            raise CorruptError(f"an always-on expert of {shared[-1]} values beside experts of {width}")
        _put(view, config, "shared_width", shared[-1] // width)
    else:
        _put(view, config, "shared_width", shared[-1] if shared else 0)
    dense = _first(shapes, r"blk\.\d+\.ffn_down\.weight")
    if dense:
        _put(view, config, "width", dense[-1])
    if "nope_dim" in view.config:
        rotated = stated.whole("rope.dimension_count", 1)
        key = stated.get("attention.key_length_mla", "attention.key_length")
        _put(view, config, "nope_dim", key - rotated if isinstance(key, int) else None)
    if "head_dim" in view.config and stated.get("attention.key_length") is None:
        heads = stated.whole("attention.head_count", 1)
        _put(view, config, "head_dim", stated.whole("embedding_length", 1) // heads)


def _first(shapes: Shapes, pattern: str) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if re.fullmatch(pattern, name)), None)


def _recurrent(view: Family, config: dict[str, Any], stated: Metadata, shapes: Shapes, layers: int) -> None:
    """Which layers are recurrent, and the numbers of their block that are not stated as such."""
    kinds = _recurrent_layers(view, stated, layers)
    config[LAYER_KINDS] = [view.recurrent_types[0] if yes else view.attention_types[0] for yes in kinds]
    _put_period(view, config, ("attention_every", "attention_at"), [not yes for yes in kinds])
    if "sparse_at" in view.config:
        _put_period(
            view, config, ("sparse_step", "sparse_at"), [index in config[MOE_LAYERS] for index in range(layers)]
        )
    if heads := [count for count in stated.counts("attention.head_count_kv") if count]:
        _put(view, config, "kv_heads", max(heads))  # none where a layer has no attention
    held = names.stems(shapes)
    _put(view, config, "conv_bias", bool({"shortconv.conv.bias", "ssm_conv1d.bias"} & held))
    _put(view, config, "recurrent_bias", bool({"shortconv.in_proj.bias", "ssm_in.bias"} & held))
    if "rope_kind" in view.config:
        _put(view, config, "rope_kind", "rope" if stated.get("rope.scaling.finetuned") is not False else "nope")
    if view.recurrent == "short_conv":
        return
    if view.channel_decay:
        heads_in_all = stated.whole("attention.head_count", 1)
        for name in ("recurrent_heads", "recurrent_key_heads"):
            _put(view, config, name, heads_in_all)
        for name in ("recurrent_value_dim", "recurrent_rank"):
            _put(view, config, name, stated.whole("kda.head_dim", 1))
        return
    inner, steps = stated.whole("ssm.inner_size", 1), stated.whole("ssm.time_step_rank", 1)
    _put(view, config, "recurrent_expand", inner // stated.whole("embedding_length", 1))
    if view.recurrent == "mamba":
        _put(view, config, "recurrent_rank", steps)
    else:
        _put(view, config, "recurrent_heads", steps)
        _put(view, config, "recurrent_value_dim", inner // steps)


def _put_period(view: Family, config: dict[str, Any], keys: tuple[str, str], chosen: list[bool]) -> None:
    """For config.json to be whole, where the layers are every so many: that number, and the first."""
    places = [index for index, yes in enumerate(chosen) if yes]
    every = places[1] - places[0] if len(places) > 1 else len(chosen)
    if places and chosen == [index % every == places[0] for index in range(len(chosen))]:
        _put(view, config, keys[0], every)
        _put(view, config, keys[1], places[0])


def _recurrent_layers(view: Family, stated: Metadata, layers: int) -> list[bool]:
    """By a list of them, or by every how many layers there is attention; else by the heads of keys that layers have."""
    if view.gguf.get("recurrent_list"):
        listed = stated.counts("attention.recurrent_layers")
        every = stated.get("full_attention_interval") or 4
        found = listed or [(index + 1) % every != 0 for index in range(layers)]
    else:
        found = [not count for count in stated.counts("attention.head_count_kv")]
    if len(found) < layers:
        raise CorruptError(f"the GGUF file states which of {len(found)} layers are recurrent, but has {layers}")
    return [bool(each) for each in found[:layers]]


def _switches(view: Family, config: dict[str, Any], stated: Metadata, shapes: Shapes) -> None:
    held = names.stems(shapes)
    _put(view, config, "attention_bias", bool(view.bias))
    _put(view, config, "ffn_bias", bool({"ffn_gate.bias", "ffn_gate_shexp.bias"} & held))
    normed = stated.get("expert_count") != 128 if view.qk_norm == "unit" else "attn_q_norm.weight" in held
    _put(view, config, "qk_norm_on", normed)
    if (stated.get("expert_group_count") or 0) > 1:
        _put(view, config, "group_method", "group_limited_greedy" if view.scores == "softmax" else "noaux_tc")
    _put(view, config, "correction_on", any(stem.startswith("exp_probs_b") for stem in held))
    _put(view, config, "head_bias", "output.bias" in shapes)
    _put(view, config, "window_on", bool(stated.get("attention.sliding_window")))
    cap = stated.get("final_logit_softcapping")
    if cap:
        config["final_logit_softcapping"] = cap
    if "scale_like" in view.config:
        wide = stated.whole("block_count") in view.gguf.get("scale_like_hidden", ())
        per_head = stated.whole("embedding_length", 1) // stated.whole("attention.head_count", 1)
        _put(view, config, "scale_like", per_head if wide else config.get(view.config["head_dim"].keys[0]))


def _windows(view: Family, config: dict[str, Any], stated: Metadata, layers: int) -> None:
    """Which layers have a window, where the file says so; the family's own rule holds otherwise."""
    pattern = stated.pairs.get(f"{stated.arch}.attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [(index + 1) % pattern != 0 for index in range(layers)]
    if isinstance(pattern, list) and len(pattern) >= layers:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]
        _put(view, config, "layer_types", kinds)
    elif view.window_rule in ("none", "listed") or not stated.get("attention.sliding_window"):
        _put(view, config, "window", 0)


def _rope(view: Family, config: dict[str, Any], stated: Metadata) -> dict[str, Any]:
    """rope_parameters, and what of them stands elsewhere."""
    kind = stated.get("rope.scaling.type") or ("linear" if stated.get("rope.scale_linear") else "none")
    if kind not in ROPE_TYPES:
        raise UnsupportedError(f"GGUF rope scaling {kind!r} is not supported", f"supported: {', '.join(ROPE_TYPES)}")
    rope: dict[str, Any] = {"rope_type": ROPE_TYPES[kind]}
    base = stated.get("rope.freq_base")
    rope["rope_theta"] = 10000.0 if base is None else base
    factor = stated.get("rope.scaling.factor", "rope.scale_linear")
    if kind in ("linear", "yarn"):
        if not factor:
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        else:
            rope["factor"] = factor
    if rope["rope_type"] == "yarn":
        rope |= _yarn(view, stated)
    dimensions, key = stated.get("rope.dimension_count"), view.config.get("head_dim")
    head = config.get(key.keys[0]) if key else None
    if view.partial_rotary and isinstance(dimensions, int) and isinstance(head, int) and head:
        rope["partial_rotary_factor"] = dimensions / head
    if not view.by_type:
        return {"rope_parameters": rope}
    local = stated.get("rope.freq_base_swa")
    nested = {"full_attention": rope}
    if local is not None:
        nested["sliding_attention"] = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": nested}


def _yarn(view: Family, stated: Metadata) -> dict[str, Any]:
    keys = {
        "original_max_position_embeddings": ("rope.scaling.original_context_length",),
        "beta_fast": ("rope.scaling.yarn_beta_fast",),
        "beta_slow": ("rope.scaling.yarn_beta_slow",),
        "attention_factor": ("rope.scaling.yarn_attn_factor",),
    }
    found = {name: stated.get(*names_) for name, names_ in keys.items() if stated.get(*names_) is not None}
    log = stated.get("rope.scaling.yarn_log_multiplier")
    if log and view.latent_scale:
        found |= {"mscale": log * 10.0, "mscale_all_dim": log * 10.0}
    return {**found, **view.gguf.get("rope", {})}


def with_factors(config: dict[str, Any], factors: dict[str, list[float]], attention: float | None) -> None:
    """Puts the file's own divisors of the frequencies (rope_freqs, rope_factors_long, rope_factors_short) in."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    every = factors.get("rope_freqs.weight")
    positions = config.get("max_position_embeddings", 1 << 20)
    if every:
        rope |= {"rope_type": "longrope", "short_factor": every, "long_factor": every, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = positions
    long, short = factors.get("rope_factors_long.weight"), factors.get("rope_factors_short.weight")
    if long and short:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if attention:
            rope["attention_factor"] = attention
