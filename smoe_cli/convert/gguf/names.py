"""Which GGUF tensor is which of ours. The names are the same in every architecture, but for a few alternatives."""

from __future__ import annotations

import re
from collections.abc import Collection

from smoe_cli.families.spec import Family, Source, read_source

TRUNK = {"embed": ("token_embd",), "final_norm": ("output_norm", "token_embd_norm"), "head": ("output",)}
# Part of a layer -> names in GGUF, the usual one first.
LAYER = {
    "attn_norm": ("attn_norm",),
    "attn_post_norm": ("post_attention_norm", "attn_post_norm"),
    "ffn_norm": ("ffn_norm", "post_attention_norm"),
    "ffn_post_norm": ("post_ffw_norm", "ffn_post_norm"),
    "attn.q": ("attn_q",),
    "attn.k": ("attn_k",),
    "attn.v": ("attn_v",),
    "attn.o": ("attn_output",),
    "attn.gate": ("attn_gate",),
    "attn.q_norm": ("attn_q_norm",),
    "attn.k_norm": ("attn_k_norm",),
    "attn.q_a": ("attn_q_a",),
    "attn.q_b": ("attn_q_b",),
    "attn.q_a_norm": ("attn_q_a_norm",),
    "attn.kv_a": ("attn_kv_a_mqa",),
    "attn.kv_a_norm": ("attn_kv_a_norm",),
    "attn.k_up": ("attn_k_b", "attn_kv_b"),
    "attn.v_up": ("attn_v_b", "attn_kv_b"),
    "ffn.gate": ("ffn_gate",),
    "ffn.up": ("ffn_up",),
    "ffn.down": ("ffn_down",),
    "router": ("ffn_gate_inp",),
    "shared.gate": ("ffn_gate_shexp",),
    "shared.up": ("ffn_up_shexp",),
    "shared.down": ("ffn_down_shexp",),
    "shared_gate": ("ffn_gate_inp_shexp",),
}
WHOLE = {  # names that end in neither .weight nor .bias here, or not in the same there
    "attn.sinks": ("attn_sinks.weight",),
    "router.correction": ("exp_probs_b.bias", "exp_probs_b", "ffn_gate_inp.correction"),
}
# Parts of recurrent blocks; what differs in a family stands in its [gguf.tensors].
RECURRENT: dict[str, dict[str, Source]] = {
    "": {},
    "short_conv": {
        "recur.in.weight": Source("shortconv.in_proj.weight"),
        "recur.conv.weight": Source("shortconv.conv.weight", "turned"),
        "recur.out.weight": Source("shortconv.out_proj.weight"),
    },
    "mamba": {
        "recur.in.weight": Source("ssm_in.weight"),
        "recur.conv.weight": Source("ssm_conv1d.weight", "turned"),
        "recur.conv.bias": Source("ssm_conv1d.bias"),
        "recur.x.weight": Source("ssm_x.weight"),
        "recur.dt.weight": Source("ssm_dt.weight"),
        "recur.dt.bias": Source("ssm_dt.bias"),
        "recur.dt_norm.weight": Source("ssm_dt_norm.weight"),
        "recur.k_norm.weight": Source("ssm_b_norm.weight"),
        "recur.q_norm.weight": Source("ssm_c_norm.weight"),
        "recur.rate": Source("ssm_a", "turned"),
        "recur.skip": Source("ssm_d"),
        "recur.out.weight": Source("ssm_out.weight"),
    },
    "mamba2": {
        "recur.in.weight": Source("ssm_in.weight"),
        "recur.conv.weight": Source("ssm_conv1d.weight", "turned"),
        "recur.conv.bias": Source("ssm_conv1d.bias"),
        "recur.dt.bias": Source("ssm_dt.bias"),
        "recur.rate": Source("ssm_a"),
        "recur.skip": Source("ssm_d"),
        "recur.norm.weight": Source("ssm_norm.weight"),
        "recur.out.weight": Source("ssm_out.weight"),
    },
    "delta": {
        **{f"recur.{part}.weight": Source("attn_qkv.weight", f"joined_{part}") for part in "qkv"},
        **{f"recur.{part}_conv.weight": Source("ssm_conv1d.weight", f"turned_{part}") for part in "qkv"},
        "recur.gate.weight": Source("attn_gate.weight"),
        "recur.beta.weight": Source("ssm_beta.weight"),
        "recur.decay.weight": Source("ssm_alpha.weight"),
        "recur.decay.bias": Source("ssm_dt.bias"),
        "recur.rate": Source("ssm_a"),
        "recur.norm.weight": Source("ssm_norm.weight"),
        "recur.out.weight": Source("ssm_out.weight"),
    },
}
LATE_NORM = (
    "glm4moe",
    "gpt-oss",
    "qwen3next",
    "qwen35moe",
)  # whose norm before the feed-forward block has its second name
EXPERTS = {part: f"blk.{{L}}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
SEPARATE = {part: f"blk.{{L}}.ffn_{part}.{{E}}.weight" for part in ("gate", "up", "down")}  # files of 2023
FUSED = "blk.{L}.ffn_gate_up_exps.weight"
EXPERT_BIASES = {part: f"blk.{{L}}.ffn_{part}_exps.bias" for part in ("gate", "up", "down")}


def stems(names: Collection[str]) -> set[str]:
    """Tensor names without the number of their block: what kinds of tensors a file holds."""
    return {re.sub(r"^blk\.\d+\.", "", name) for name in names}


def sources(family: Family, canonical: str) -> tuple[Source, ...]:
    """Where a tensor may stand in files of a family's architecture, with {L}: as they are written today first; () where
    they have no place for it."""
    part = canonical.removeprefix("layers.{L}.")
    stated = family.gguf.get("tensors", {}).get(part)
    if stated is not None:
        found = [read_source(part, each) for each in (stated if isinstance(stated, list) else [stated])]
        block = "blk.{L}." if part != canonical else ""
        return tuple(Source(block + each.name, each.take) for each in found)
    if part.startswith("recur."):
        own = RECURRENT[family.recurrent].get(part)
        return (Source("blk.{L}." + own.name, own.take),) if own else ()
    names = alternatives(canonical)
    if part.startswith("ffn_norm.") and set(LATE_NORM) & set(family.gguf["arch"]):
        names = names[::-1]
    return tuple(Source(name, _take(family, canonical, name)) for name in names)


def _take(family: Family, canonical: str, name: str) -> str:
    if name.endswith("attn_kv_b.weight"):
        return "latent_keys" if "k_up" in canonical else "latent_values"
    pairs = family.gguf.get("pairs", False) and re.search(r"attn\.[qk]\.(weight|bias)$", canonical)
    return "rotated_pairs" if pairs else ""


def alternatives(canonical: str) -> tuple[str, ...]:
    """GGUF names, with {L}, that a trunk tensor may have; canonical with {L} too (layers.{L}.attn.q.weight)."""
    if not canonical.startswith("layers.{L}."):
        stem, _, end = canonical.rpartition(".")
        return tuple(f"{name}.{end}" for name in TRUNK.get(stem, ()))
    part = canonical.removeprefix("layers.{L}.")
    if part in WHOLE:
        return tuple("blk.{L}." + name for name in WHOLE[part])
    stem, _, end = part.rpartition(".")
    return tuple(f"blk.{{L}}.{name}.{end}" for name in LAYER.get(stem, ()))
