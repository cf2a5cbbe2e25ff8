"""An architecture written down: the trunk tensors its blocks need, and the manifest's ``arch`` (vault/FORMAT.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from smoe_cli.families.model import Arch, Attention, Ffn, Groups, Latent, Layer, Router, TrunkTensor
from smoe_cli.families.recurrent import recurrent_json, recurrent_rows, recurrent_tensors
from smoe_cli.families.rope import Rope

PARTS = ("gate", "up", "down")


def trunk_tensors(arch: Arch) -> list[TrunkTensor]:
    """Every trunk tensor the blocks need, in the order of a forward pass."""
    hidden = arch.hidden
    found = [TrunkTensor("embed.weight", "embed", (arch.vocab, hidden))]
    for index, layer in enumerate(arch.layers):
        prefix = f"layers.{index}."
        found += _norms(arch, prefix + "attn", layer)
        found += _mixer_tensors(prefix, layer.attention, hidden)
        found += _norms(arch, prefix + "ffn", layer)
        found += _ffn_tensors(prefix, layer.ffn, hidden)
    found += _norm(arch, "final_norm")
    if not arch.tied_head:
        found.append(TrunkTensor("head.weight", "head", (arch.vocab, hidden)))
    if arch.head_bias:
        found.append(TrunkTensor("head.bias", "bias", (arch.vocab,)))
    return found


def _norm(arch: Arch, name: str) -> list[TrunkTensor]:
    parts = ("weight", "bias") if arch.norm == "layer" else ("weight",)
    return [TrunkTensor(f"{name}.{part}", "norm", (arch.hidden,)) for part in parts]


def _norms(arch: Arch, block: str, layer: Layer) -> list[TrunkTensor]:
    """The norms around one of a layer's two blocks."""
    before = _norm(arch, f"{block}_norm") if layer.norms != "after" else []
    return before + (_norm(arch, f"{block}_post_norm") if layer.norms != "before" else [])


def _mixer_tensors(prefix: str, attention: Attention, hidden: int) -> list[TrunkTensor]:
    if attention.recurrent:
        return recurrent_tensors(prefix + "recur.", attention.recurrent, hidden)
    if attention.latent:
        return _latent_tensors(prefix + "attn.", attention, attention.latent, hidden)
    return _attention_tensors(prefix + "attn.", attention, hidden)


def _attention_tensors(prefix: str, attention: Attention, hidden: int) -> list[TrunkTensor]:
    q_rows, kv_rows = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
    found = [TrunkTensor(f"{prefix}{part}.weight", "attention", shape) for part, shape in shapes.items()]
    found += [TrunkTensor(f"{prefix}{part}.bias", "bias", (shapes[part][0],)) for part in attention.bias]
    if attention.gated:
        found.append(TrunkTensor(prefix + "gate.weight", "attention", (q_rows, hidden)))
    if attention.sinks:
        found.append(TrunkTensor(prefix + "sinks", "bias", (attention.heads,)))
    if attention.qk_norm not in ("none", "unit"):
        per_head = attention.qk_norm == "head"
        found.append(TrunkTensor(prefix + "q_norm.weight", "norm", (attention.head_dim if per_head else q_rows,)))
        found.append(TrunkTensor(prefix + "k_norm.weight", "norm", (attention.head_dim if per_head else kv_rows,)))
    return found


def _latent_tensors(prefix: str, attention: Attention, latent: Latent, hidden: int) -> list[TrunkTensor]:
    heads, q_rows = attention.heads, attention.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        shapes = {"q_a": (latent.q_rank, hidden), "q_b": (q_rows, latent.q_rank)}
        norms = {"q_a_norm": latent.q_rank, "kv_a_norm": latent.kv_rank}
    else:
        shapes, norms = {"q": (q_rows, hidden)}, {"kv_a_norm": latent.kv_rank}
    shapes |= {
        "kv_a": (latent.kv_rank + latent.rope_dim, hidden),
        "k_up": (heads * latent.kv_rank, latent.nope_dim),
        "v_up": (heads * latent.v_dim, latent.kv_rank),
        "o": (hidden, heads * latent.v_dim),
    }
    found = [TrunkTensor(f"{prefix}{part}.weight", "attention", shape) for part, shape in shapes.items()]
    found += [TrunkTensor(f"{prefix}{part}.bias", "bias", (shapes[part][0],)) for part in attention.bias]
    return found + [TrunkTensor(f"{prefix}{name}.weight", "norm", (rows,)) for name, rows in norms.items()]


