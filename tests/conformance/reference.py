"""The reference side of the conformance tests: transformers on a tiny random checkpoint, optionally with every matrix
replaced by what an encoding makes of it, so that only the arithmetic of the engine is compared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from smoe_cli import _core

# Matrices that convert never quantises below source precision, and vectors that are stored with an axis of one.
KEPT = (
    "conv.conv.weight",
    "conv1d.weight",
    "A_log",
    "in_proj_ba.",
    "in_proj_a.",
    "in_proj_b.",
    ".b_proj.",
    "shared_expert_gate.weight",
    ".mlp.gate.",
    ".gate.weight",
    ".router.",
    "e_score_correction_bias",
)

TURNED = ("gpt_oss", "llama4_text", "aria_text")  # families whose experts stand as [experts, in, out]


@dataclass
class Reference:
    logits: np.ndarray  # float32 [positions, vocab]
    # Per MoE layer: the chosen experts as sets, int [positions, top_k] sorted.
    routes: list[np.ndarray] = field(default_factory=list)


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


def round_trip(encoding: str, weight: np.ndarray) -> np.ndarray:
    """``weight`` [rows, cols] as the encoding (or its fallback for this row length) gives it back."""
    used = _core.fallback(encoding, weight.shape[1])
    data = _core.encode(used, np.ascontiguousarray(weight, dtype=np.float32))
    return np.asarray(_core.decode(used, data, *weight.shape)).reshape(weight.shape)


def quantize(model: Any, encoding: str) -> None:
    """Replace every matrix of the model in place by what ``encoding`` makes of it; routers stay."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or any(part in name for part in KEPT):
                continue
            values = weight.detach().numpy()
            if name.endswith("kv_b_proj.weight"):
                weight.copy_(torch.from_numpy(_latent_round_trip(model.config, encoding, values)))
                continue
            if name.endswith("_bias"):
                continue
            turned = weight.ndim == 3 and model.config.model_type in TURNED  # [experts, in, out]
            rows = np.ascontiguousarray(values.transpose(0, 2, 1)) if turned else values
            stored = round_trip(encoding, rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
            weight.copy_(torch.from_numpy(stored.transpose(0, 2, 1) if turned else stored))


def _latent_round_trip(config: Any, encoding: str, weight: np.ndarray) -> np.ndarray:
    """Of latent attention: a head's keys are stored transposed, its values as they are."""
    heads = weight.reshape(config.num_attention_heads, -1, weight.shape[1]).copy()
    nope = config.qk_nope_head_dim
    keys = heads[:, :nope].transpose(0, 2, 1)
    heads[:, :nope] = round_trip(encoding, keys.reshape(-1, nope)).reshape(keys.shape).transpose(0, 2, 1)
    values = heads[:, nope:]
    heads[:, nope:] = round_trip(encoding, values.reshape(-1, weight.shape[1])).reshape(values.shape)
    return heads.reshape(weight.shape)


def _chosen(output: Any) -> torch.Tensor | None:
    """What a router says it chose: the integers among what it returns, or else where its scores are not zero."""
    parts = output if isinstance(output, tuple) else (output,)
    found = next((part for part in parts if torch.is_tensor(part) and part.dtype == torch.int64), None)
    return torch.nonzero(parts[0])[:, 1] if found is None and len(parts) == 2 else found


def run(model: Any, ids: list[int]) -> Reference:
    """Logits of every position, and the experts that each router chose, in the order of the layers."""
    routes: list[np.ndarray] = []

    def record(_module: Any, _inputs: Any, output: Any) -> None:
        chosen = _chosen(output)
        if chosen is not None:
            routes.append(np.sort(chosen.reshape(len(ids), -1).numpy(), axis=1))

    routers = [module for module in model.modules() if re.search(r"(Router|Gate)$", type(module).__name__)]
    hooks = [module.register_forward_hook(record) for module in routers]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return Reference(logits, routes)


def relative_error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Largest difference over largest reference, per position."""
    return np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)


def kl(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """KL divergence from the reference distribution to ours, nats, per position."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(want), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=1)
