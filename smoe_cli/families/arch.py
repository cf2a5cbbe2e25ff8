"""From a family and a config.json to numbers: the architecture as the manifest states it, and the trunk tensors its
blocks need. Refuses what no block can compute. Pure: reads nothing but its arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from smoe_cli.errors import CorruptError, UnsupportedError
from smoe_cli.families.layout import arch_json, exact, trunk_tensors
from smoe_cli.families.model import Arch, Attention, Ffn, Latent, Layer, Router, TrunkTensor
from smoe_cli.families.numbers import LIMIT, Numbers
from smoe_cli.families.recurrent import recurrent_layers, recurrent_of
from smoe_cli.families.rope import Rope, RopeInput, resolve_rope, rope_settings
from smoe_cli.families.spec import Family

__all__ = ["Arch", "Attention", "Ffn", "Layer", "TrunkTensor", "arch_json", "exact", "resolve", "trunk_tensors"]

# No real model is near these; a number above is a damaged config.
MAX_LAYERS, MAX_EXPERTS = 4096, 1 << 16
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LATENT_ROWS = 16  # kernels take whole panels of rows, and latent attention multiplies each head's on its own


def resolve(family: Family, config: dict[str, Any]) -> Arch:
    """The architecture of a checkpoint. CorruptError names a missing or absurd number."""
    numbers = Numbers(family, config)
    _refuse(family, numbers)
    layers = numbers.integer("layers", most=MAX_LAYERS)
    ropes = _ropes(family, numbers)
    return Arch(
        family=family.name,
        model_type=str(numbers.config.get("model_type") or family.model_types[0]),
        hidden=numbers.integer("hidden"),
        vocab=numbers.integer("vocab"),
        max_positions=ropes[0].max_positions,
        norm_eps=numbers.number("norm_eps"),
        tied_head=tied_head(family, config),
        ropes=ropes,
        layers=tuple(
            Layer(attention, _ffn(family, numbers, index), family.norm_place)
            for index, attention in enumerate(_attentions(family, numbers, layers))
        ),
        norm_offset=family.norm_offset,
        norm=family.norm,
        head_bias=numbers.flag("head_bias"),
        embed_scale=numbers.integer("hidden") ** 0.5
        if numbers.flag("embed_scaled")
        else numbers.number("embed_scale", 1.0),
        residual_scale=numbers.number("residual_scale", 1.0),
        logit_scale=1.0 / (numbers.number("logit_divisor", 1.0) or 1.0),
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


def _refuse(family: Family, numbers: Numbers) -> None:
    for key, meaning in family.refuse.items():
        if numbers.config.get(key):
            raise UnsupportedError(f"config.json: {key} switches on {meaning}, which is not supported")
    for key, allowed in family.require.items():
        found = numbers.config.get(key)
        known = allowed if isinstance(allowed, list) else [allowed]
        if found is not None and any(value not in known for value in (found if isinstance(found, list) else [found])):
            raise UnsupportedError(f"config.json: {key} {found!r} is not supported", f"supported: {known}")
    activation = numbers.raw("activation")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: activation {activation!r} is not supported", f"supported: {', '.join(ACTIVATIONS)}"
        )


def _ropes(family: Family, numbers: Numbers) -> tuple[Rope, ...]:
    """What every layer rotates by; then, where the family has it, what its layers with a window rotate by, or that some
    do not rotate at all."""
    config = numbers.config
    if family.unrotated or (numbers.has("rope_kind") and numbers.raw("rope_kind") != "rope"):
        return (Rope((), 1.0, numbers.integer("max_positions")),)
    if thetas := _thetas(numbers):
        settings = rope_settings(config)
        each = {theta: {**config, "rope_parameters": {**settings, "rope_theta": theta}} for theta in thetas if theta}
        still = Rope((), 1.0, numbers.integer("max_positions"))
        return tuple(_rope(family, numbers, each[theta]) if theta else still for theta in thetas)
    if numbers.has("rotating") or family.still:
        return _rope(family, numbers, config), Rope((), 1.0, numbers.integer("max_positions"))
    if not family.by_type:
        return (_rope(family, numbers, config),)
    stated = config.get("rope_parameters") or {}
    nested = {kind: stated[kind] for kind in ("full_attention", "sliding_attention") if stated.get(kind)}
    if nested:
        every = {**config, "rope_theta": None, "rope_scaling": None}
        full, local = (
            {**every, "rope_parameters": nested.get(kind)} for kind in ("full_attention", "sliding_attention")
        )
    else:
        full, local = config, {"rope_theta": config.get("rope_local_base_freq")}
    local_family = replace(family, theta_default=family.local_theta)
    return _rope(family, numbers, full), _rope(local_family, numbers, local)


def _thetas(numbers: Numbers) -> list[float]:
    """The distinct bases of layers that each have their own, 0 where a layer does not rotate; [] of other models."""
    return list(dict.fromkeys(numbers.numbers("layer_thetas")))


def _rope(family: Family, numbers: Numbers, config: dict[str, Any]) -> Rope:
    given = RopeInput(
        head_dim=numbers.integer("rope_dim" if family.rope_dim == "rope_dim" else "head_dim"),
        max_positions=numbers.integer("max_positions"),
        theta_default=family.theta_default,
        partial_allowed=family.partial_rotary,
        partial_default=family.partial_default,
        interleaved=numbers.flag("rope_interleaved") if numbers.has("rope_interleaved") else family.interleaved,
    )
    if numbers.has("rotary_dim") and numbers.raw("rotary_dim"):  # an older way to say partial_rotary_factor
        config = {"partial_rotary_factor": numbers.integer("rotary_dim") / given.head_dim, **config}
    return resolve_rope(config, given, numbers.notices)


def _windows(family: Family, numbers: Numbers, layers: int) -> list[int]:
    """Window of each layer, 0 where a query sees everything."""
    window = numbers.integer("window", least=0)
    enabled = numbers.flag("window_on") if numbers.has("window_on") else True
    if family.window_rule == "none" or not enabled or not window:
        return [0] * layers
    known = {"full_attention", "sliding_attention", *(family.recurrent_types if family.recurrent else ())}
    types = numbers.names("layer_types", layers, known)
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    if family.window_rule == "listed":
        return [0] * layers
    first = numbers.integer("window_layers", least=0)
    if family.window_rule == "all_but_every":
        every = numbers.integer("window_pattern")
        return [window if (index + 1) % every else 0 for index in range(layers)]
    if family.window_rule == "even":
        return [0 if index % 2 else window for index in range(layers)]
    if family.window_rule == "from_layer":
        return [window if index >= first else 0 for index in range(layers)]
    if family.window_rule == "even_before_layer":
        return [window if index % 2 == 0 and index < first else 0 for index in range(layers)]
    return [window] * layers


def _attentions(family: Family, numbers: Numbers, layers: int) -> list[Attention]:
    windows = _windows(family, numbers, layers)
    found = _rotated(family, numbers, [_attention(family, numbers, window) for window in windows])
    if not family.recurrent:
        return found
    recurrent = Attention(0, 0, 0, 0.0, recurrent=recurrent_of(family, numbers))
    recurs = recurrent_layers(family, numbers, layers)
    return [recurrent if yes else each for yes, each in zip(recurs, found, strict=True)]


def _rotated(family: Family, numbers: Numbers, found: list[Attention]) -> list[Attention]:
    """Each layer with its rotation, where not all have the first."""
    if thetas := numbers.numbers("layer_thetas"):
        if len(thetas) != len(found):
            raise CorruptError(f"config.json: {numbers.key('layer_thetas')} is not one number for each layer")
        return [replace(each, rope=_thetas(numbers).index(thetas[i])) for i, each in enumerate(found)]
    if family.by_type:
        return [replace(each, rope=1 if each.window else 0) for each in found]
    if family.still and any(each.window for each in found):
        return [replace(each, rope=0 if each.window else 1) for each in found]
    return _rotating(numbers, found) if numbers.has("rotating") else found


def _rotating(numbers: Numbers, found: list[Attention]) -> list[Attention]:
    """Layers that rotate see one chunk of positions; the others everything, sharper with the distance."""
    stated, every = numbers.integers("rotating"), numbers.integer("not_rotating_every")
    rotates = stated or [int((index + 1) % every != 0) for index in range(len(found))]
    if len(rotates) != len(found):
        raise CorruptError(f"config.json: {numbers.key('rotating')} has {len(rotates)} entries for {len(found)} layers")
    chunk, tuned = numbers.integer("chunk", least=0), bool(numbers.raw("temperature_on"))
    heat = {"temperature": numbers.number("temperature"), "temperature_floor": numbers.number("temperature_floor")}
    still = {"rope": 1, "qk_norm": "none", **(heat if tuned else {})}
    return [
        replace(each, chunk=chunk) if turns else replace(each, **still)  # type: ignore[arg-type]
        for each, turns in zip(found, rotates, strict=True)
    ]


def _attention(family: Family, numbers: Numbers, window: int) -> Attention:
    biased = numbers.flag("attention_bias") if numbers.has("attention_bias") else bool(family.bias)
    bias = family.bias if biased else ()
    heads = numbers.integer("heads")
    if family.block == "mla":
        return _latent_attention(family, numbers, heads, bias)
    kv_heads, head_dim = numbers.integer("kv_heads"), numbers.integer("head_dim")
    if heads % kv_heads:
        raise CorruptError(f"config.json: {heads} query heads do not divide by {kv_heads} key-value heads")
    normed = numbers.flag("qk_norm_on") if numbers.has("qk_norm_on") else True
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=_scale(numbers, head_dim),
        window=window,
        qk_norm=family.qk_norm if normed else "none",
        norm_after_rope=family.norm_after_rope,
        sinks=family.sinks,
        gated=family.gated,
        clip=numbers.number("clip"),
        bias=bias,
    )


def _scale(numbers: Numbers, head_dim: int) -> float:
    if numbers.has("attention_scale"):
        return numbers.number("attention_scale")
    return float((numbers.number("scale_like") or head_dim) ** -0.5)


def _latent_attention(family: Family, numbers: Numbers, heads: int, bias: tuple[str, ...]) -> Attention:
    latent = Latent(
        q_rank=numbers.integer("q_rank", least=0),
        kv_rank=numbers.integer("kv_rank"),
        nope_dim=numbers.integer("nope_dim"),
        rope_dim=numbers.integer("rope_dim"),
        v_dim=numbers.integer("v_dim"),
        eps=family.latent_eps,
    )
    for name in ("kv_rank", "v_dim"):
        if getattr(latent, name) % LATENT_ROWS:
            raise UnsupportedError(f"config.json: {numbers.key(name)} is not a multiple of {LATENT_ROWS}")
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    settings = rope_settings(numbers.config)
    if family.latent_scale and settings["rope_type"] != "default" and settings.get("mscale_all_dim"):
        mscale = 0.1 * float(settings["mscale_all_dim"]) * math.log(max(1.0, float(settings["factor"]))) + 1.0
        scale *= mscale * mscale
    if not latent.q_rank:
        bias = tuple(part for part in bias if part != "q_a")
    return Attention(heads, 1, latent.kv_rank + latent.rope_dim, scale, bias=bias, latent=latent)


def _is_dense(numbers: Numbers, index: int) -> bool:
    """Whether a layer of a family with experts has none, by the rules there are."""
    types = numbers.names("ffn_types", numbers.integer("layers"), {"dense", "sparse"})
    if types:
        return types[index] == "dense"
    listed = numbers.integers("moe_layers")
    if listed:
        return index not in listed
    step = numbers.integer("sparse_step") if numbers.has("sparse_step") else 1
    at = numbers.integer("sparse_at", least=0) if numbers.has("sparse_at") else step - 1
    if index in numbers.integers("dense_layers") or index % step != at:
        return True
    if index < numbers.integer("first_dense", least=0):
        return True
    last = numbers.integer("last_moe", least=-1) if numbers.has("last_moe") else -1
    return 0 <= last < index


def _ffn(family: Family, numbers: Numbers, index: int) -> Ffn:
    experts = numbers.integer("experts", least=0, most=MAX_EXPERTS, layer=index)
    bias = numbers.flag("ffn_bias")
    if not experts or _is_dense(numbers, index):
        if not numbers.has("width"):
            raise CorruptError(f"config.json makes layer {index} dense, which family {family.name} has no form for")
        return Ffn(width=numbers.integer("width"), bias=bias, activation=ACTIVATIONS[numbers.raw("activation")])
    top_k = numbers.integer("top_k", layer=index)
    if top_k > experts:
        raise CorruptError(f"config.json: {top_k} experts per token of {experts}")
    expert_width = numbers.integer("expert_width", layer=index)
    shared_width = numbers.integer("shared_width", least=0)
    if family.shared_like_experts:
        shared_width *= expert_width
    if shared_width > LIMIT:
        raise CorruptError(f"config.json: an always-on expert of {shared_width} values is not one of a model")
    return Ffn(
        experts=experts,
        top_k=top_k,
        expert_width=expert_width,
        router=_router(family, numbers, experts, top_k),
        shared_width=shared_width,
        shared_gate=family.shared_gate and shared_width > 0,
        bias=bias and shared_width > 0,
        activation=family.activation or ACTIVATIONS[numbers.raw("activation")],
        scale_input=family.scale_input,
        alpha=numbers.number("swiglu_alpha", 1.0),
        limit=numbers.number("swiglu_limit"),
        expert_bias=bool(family.experts and family.experts.down_bias),
    )


def _router(family: Family, numbers: Numbers, experts: int, top_k: int) -> Router:
    groups, top_groups = numbers.integer("groups"), numbers.integer("top_groups")
    if not groups or (numbers.has("group_method") and numbers.raw("group_method") == "greedy"):
        groups = top_groups = 1
    if experts % groups or not 1 <= top_groups <= groups or experts // groups * top_groups < top_k:
        raise CorruptError(f"config.json: {top_k} of {experts} experts from {top_groups} of {groups} groups")
    return Router(
        scores=family.scores,
        correction=family.correction and (numbers.flag("correction_on") if numbers.has("correction_on") else True),
        bias=family.router_bias,
        groups=groups,
        top_groups=top_groups,
        group_score=family.group_score if groups > 1 else "best",
        jitter=numbers.number("jitter"),
        normalize=numbers.flag("normalize") if family.normalize is None else family.normalize,
        norm_floor=numbers.number("norm_floor") if numbers.has("norm_floor") else family.norm_floor,
        norm_added=family.norm_added,
        correct_logits=family.correct_logits,
        scaling=numbers.number("scaling", 1.0),
    )
