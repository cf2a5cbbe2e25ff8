"""The reference side of the conformance tests: transformers on a tiny random checkpoint, optionally with every matrix
replaced by what an encoding makes of it, so that only the arithmetic of the engine is compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from smoe_cli import _core

# Matrices that convert never quantises below source precision.
ROUTERS = (".gate.weight", "shared_expert_gate.weight", ".mlp.gate.", ".router.")


@dataclass
class Reference:
    logits: np.ndarray  # float32 [positions, vocab]
    routes: list[np.ndarray]  # per MoE layer: the chosen experts as sets, int [positions, top_k] sorted
    margins: list[
        np.ndarray
    ]  # per MoE layer: how far the last chosen expert is ahead of the first left out, [positions]


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
            if weight.ndim < 2 or any(part in name for part in ROUTERS):
                continue
            flat = weight.detach().numpy().reshape(-1, weight.shape[-1])
            weight.copy_(torch.from_numpy(round_trip(encoding, flat)).reshape(weight.shape))


def run(model: Any, ids: list[int], top_k: int) -> Reference:
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_router_logits=True) if top_k else model(torch.tensor([ids]))
    routes, margins = [], []
    for layer in out.router_logits if top_k else ():
        values, chosen = torch.topk(layer.float().softmax(-1), top_k + 1)
        routes.append(np.sort(chosen[:, :top_k].numpy(), axis=1))
        margins.append((values[:, top_k - 1] - values[:, top_k]).numpy())
    return Reference(out.logits[0].float().numpy(), routes, margins)


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
