"""Which GGUF tensor is which of ours. The names are the same in every architecture, but for a few alternatives."""

from __future__ import annotations

import re
from collections.abc import Collection

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
    "recur.in": ("shortconv.in_proj",),
    "recur.conv": ("shortconv.conv",),
    "recur.out": ("shortconv.out_proj",),
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
LATE_NORM = ("glm4moe", "gpt-oss")  # whose norm before the feed-forward block has the second of its names
EXPERTS = {part: f"blk.{{L}}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
SEPARATE = {part: f"blk.{{L}}.ffn_{part}.{{E}}.weight" for part in ("gate", "up", "down")}  # files of 2023
FUSED = "blk.{L}.ffn_gate_up_exps.weight"
EXPERT_BIASES = {part: f"blk.{{L}}.ffn_{part}_exps.bias" for part in ("gate", "up", "down")}


def stems(names: Collection[str]) -> set[str]:
    """Tensor names without the number of their block: what kinds of tensors a file holds."""
    return {re.sub(r"^blk\.\d+\.", "", name) for name in names}


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
