"""The dense model in torch: its weights, its forward pass, and one step of sampling from it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import make_demo_moe as demo
import torch
import torch.nn.functional as F

BF16 = torch.bfloat16
LENGTH = 256  # tokens in a sequence

say = demo.say
Layer = dict[str, torch.Tensor]


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
