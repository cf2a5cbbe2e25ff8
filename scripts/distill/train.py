"""Phase train: end to end, two processes of one thread each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from distill.dense import BF16, LENGTH, Clock, Net, load_net, teacher_hidden
from distill.sparse import load_delta, report, student_hidden
from distill.text import mixed_batch


class HeadLoss(torch.autograd.Function):
    """Mean KL from teacher to student over the vocabulary, head by chunks so that no full logits are kept."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
        """student, teacher: bf16 [tokens, hidden]; embed: bf16 [vocab, hidden]."""
        total, grads = torch.zeros(()), []
        for ours, theirs in zip(torch.split(student, 256), torch.split(teacher, 256), strict=True):
            log_s = (ours @ embed.T).float().log_softmax(-1)
            log_t = (theirs @ embed.T).float().log_softmax(-1)
            p_t = log_t.exp()
            total += (p_t * (log_t - log_s)).sum()
            grads.append((log_s.exp_() - p_t).to(BF16) @ embed)
        ctx.save_for_backward(torch.cat(grads) / len(student))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Scale the gradient found on the way forward."""
        return ctx.saved_tensors[0] * upstream[0].to(BF16), None, None


def trainable(delta: dict[str, Any]) -> list[dict[str, Any]]:
    """Optimizer groups with their shares of the learning rate."""
    shares: dict[float, list[torch.Tensor]] = {1.0: [delta["norm"]], 0.5: []}
    for layer in delta["layers"]:
        for name, value in layer.items():
            shares[0.5 if name == "router" else 1.0].append(value)
    for value in [*shares[1.0], *shares[0.5]]:
        value.requires_grad_(True)
    return [{"params": values, "share": share} for share, values in shares.items()]


def rate_at(number: int, total: int, peak: float) -> float:
    """Learning rate of a step: 20 steps of warm-up, flat, and over the last 40% a straight line down to a twentieth.

    Flat for most of the way, so that a run may be resumed with another total.
    """
    left = (total - number) / max(1.0, 0.4 * total)
    return peak * min(1.0, (number + 1) / 20) * max(0.05, min(1.0, left))


def save_whole(value: Any, path: Path) -> None:
    """Write beside, then rename: a killed run leaves the last whole file."""
    torch.save(value, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


class Team:
    """The processes that share a step, one thread each: they average gradients through one shared tensor.

    On a busy machine this beats two threads in one process, where each small operation waits for the slower thread.
    """

    def __init__(self, size: int, numbers: int) -> None:
        self.size = size
        self.shared = torch.zeros(size, numbers).share_memory_()  # type: ignore[no-untyped-call]
        self.barrier = torch.multiprocessing.get_context("spawn").Barrier(size)

    def average(self, rank: int, params: list[torch.Tensor]) -> None:
        """Replace each parameter's gradient by the team's mean."""
        torch.cat([grad_of(value).flatten() for value in params], out=self.shared[rank])
        self.barrier.wait(1800)
        mean = self.shared.mean(0)
        self.barrier.wait(1800)
        for value, grad in zip(params, torch.split(mean, [value.numel() for value in params]), strict=True):
            value.grad = grad.view_as(value)


def grad_of(value: torch.Tensor) -> torch.Tensor:
    """The gradient that the last backward pass left."""
    assert value.grad is not None
    return value.grad


def gradients(net: Net, delta: dict[str, Any], ids: torch.Tensor) -> float:
    """Leave in every trainable tensor its gradient on ids [batch, LENGTH]; returns the KL in nats a token."""
    ours, router_loss = student_hidden(net, delta, ids)
    loss = HeadLoss.apply(ours, teacher_hidden(net, ids), net.embed)  # type: ignore[no-untyped-call]
    (loss + 0.02 * router_loss).backward()
    return float(loss.detach())


def train_worker(rank: int, team: Team, work: Path, args: argparse.Namespace) -> None:
    """End-to-end distillation from work/start.pt, or onwards from work/train.pt: member `rank` of the team."""
    torch.set_num_threads(1)
    net, path, stored = load_net(), work / "train.pt", np.load(work / "text.npz")
    text = {name: stored[name] for name in stored}
    delta = load_delta(net, path if path.exists() else work / "start.pt")
    groups, first = trainable(delta), delta.get("step", 0)
    params = [value for group in groups for value in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    if "optimizer" in delta:
        optimizer.load_state_dict(delta["optimizer"])
    clock, mean, began = Clock(args.steps, 8 * LENGTH, first), 0.0, time.monotonic()
    for number in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["share"] * rate_at(number, args.steps, args.rate)
        optimizer.zero_grad()
        loss = gradients(net, delta, torch.from_numpy(mixed_batch(text, args.seed, number)[rank :: team.size]))
        team.average(rank, params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if rank:
            continue
        mean = loss if number == first else 0.9 * mean + 0.1 * loss
        clock.tick(number + 1, f"KL {mean:.4f}", every=5)
        if (number + 1) % args.save_every == 0 or number + 1 == args.steps:
            seconds, began = delta.get("seconds", 0.0) + time.monotonic() - began, time.monotonic()
            delta |= {"optimizer": optimizer.state_dict(), "step": number + 1, "seconds": seconds}
            save_whole({key: value for key, value in delta.items() if key != "frozen"}, path)
            report(net, delta, text, 2)


def phase_train(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Run the team of two; each member keeps the same parameters and the same optimizer."""
    delta = torch.load(work / "start.pt")
    numbers = sum(value.numel() for layer in delta["layers"] for value in layer.values()) + delta["norm"].numel()
    spawn(train_worker, (Team(2, numbers), work, args), nprocs=2)  # type: ignore[no-untyped-call]