def _ffn_tensors(prefix: str, ffn: Ffn, hidden: int) -> list[TrunkTensor]:
    def gated(name: str, role: str, width: int) -> list[TrunkTensor]:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        found = [TrunkTensor(f"{prefix}{name}.{part}.weight", role, shape) for part, shape in shapes.items()]
        if ffn.bias:
            found += [TrunkTensor(f"{prefix}{name}.{part}.bias", "bias", shapes[part][:1]) for part in PARTS]
        return found

    if not ffn.experts:
        return gated("ffn", "ffn", ffn.width)
    found = [TrunkTensor(prefix + "router.weight", "router", (ffn.experts, hidden))]
    if ffn.router.bias:
        found.append(TrunkTensor(prefix + "router.bias", "bias", (ffn.experts,)))
    if ffn.router.correction:
        found.append(TrunkTensor(prefix + "router.correction", "bias", (ffn.experts,)))
    if ffn.shared_width:
        found += gated("shared", "shared", ffn.shared_width)
    if ffn.shared_gate:
        found.append(TrunkTensor(prefix + "shared_gate.weight", "router", (1, hidden)))
    return found


def taken_rows(arch: Arch, needed: TrunkTensor, take: str) -> Groups | None:
    """Which rows of a checkpoint's tensor are meant by a family's ``take`` (families/spec.py); None for all of it."""
    if not take:
        return None
    rows = needed.shape[0]
    if take in ("first_half", "second_half"):
        return Groups(1, 2 * rows, rows if take == "second_half" else 0, rows)
    attention = arch.layers[int(needed.name.split(".")[1])].attention
    if attention.recurrent:
        return recurrent_rows(attention.recurrent, needed, take)
    if take.startswith(("head_", "joined_")) or take == "rotated_pairs":
        return head_rows(attention.heads, attention.kv_heads, attention.head_dim, needed, take)
    latent = attention.latent
    assert latent is not None
    together = latent.nope_dim + latent.v_dim
    if take == "latent_keys":
        return Groups(attention.heads, together, 0, latent.nope_dim, transposed=True)
    return Groups(attention.heads, together, latent.nope_dim, latent.v_dim)


