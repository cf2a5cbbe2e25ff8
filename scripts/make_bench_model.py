#!/usr/bin/env python3
"""Write a checkpoint with the layer geometry of a large mixture and random weights, to measure speed with.

    scripts/make_bench_model.py checkpoints/bench --layers 8

The geometry is that of Qwen3-30B-A3B, or with --geometry gpt-oss-20b few large experts (32 of 2880, top-4), or
granite-3b-a800m many small layers (32 of 40 experts of 512, top-8, with --layers 32).
Eight layers of the first are 5.6 G parameters, 11 GB in bf16, about one minute. The embedding is 64 times larger than
the other weights' usual size, so that the residual stream is the token's own and routing is near uniform over random
ids: with plain random weights three quarters of the experts repeat from the token before, and every cache looks better
than it is. No tokenizer: programs under measurement are fed ids. One shard a layer and one for the rest, written as
they are made; memory stays under 2 GB. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]

HIDDEN, VOCAB = 2048, 151_936
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
EXPERTS, TOP_K, WIDTH = 128, 8, 768
GEOMETRIES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {},
    # A small vocabulary: what is measured are layers.
    "gpt-oss-20b": {
        "HIDDEN": 2880, "VOCAB": 32_768, "HEADS": 64, "KV_HEADS": 8, "HEAD_DIM": 64,
        "EXPERTS": 32, "TOP_K": 4, "WIDTH": 2880,
    },
    "granite-3b-a800m": {
        "HIDDEN": 1536, "VOCAB": 49_155, "HEADS": 24, "KV_HEADS": 8, "HEAD_DIM": 64,
        "EXPERTS": 40, "TOP_K": 8, "WIDTH": 512,
    },
}  # fmt: skip
STD = 0.02
EMBED_SCALE = 64.0


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 6144,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "eos_token_id": min(151_645, VOCAB - 1),
    }


def layer_shapes(layer: int) -> Shapes:
    prefix = f"model.layers.{layer}."
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            shapes[f"mlp.experts.{expert}.{part}_proj.weight"] = shape
    return {prefix + name: shape for name, shape in shapes.items()}


def shards(layers: int) -> Iterator[Shapes]:
    table = (VOCAB, HIDDEN)
    yield {"model.embed_tokens.weight": table, "model.norm.weight": (HIDDEN,), "lm_head.weight": table}
    for layer in range(layers):
        yield layer_shapes(layer)


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """bf16 bits of a tensor: norms are one, the rest normal with the usual deviation."""
    if len(shape) == 1:
        return to_bf16(np.ones(shape, np.float32))
    scale = STD * (EMBED_SCALE if "embed_tokens" in name else 1.0)
    return to_bf16(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))


def to_bf16(x: Array) -> Array:
    """float32 -> bf16 bits, nearest even; finite values only."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def write_shard(path: Path, shapes: Shapes, rng: np.random.Generator) -> int:
    """A safetensors file, tensor by tensor; returns the bytes of its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            file.write(values(name, shape, rng).data)
    return offset


def write_checkpoint(out: Path, layers: int, seed: int) -> None:
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for index, shapes in enumerate(shards(layers)):
        file = f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"
        total += write_shard(part / file, shapes, np.random.default_rng([seed, index]))
        weight_map |= dict.fromkeys(shapes, file)
        print(f"\r{file}: {total / 1e9:.1f} GB", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (part / "model.safetensors.index.json").write_text(json.dumps(index_json))
    (part / "config.json").write_text(json.dumps(config(layers), indent=1))
    part.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="A random checkpoint with the layers of a large mixture.")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3-30b-a3b")
    parser.add_argument("--vocab", type=int, help="rows of embedding and head: 25,323 of 8 layers weigh what 48 have")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    globals().update(GEOMETRIES[options.geometry] | ({"VOCAB": options.vocab} if options.vocab else {}))
    if options.out.exists():
        print(f"error: {options.out} exists\n  remove it, or write somewhere else", file=sys.stderr)
        return 2
    write_checkpoint(options.out, options.layers, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
