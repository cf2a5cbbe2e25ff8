#!/usr/bin/env python3
"""Distil SmolLM2-135M-Instruct into its sparse mixture of experts: makes scripts/demo_moe/sparse.safetensors.

Four phases, each re-runnable, all of the same --work folder (needs torch; nothing is downloaded):

  text    samples chats (the model writes both sides) and free text from the dense model, and reads --docs, a folder of
          real documents by kind; one document in eight is held out, and all of a kind named held-*
  start   layer by layer, on the student's own stream: the 384 largest channels are shared, balanced k-means over what
          fires together makes 36 experts of the rest, ridge regression gives the router, and least squares the low-rank
          change of `down` that best mends the residual stream
  train   end to end, KL to the dense model's distribution: routers, channel scales, norms, low-rank changes of every
          matrix. Two processes of one thread; saves every --save-every steps, goes on from there after a kill
  export  writes the learned difference that make_demo_moe.py adds to the weights (also from a run that still goes on)

Example:
  D=/tmp/distill; S="nice -n 15 python scripts/distill_demo_moe.py"
  $S text --work $D --docs DOCS; $S start --work $D; $S train --work $D --steps 400; $S export --work $D

What was learned on the way (layers 3 to 22, shares of a layer's output energy on unseen tokens):
- Half of the channels picked freely for each token lose 1%; half of them in experts of 32 lose 10-24% even when the
  picks are perfect, 12-30% with a ridge router, 20-37% with random picks; a fixed half loses 15-33%. So the grouping
  loses most, not the router. Experts of 96 lose 2-4 points more than experts of 32.
- 384 shared + 12 of 36 is as good as 256 + 16 of 40 and 512 + 8 of 32; no shared part is worse with a real router.
- Router logits are TAU = 0.1 times the score: picks do not change with scale, and the picked experts then weigh about
  the same, as the dense sum wants. The router has a second loss: which experts are in truth the largest.
- Least squares on 1,000 tokens (for 1,536 channels) halved the error that it was fitted on and left the perplexity at
  5 to 10 times the dense one; on 24,000 it takes 4-20% off the error of a layer.
- A made-up sparse model moved by KL 0.7 when its checkpoint was rounded to bfloat16 (by 1e-8 in float32): with
  routing, rounding decides near ties. So the checkpoint is float32.
- Sampling slows down a token from some 64 sequences at a time: the keys and values leave the CPU's cache.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import re
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import make_demo_moe as demo
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch.multiprocessing.spawn import spawn

SHARED, EXPERTS, WIDTH, ACTIVE = demo.SPARSE_SHARED, demo.SPARSE_EXPERTS, demo.SPARSE_WIDTH, demo.SPARSE_ACTIVE
RANK = {"qkv": 24, "o": 24, "gateup": 48, "down": 64}  # of the low-rank deltas
TAU = 0.1  # router logits are TAU times the score that picks experts, so the picked ones weigh about the same
LENGTH = 256  # tokens in a training sequence
BF16 = torch.bfloat16

say = demo.say
Layer = dict[str, torch.Tensor]


# ---- the dense model, in torch ------------------------------------------------------------------------------------


@dataclass
class Net:
    """Frozen dense weights: bf16 matrices, f32 norms."""

    dense: demo.Dense
    embed: torch.Tensor  # [vocab, hidden]
    norm: torch.Tensor  # [hidden]
    layers: list[Layer]  # n1 n2 [hidden]; qkv [q+k+v, hidden]; o; gateup [2 * channels, hidden]; down
    cos: torch.Tensor  # [context, head_dim]
    sin: torch.Tensor


def load_net() -> Net:
    """Read the dense model from the installed package."""
    dense = demo.read_dense(demo.find_gguf(None))
    demo.check_dense(dense)
    tensor = {name: torch.from_numpy(value.copy()) for name, value in dense.tensors.items()}
    layers = []
    for index in range(dense.layers):

        def part(name: str, index: int = index) -> torch.Tensor:
            return tensor[f"model.layers.{index}.{name}.weight"]

        qkv = torch.cat([part(f"self_attn.{name}_proj") for name in "qkv"])
        gateup = torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")])
        layers.append(
            {
                "n1": part("input_layernorm"),
                "n2": part("post_attention_layernorm"),
                "qkv": qkv.to(BF16),
                "o": part("self_attn.o_proj").to(BF16),
                "gateup": gateup.to(BF16),
                "down": part("mlp.down_proj").to(BF16),
            }
        )
    angle = torch.arange(1024)[:, None] / dense.rope_theta ** (torch.arange(0, dense.head_dim, 2) / dense.head_dim)
    angle = torch.cat([angle, angle], -1)
    return Net(
        dense,
        tensor["model.embed_tokens.weight"].to(BF16),
        tensor["model.norm.weight"],
        layers,
        angle.cos().to(BF16),
        angle.sin().to(BF16),
    )


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of f32 [..., hidden]."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [batch, heads, time, head_dim] by the tables [time, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def heads_of(net: Net, qkv: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [batch, time, q+k+v] into rotated q, rotated k and v, each [batch, heads, time, head_dim]."""
    dense, (batch, length, _) = net.dense, qkv.shape
    cos, sin = net.cos[start : start + length], net.sin[start : start + length]
    split = qkv.view(batch, length, -1, dense.head_dim).transpose(1, 2)
    q, k, v = torch.split(split, [dense.heads, dense.kv_heads, dense.kv_heads], 1)
    return rope(q, cos, sin), rope(k, cos, sin), v