def head_rows(heads: int, kv_heads: int, dim: int, needed: TrunkTensor, take: str) -> Groups:
    """Rows of a matrix that holds something of each head."""
    if take.startswith("joined_"):
        q_rows, kv_rows = heads * dim, kv_heads * dim
        first = {"joined_q": 0, "joined_k": q_rows, "joined_v": q_rows + kv_rows}[take]
        return Groups(1, q_rows + 2 * kv_rows, first, needed.shape[0])
    if take == "rotated_pairs":
        return Groups(needed.shape[0] // dim, dim, 0, dim, pairs=True)
    return Groups(heads, 2 * dim, dim if take == "head_second_half" else 0, dim)


def exact(value: float) -> float:
    """A float32 value as the shortest decimal that comes back exactly."""
    return float(str(np.float32(value)))


def _without(stated: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entries that are not at their default, which the manifest leaves out."""
    return {key: value for key, value in stated.items() if value != defaults[key]}


def arch_json(arch: Arch, encodings: dict[int, dict[str, str]]) -> dict[str, Any]:
    """The manifest's ``arch``. ``encodings`` gives gate, up and down for each routed layer."""
    scales = {
        "norm": arch.norm,
        "embed_scale": exact(arch.embed_scale),
        "residual_scale": exact(arch.residual_scale),
        "logit_scale": exact(arch.logit_scale),
    }
    return {
        "hidden": arch.hidden,
        "vocab": arch.vocab,
        "max_positions": arch.max_positions,
        "norm_eps": exact(arch.norm_eps),
        **_without(scales, {"norm": "rms", "embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}),
        "tied_head": arch.tied_head,
        "ropes": [_rope_json(rope) for rope in arch.ropes],
        "layers": [
            {
                "attention": _attention_json(layer.attention),
                "ffn": _ffn_json(layer.ffn, encodings.get(index, {})),
                **_without({"norms": layer.norms}, {"norms": "before"}),
            }
            for index, layer in enumerate(arch.layers)
        ],
    }


def _rope_json(rope: Rope) -> dict[str, Any]:
    stated: dict[str, Any] = {"inv_freq": [exact(value) for value in rope.inv_freq], "scale": exact(rope.scale)}
    if rope.interleaved:
        stated["interleaved"] = True
    if rope.long_from:
        stated["long_from"] = rope.long_from
        stated["long_inv_freq"] = [exact(value) for value in rope.long_inv_freq]
        stated["long_scale"] = exact(rope.long_scale)
    return stated


def _attention_json(attention: Attention) -> dict[str, Any]:
    if attention.recurrent:
        return recurrent_json(attention.recurrent)
    if attention.latent:
        latent = attention.latent
        return {
            "block": "mla",
            "heads": attention.heads,
            "q_rank": latent.q_rank,
            "kv_rank": latent.kv_rank,
            "nope_dim": latent.nope_dim,
            "rope_dim": latent.rope_dim,
            "v_dim": latent.v_dim,
            "scale": exact(attention.scale),
            "latent_eps": exact(latent.eps),
            "rope": attention.rope,
        }
    return {
        "block": "gqa",
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "scale": exact(attention.scale),
        "window": attention.window,
        "qk_norm": attention.qk_norm,
        "qkv_clip": exact(attention.clip),
        "rope": attention.rope,
        **_attention_extras(attention),
    }


def _attention_extras(attention: Attention) -> dict[str, Any]:
    stated = {
        "norm_after_rope": attention.norm_after_rope,
        "sinks": attention.sinks,
        "gated": attention.gated,
        "chunk": attention.chunk,
        "temperature": exact(attention.temperature),
        "temperature_floor": exact(attention.temperature_floor),
    }
    off = dict.fromkeys(("norm_after_rope", "sinks", "gated"), False)
    return _without(stated, {**off, "chunk": 0, "temperature": 0.0, "temperature_floor": 1.0})


def _ffn_json(ffn: Ffn, encodings: dict[str, str]) -> dict[str, Any]:
    if not ffn.experts:
        return {"block": "ffn", "width": ffn.width, "activation": ffn.activation}
    return {
        "block": "moe",
        "experts": ffn.experts,
        "top_k": ffn.top_k,
        "expert_width": ffn.expert_width,
        "normalize": ffn.router.normalize,
        "scaling": exact(ffn.router.scaling),
        **_router_json(ffn.router),
        "activation": ffn.activation,
        **_without(
            {
                "alpha": exact(ffn.alpha),
                "limit": exact(ffn.limit),
                "expert_bias": ffn.expert_bias,
                "scale_input": ffn.scale_input,
            },
            {"alpha": 1.0, "limit": 0.0, "expert_bias": False, "scale_input": False},
        ),
        "shared_width": ffn.shared_width,
        "shared_gate": ffn.shared_gate,
        "encodings": encodings,
    }


def _router_json(router: Router) -> dict[str, Any]:
    plain = Router()
    names = ("scores", "correction", "correct_logits", "groups", "top_groups", "group_score")
    stated = {name: getattr(router, name) for name in names}
    stated |= {name: exact(getattr(router, name)) for name in ("jitter", "norm_floor", "norm_added")}
    return _without(stated, {name: getattr(plain, name) for name in stated})
