"""The sparse model in torch: the dense weights, frozen, and what is learned beside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import make_demo_moe as demo
import numpy as np
import torch
import torch.nn.functional as F

from distill.dense import BF16, Layer, Net, attend, rms, say, teacher_hidden

SHARED, EXPERTS, WIDTH, ACTIVE = demo.SPARSE_SHARED, demo.SPARSE_EXPERTS, demo.SPARSE_WIDTH, demo.SPARSE_ACTIVE
RANK = {"qkv": 24, "o": 24, "gateup": 48, "down": 64}  # of the low-rank deltas
TAU = 0.1  # router logits are TAU times the score that picks experts, so the picked ones weigh about the same


def low_rank(x: torch.Tensor, weight: torch.Tensor, layer: Layer, name: str) -> torch.Tensor:
    """x @ (weight + b a)^T in bf16."""
    return x @ weight.T + (x @ layer[f"{name}_a"].to(BF16).T) @ layer[f"{name}_b"].to(BF16).T


def route(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [tokens, EXPERTS] of f32 x, and each expert's factor: mean 1 over the picked, 0 for the rest."""
    score = x @ layer["router"].T
    top = score.topk(ACTIVE, -1)
    factor = torch.zeros_like(score).scatter(-1, top.indices, ACTIVE * (TAU * top.values).softmax(-1))
    return score, factor


def experts_norm(layer: Layer, h: torch.Tensor) -> torch.Tensor:
    """How much each routed expert would add, [tokens, EXPERTS]: root of the summed squares of its channels."""
    size = (h[:, SHARED:].float() * layer["down_norm"][SHARED:]).square()
    return size.view(-1, EXPERTS, WIDTH).sum(-1).sqrt()


def masked(h: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Channels [tokens, channels] with each routed expert's 32 multiplied by its factor."""
    routed = h[:, SHARED:].view(-1, EXPERTS, WIDTH) * factor[..., None].to(h.dtype)
    return torch.cat([h[:, :SHARED], routed.flatten(1)], 1)


def sparse_ffn(frozen: Layer, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sparse feed-forward of f32 normed [tokens, hidden]; returns (bf16 output, router loss).

    The router loss is the cross-entropy of "is this expert among the ACTIVE largest" under the score's margin.
    """
    gate, up = low_rank(x.to(BF16), frozen["gateup"], layer, "gateup").chunk(2, -1)
    h = F.silu(gate) * up * layer["scale"].to(BF16)
    score, factor = route(layer, x)
    out = low_rank(masked(h, factor), frozen["down"], layer, "down")
    with torch.no_grad():
        best = torch.zeros_like(score).scatter_(-1, experts_norm(frozen, h).topk(ACTIVE, -1).indices, 1.0)
        edge = score.topk(ACTIVE + 1, -1).values[:, -2:].mean(-1, keepdim=True)
    return out, F.binary_cross_entropy_with_logits(x.detach() @ layer["router"].T - edge, best)


def student_hidden(net: Net, delta: dict[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sparse model's final normed hidden state, bf16 [batch * time, hidden], and the mean router loss."""
    x, losses = net.embed[ids].float(), []
    for frozen, layer in zip(delta["frozen"], delta["layers"], strict=True):
        mixed = attend(net, low_rank(rms(x, layer["n1"]).to(BF16), frozen["qkv"], layer, "qkv"))
        x = x + low_rank(mixed, frozen["o"], layer, "o").float()
        out, loss = sparse_ffn(frozen, layer, rms(x, layer["n2"]).flatten(0, 1))
        x = x + out.view(x.shape).float()
        losses.append(loss)
    return rms(x, delta["norm"]).to(BF16).flatten(0, 1), torch.stack(losses).mean()


def freeze(net: Net, orders: list[torch.Tensor]) -> list[Layer]:
    """The dense layers with their channels in expert order, and the norms of the down projections' columns."""
    out = []
    for layer, order in zip(net.layers, orders, strict=True):
        both = torch.cat([order, order + net.dense.channels])
        down = layer["down"][:, order].contiguous()
        out.append(
            {
                "qkv": layer["qkv"],
                "o": layer["o"],
                "gateup": layer["gateup"][both].contiguous(),
                "down": down,
                "down_norm": down.float().norm(dim=0),
            }
        )
    return out


def load_delta(net: Net, path: Path) -> dict[str, Any]:
    """Read a start.pt or train.pt and set the frozen weights in its channel order beside it."""
    delta: dict[str, Any] = torch.load(path)
    delta["frozen"] = freeze(net, delta["orders"])
    return delta


@torch.no_grad()
def report(net: Net, delta: dict[str, Any], text: Any, count: int) -> None:
    """Say the perplexity of both models on `count` sequences of each held-out kind."""
    for name in sorted(key for key in text if key.startswith("held_")):
        ids = torch.from_numpy(text[name][:count].astype(np.int64))
        dense, sparse = (
            perplexity(net, hidden, ids) for hidden in (teacher_hidden(net, ids), student_hidden(net, delta, ids)[0])
        )
        say(f"  {name[5:]}: dense {dense:.2f} sparse {sparse:.2f} ({sparse / dense - 1:+.1%})")


def perplexity(net: Net, hidden: torch.Tensor, ids: torch.Tensor) -> float:
    """Perplexity of ids [n, LENGTH] under final hidden states bf16 [n * LENGTH, hidden]."""
    total = 0.0
    for states, row in zip(hidden.view(*ids.shape, -1), ids, strict=True):
        total += float(F.cross_entropy((states[:-1] @ net.embed.T).float(), row[1:], reduction="sum"))
    return math.exp(total / (len(ids) * (ids.shape[1] - 1)))