def attend(net: Net, qkv: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention over [batch, time, q+k+v]; returns [batch, time, hidden], before o."""
    q, k, v = heads_of(net, qkv, 0)
    group = net.dense.heads // net.dense.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def dense_ffn(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The dense feed-forward of bf16 [..., hidden]."""
    gate, up = (x @ layer["gateup"].T).chunk(2, -1)
    return (F.silu(gate) * up) @ layer["down"].T


@torch.no_grad()
def teacher_hidden(net: Net, ids: torch.Tensor) -> torch.Tensor:
    """The dense model's final normed hidden state, bf16 [batch * time, hidden]."""
    x = net.embed[ids].float()
    for layer in net.layers:
        x = x + (attend(net, rms(x, layer["n1"]).to(BF16) @ layer["qkv"].T) @ layer["o"].T).float()
        x = x + dense_ffn(layer, rms(x, layer["n2"]).to(BF16)).float()
    return rms(x, net.norm).to(BF16).flatten(0, 1)


# ---- the sparse model ---------------------------------------------------------------------------------------------


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


# ---- text ---------------------------------------------------------------------------------------------------------


SYSTEMS = [
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful AI assistant.",
    "You are a helpful assistant.",
]
QUESTIONS = [
    "What is the capital of {}?",
    "Tell me about {}.",
    "What is {} known for?",
    "Write a short story set in {}.",
    "Where is {}?",
]
PLACES = [
    "France",
    "Spain",
    "Germany",
    "Japan",
    "Egypt",
    "Brazil",
    "Canada",
    "India",
    "China",
    "Greece",
    "Portugal",
    "Norway",
    "Peru",
    "Kenya",
    "Poland",
    "Turkey",
    "Mexico",
    "Sweden",
    "Austria",
    "Ireland",
    "Cuba",
    "Russia",
]  # not Italy, which is the test
OPENERS = [
    "The",
    "In",
    "A",
    "When",
    "How",
    "This",
    "There are",
    "It is",
    "On",
    "For many years",
    "Chapter 1",
    "Introduction",
    "What is",
    "One day",
    "According to",
    "If you",
    "Many people",
    "As",
    "During the",
    "Scientists",
    "My",
    "We",
    "Why do",
    "History of",
    "Once upon a time",
    "Although",
    "Our",
    "To",
    "With",
    "At the end of",
    "You",
    "Have you ever",
    "After",
    "Children",
    "Water",
    "Most",
    "Some",
]


@dataclass
class Speaker:
    """One sequence being sampled: what is forced next, and whose turn it is ('free' text has no turns)."""

    queue: list[int]
    turn: str  # user, assistant or free

    def take(self, sampled: int, markup: dict[str, list[int]]) -> int:
        """The next token: a forced one if there is one, else the sampled one; a turn's end opens the other's."""
        if not self.queue and self.turn != "free" and sampled in markup["ends"]:
            self.turn = "assistant" if self.turn == "user" else "user"
            self.queue = markup["ends"][:1] + markup[self.turn]
        return self.queue.pop(0) if self.queue else sampled


def speakers(encode: Any, count: int, rng: random.Random) -> tuple[list[Speaker], dict[str, list[int]]]:
    """Openings of `count` sequences, and the markup of the chat format in tokens.

    Two in three are chats that start with an empty user turn, so that the model writes both sides; the rest continue
    a common opening word as a document.
    """
    user, markup = encode("<|im_start|>user\n"), {"ends": [2, 0]}
    markup |= {"user": encode("\n<|im_start|>user\n"), "assistant": encode("\n<|im_start|>assistant\n")}
    out = []
    for _ in range(count):
        system = encode(f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n") if rng.random() < 0.4 else []
        kind = rng.random()
        if kind < 0.55:
            out.append(Speaker(system + user, "user"))
        elif kind < 0.65:
            asked = encode(rng.choice(QUESTIONS).format(rng.choice(PLACES)))
            out.append(Speaker(system + user + asked + [2] + markup["assistant"], "assistant"))
        else:
            out.append(Speaker([0, *encode(rng.choice(OPENERS))], "free"))
    return out, markup


@torch.no_grad()
def step(net: Net, cache: list[list[torch.Tensor]], ids: torch.Tensor, at: int) -> torch.Tensor:
    """Logits f32 [batch, vocab] of one more token for each sequence; `cache` holds k and v of every layer."""
    x, kv_heads, dim = net.embed[ids].float()[:, None], net.dense.kv_heads, net.dense.head_dim
    for layer, (keys, values) in zip(net.layers, cache, strict=True):
        q, k, v = heads_of(net, rms(x, layer["n1"]).to(BF16) @ layer["qkv"].T, at)
        keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
        grouped = q.view(len(ids), kv_heads, -1, dim)  # the query heads of a group stand as its time axis
        mixed = F.scaled_dot_product_attention(grouped, keys[:, :, : at + 1], values[:, :, : at + 1])
        x = x + (mixed.reshape(len(ids), 1, -1) @ layer["o"].T).float()
        x = x + dense_ffn(layer, rms(x, layer["n2"]).to(BF16)).float()
    return (rms(x[:, 0], net.norm).to(BF16) @ net.embed.T).float()


def sample_text(net: Net, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `count` sequences [count, LENGTH] from the dense model; also which of them are chats, bool [count].

    Keep `count` near 64: with more, the keys and values of a layer leave the CPU's cache and it is 4 times slower.
    """
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    tokenizer = demo.build_tokenizer(net.dense.tokenizer)
    people, markup = speakers(lambda text: tokenizer.encode(text).ids, count, rng)
    chats = torch.tensor([person.turn != "free" for person in people])
    heat = torch.tensor([rng.choice([0.7, 0.85, 1.0, 1.0]) for _ in people])[:, None]
    shape = (count, net.dense.kv_heads, LENGTH, net.dense.head_dim)
    cache = [[torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)] for _ in net.layers]
    ids = torch.zeros(count, LENGTH, dtype=torch.long)
    ids[:, 0] = torch.tensor([person.queue.pop(0) for person in people])
    clock = Clock(LENGTH - 1, count)
    for at in range(LENGTH - 1):
        heap = (step(net, cache, ids[:, at], at) / heat).softmax(-1).cumsum(-1)
        found = torch.searchsorted(heap, torch.rand(count, 1, generator=noise) * heap[:, -1:])[:, 0]
        drawn = found.clamp_max(heap.shape[1] - 1).tolist()
        ids[:, at + 1] = torch.tensor([person.take(token, markup) for person, token in zip(people, drawn, strict=True)])
        clock.tick(at + 1, "sampling", every=64)
    return ids, chats


class Clock:
    """Says on stderr how far, how fast and how long still."""

    def __init__(self, total: int, tokens_a_step: int, done: int = 0) -> None:
        self.total, self.tokens, self.first, self.began = total, tokens_a_step, done, time.monotonic()

    def tick(self, done: int, text: str, every: int = 10) -> None:
        """Report step `done` of the total, once in `every`."""
        if done % every and done != self.total:
            return
        rate = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        left = (self.total - done) / rate / 60
        say(f"{text}: {done}/{self.total}, {rate * self.tokens:.0f} tok/s, {left:.1f} min left")


class HtmlText(HTMLParser):
    """Collects the text of a page, without its scripts and navigation."""

    HIDDEN = ("script", "style", "head", "nav")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in ("p", "div", "li", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "tr"):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN and self.hidden > 0

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def read_text(path: Path) -> str:
    """The plain text of a text or HTML file."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".html":
        page = HtmlText()
        page.feed(text)
        text = "".join(page.parts)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def is_held_out(path: Path, kind: str) -> bool:
    """Whether a document is for evaluation only: one in eight by its name's hash, or all of a kind named held-*."""
    return kind.startswith("held-") or hashlib.sha256(path.name.encode()).digest()[0] % 8 == 0


def read_documents(net: Net, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Sequences u16 [n, LENGTH] of the documents under folder/KIND/: all to train on, and held-out ones by kind."""
    tokenizer, out = demo.build_tokenizer(net.dense.tokenizer), {}
    parts: dict[str, list[int]] = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        kind, text = path.relative_to(folder).parts[0], read_text(path)
        begin = random.Random(path.name).randrange(max(1, len(text) - 60_000))  # no document outweighs the others
        if len(text) > 2000:
            name = f"held_{kind.removeprefix('held-')}" if is_held_out(path, kind) else "train_docs"
            parts.setdefault(name, []).extend([0, *tokenizer.encode(text[begin : begin + 60_000]).ids])
    for name, ids in parts.items():
        out[name] = np.array(ids[: len(ids) // LENGTH * LENGTH], np.uint16).reshape(-1, LENGTH)
    return out


def phase_text(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Write work/text.npz: sampled and read sequences, train_* and held_*, each u16 [n, LENGTH]."""
    parts: dict[str, np.ndarray[Any, Any]] = read_documents(net, args.docs) if args.docs else {}
    for group, count, seed in (("train", args.sampled, args.seed), ("held", 128, args.seed + 1)):
        pairs = [sample_text(net, 64, 1000 * seed + number) for number in range(count // 64)]
        ids, chats = (torch.cat(side) for side in zip(*pairs, strict=True))
        parts[f"{group}_chat"], parts[f"{group}_free"] = (
            ids[chats].numpy().astype(np.uint16),
            ids[~chats].numpy().astype(np.uint16),
        )
    for name, value in parts.items():
        say(f"{name}: {value.size} tokens")
    np.savez(work / "text.npz", **parts)  # type: ignore[arg-type]


# ---- start: experts, routers and a closed-form correction ------------------------------------------------------------


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


def load_delta(net: Net, path: Path) -> dict[str, Any]:
    """Read a start.pt or train.pt and set the frozen weights in its channel order beside it."""
    delta: dict[str, Any] = torch.load(path)
    delta["frozen"] = freeze(net, delta["orders"])
    return delta


# ---- train: end to end ---------------------------------------------------------------------------------------------


def mixed_batch(text: Any, seed: int, number: int) -> np.ndarray[Any, Any]:
    """Batch `number`, int64 [8, LENGTH]: 4 sampled sequences (3 chats), 4 of documents. The same for the same seed."""
    rng = np.random.default_rng((seed, number + 1_000_000))
    parts = [(name, take) for name, take in (("train_chat", 3), ("train_free", 1), ("train_docs", 4)) if name in text]
    rows = [text[name][rng.integers(len(text[name]), size=take)] for name, take in parts]
    return np.concatenate(rows).astype(np.int64)


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


def phase_report(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Say the perplexities of the newest state on 16 sequences of each kind."""
    path = work / "train.pt"
    report(net, load_delta(net, path if path.exists() else work / "start.pt"), np.load(work / "text.npz"), 16)


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


# ---- export ---------------------------------------------------------------------------------------------------------


def phase_export(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Write the learned difference to --out: factors as int8 with an f16 step a row, the rest f16, orders u16."""
    path = work / "train.pt"
    delta = torch.load(path if path.exists() else work / "start.pt")
    out = {"norm": delta["norm"].detach().numpy().astype(np.float16)}
    for index, (layer, order) in enumerate(zip(delta["layers"], delta["orders"], strict=True)):
        out[f"{index}.order"] = order.numpy().astype(np.uint16)
        for name, tensor in layer.items():
            value = tensor.detach().numpy() * (TAU if name == "router" else 1.0)
            if not name.endswith(("_a", "_b")) or name == "down_a":  # its columns differ too much in size for int8
                out[f"{index}.{name}"] = value.astype(np.float16)
                continue
            step_ = (np.abs(value).max(1) / 127).astype(np.float16)
            out[f"{index}.{name}.step"] = step_
            out[f"{index}.{name}"] = (
                np.rint(value / np.maximum(step_.astype(np.float32), 1e-9)[:, None]).clip(-127, 127).astype(np.int8)
            )
    save_file(out, args.out)
    say(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB after {delta.get('step', 0)} steps")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["text", "start", "train", "export", "report"])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where the phases keep their files")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="text: folder of real text, DIR/KIND/*.txt or *.html")
    parser.add_argument("--sampled", type=int, default=640, help="text: sequences to sample (default: %(default)s)")
    parser.add_argument("--start-batches", type=int, default=12, help="start: batches to fit on (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="train: steps of 8 x 256 tokens (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="train: peak learning rate (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS", help="train: checkpoint and report")
    parser.add_argument("--out", type=Path, default=demo.DELTA, help="export: the file to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    {"text": phase_text, "start": phase_start, "train": phase_train, "export": phase_export, "report": phase_report}[
        args.phase
    ](load_net(), args.work, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
