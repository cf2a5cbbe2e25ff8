"""Phase start: experts, routers and a closed-form correction of each layer."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from distill.dense import BF16, Layer, Net, attend, dense_ffn, rms, say
from distill.sparse import EXPERTS, RANK, SHARED, WIDTH, experts_norm, freeze, load_delta, masked, report, route
from distill.text import mixed_batch


def cluster(features: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Balanced k-means by cosine of [channels, tokens]; returns each channel's cluster [channels]."""
    noise, features = torch.Generator().manual_seed(seed), F.normalize(features, dim=1)
    size = len(features) // count
    chosen = [int(torch.randint(len(features), (1,), generator=noise))]
    for _ in range(count - 1):
        far = (1 - (features @ features[chosen].T).amax(1)).clamp_min(1e-6) ** 2
        chosen.append(int(torch.multinomial(far, 1, generator=noise)))
    centres, owner = features[chosen], np.zeros(len(features), np.int64)
    for _ in range(10):
        near = (features @ F.normalize(centres, dim=1).T).numpy()
        owner, room = np.full(len(features), -1), np.full(count, size)
        for place in np.argsort(-near, axis=None, kind="stable").tolist():  # the closest pair first
            channel, target = divmod(place, count)
            if owner[channel] < 0 and room[target]:
                owner[channel], room[target] = target, room[target] - 1
        centres = torch.stack([features[owner == index].mean(0) for index in range(count)])
    return torch.from_numpy(owner)


def expert_order(size: torch.Tensor, seed: int) -> torch.Tensor:
    """Channel order [channels] by their `size` [tokens, channels]: the SHARED largest, then the experts' channels."""
    by_size = size.square().mean(0).argsort(descending=True)
    rest = by_size[SHARED:].sort().values
    owner = cluster(size[:4096, rest].T.sqrt(), EXPERTS, seed)
    return torch.cat([by_size[:SHARED], *(rest[owner == index] for index in range(EXPERTS))])


def fit_router(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Ridge regression [EXPERTS, hidden] from f32 inputs to `target`, scaled so that a token's scores spread by 1."""
    gram = x.T @ x
    gram += torch.eye(len(gram)) * gram.diagonal().mean() * 0.01
    router: torch.Tensor = torch.linalg.solve(gram, x.T @ target).T
    return router / (x @ router.T).std(-1).mean()


def correct_down(
    h: torch.Tensor, error: torch.Tensor, weight: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors a [rank, channels], b [hidden, rank] of the change of `down` that best explains `error` from masked h.

    Weighted least squares with a ridge, then the best approximation of that rank in the metric of h.
    h is [tokens, channels], error [tokens, hidden], weight [tokens, 1].
    """
    gram = h.T @ (h * weight)
    ridge = gram + gram.diagonal().add(1e-6 * gram.diagonal().mean()).diag() * 0.05
    full = torch.linalg.solve(ridge, h.T @ (error * weight)).T
    basis = torch.linalg.eigh(full @ gram @ full.T).eigenvectors[:, -rank:]
    a, b = basis.T @ full, basis
    balance = (b.square().mean() / a.square().mean()).sqrt().sqrt()
    return a * balance, b / balance


def new_layer(frozen: Layer, norms: Layer, noise: torch.Generator) -> Layer:
    """A layer's trainable tensors: factors that change nothing yet, unit channel scales, the norms."""
    layer = {"n1": norms["n1"].clone(), "n2": norms["n2"].clone(), "scale": torch.ones(SHARED + EXPERTS * WIDTH)}
    for name, rank in RANK.items():
        out, width = frozen[name].shape
        layer[f"{name}_a"] = torch.randn(rank, width, generator=noise) / math.sqrt(width)
        layer[f"{name}_b"] = torch.zeros(out, rank)
    return layer


def start_layer(net: Net, index: int, xs: torch.Tensor, xt: torch.Tensor, noise: torch.Generator) -> tuple[Any, ...]:
    """Make layer `index` sparse, given the student's and the teacher's residual streams f32 [n, LENGTH, hidden].

    Returns (order, trainable layer, the two streams after the layer).
    """
    layer = net.layers[index]
    rt, rs = (x + (attend(net, rms(x, layer["n1"]).to(BF16) @ layer["qkv"].T) @ layer["o"].T).float() for x in (xt, xs))
    x, ht = rms(rs, layer["n2"]), rms(rt, layer["n2"]).to(BF16)
    after_t = rt + dense_ffn(layer, ht).float()
    gate, up = (ht.flatten(0, 1) @ layer["gateup"].T).chunk(2, -1)
    order = expert_order((F.silu(gate) * up).float().abs() * layer["down"].float().norm(dim=0), index)
    frozen = freeze(Net(net.dense, net.embed, net.norm, [layer], net.cos, net.sin), [order])[0]
    new, flat = new_layer(frozen, layer, noise), x.flatten(0, 1)
    gate, up = (flat.to(BF16) @ frozen["gateup"].T).chunk(2, -1)
    h = F.silu(gate) * up
    new["router"] = fit_router(flat, experts_norm(frozen, h).log())
    h = masked(h, route(new, flat)[1]).float()
    error = (after_t - rs).flatten(0, 1) - h @ frozen["down"].float().T
    weight = 1 / after_t.flatten(0, 1).square().mean(-1, keepdim=True)  # what the next norm divides by
    new["down_a"], new["down_b"] = correct_down(h, error, weight, RANK["down"])
    fix = h @ new["down_a"].T @ new["down_b"].T
    say(
        f"layer {index}: error {float((error.square() * weight).sum() ** 0.5):.1f} -> "
        f"{float(((error - fix).square() * weight).sum() ** 0.5):.1f}"
    )
    return order, new, rs + (h @ frozen["down"].float().T + fix).view(rs.shape), after_t


@torch.no_grad()
def phase_start(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Write work/start.pt: channel orders and trainable tensors, layer by layer on the student's own stream."""
    text, noise = np.load(work / "text.npz"), torch.Generator().manual_seed(args.seed)
    batches = [mixed_batch(text, args.seed, -1 - number) for number in range(args.start_batches)]
    ids = torch.from_numpy(np.concatenate(batches))
    xs = xt = net.embed[ids].float()
    orders, layers = [], []
    for index in range(net.dense.layers):
        order, layer, xs, xt = start_layer(net, index, xs, xt, noise)
        orders.append(order)
        layers.append(layer)
    torch.save({"orders": orders, "layers": layers, "norm": net.norm.clone()}, work / "start.pt")
    report(net, load_delta(net, work / "start.pt"), text, 4)
