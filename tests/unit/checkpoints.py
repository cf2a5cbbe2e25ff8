"""Small random checkpoints in the Hugging Face layout, made with NumPy alone, for the tests of convert.

Tensor names come from the family files; that these are the real names is shown by test_convert_oracle.py, which
converts what transformers itself saves.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.families.arch import Arch, resolve, trunk_tensors
from smoe_cli.families.layout import taken_rows
from smoe_cli.families.spec import Family, match_family

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SIGMOID = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}  # fmt: skip
LATENT = {
    **SIGMOID, "n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "clip_qkv": 2.0},
    "glm4_moe": SIGMOID,
    "dots1": {**SIGMOID, "norm_topk_prob": False},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {**LOCAL, "head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    "phimoe": LOCAL,
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 48},
    "deepseek_v2": {**LATENT, "norm_topk_prob": False},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "solar_open": SIGMOID,
    "afmoe": {**EXPERTS, "head_dim": 16, "sliding_window": 16},
    "exaone_moe": {**EXPERTS, "num_shared_experts": 2, "sliding_window": 16},
    "mellum": {
        **EXPERTS,
        "rope_parameters": {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 1e4}},
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_local_base_freq": 1000.0,
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    "llama4": {**LOCAL, "model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 96},
    "qwen3_next": {**EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 48},
    "qwen3_5_moe": {**EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 48},
    "kimi_linear": {
        **LATENT,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "q_lora_rank": None,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 3},
    },
    "granitemoehybrid": {
        **LOCAL,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lara_mini": {
        **EXPERTS,
        **LINEAR,
        "head_dim": 16,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 16,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
    "hy_v3": {**EXPERTS, "num_shared_experts": 2, "head_dim": 16},
    "flint": {
        **EXPERTS,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 16,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "kolibri1": {
        **EXPERTS,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    "granitemoe_swa": {
        **LOCAL,
        "shared_intermediate_size": 48,
        "sliding_window": 16,
        "layer_rope_theta": [1e4, 0, 500],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "sarvam_mla": {**LATENT, "q_lora_rank": None},
    "sarvam_moe": {**SIGMOID, "head_dim": 16},
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5},
    "gpt_oss": {**LOCAL, "head_dim": 16, "sliding_window": 16},
}
ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4}


def config_of(family: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **CONFIGS[family], **more}


def to_dtype(values: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes; bfloat16 rounded to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "F32":
        return values.tobytes()
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8)
    if dtype == "F32":
        return raw.view(np.float32).reshape(shape)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(shape)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))


@dataclass
class FakeCheckpoint:
    """Tensors by name as (dtype, shape, bytes), and a config; change either, then ``write``."""

    config: dict[str, Any]
    seed: int = 0
    dtype: str = "BF16"
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        family = match_family(self.config)
        arch = resolve(family, self.config)
        for tensor in trunk_tensors(arch):
            source = family.source(tensor.name)
            groups = taken_rows(arch, tensor, source.take)
            shape = groups.source_shape(tensor.shape[0], tensor.shape[-1]) if groups else tensor.shape
            if groups and tensor.name.endswith("conv.weight"):  # as convolutions are stored
                shape = (shape[0], 1, shape[1])
            self.put(source.name, rng.normal(1.0 if tensor.role == "norm" else 0.0, 0.3, shape))
        for name, shape in expert_shapes(family, arch).items():
            self.put(name, rng.normal(0, 0.3, shape))

    def put(self, name: str, values: np.ndarray, dtype: str = "") -> None:
        dtype = dtype or self.dtype
        self.tensors[name] = (dtype, values.shape, to_dtype(values, dtype))

    def values(self, name: str) -> np.ndarray:
        dtype, shape, data = self.tensors[name]
        return from_bytes(data, dtype, shape)

    def write(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            write_safetensors(folder / "model.safetensors", self.tensors)
            return folder
        names = list(self.tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = names[shard::shards]
            write_safetensors(folder / file, {name: self.tensors[name] for name in part})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def fuse(self, layer: int, turned: bool = False) -> None:
        """Stack a layer's experts into gate_up [E, 2I, H] and down [E, H, I], or with the last two axes turned."""
        family = match_family(self.config)
        arch = resolve(family, self.config)
        assert family.experts is not None
        stacks: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
        for part, stack in stacks.items():
            for expert in range(arch.layers[layer].ffn.experts):
                name = getattr(family.experts, part)[0].replace("{L}", str(layer)).replace("{E}", str(expert))
                stack.append(self.values(name))
                del self.tensors[name]
        gate_up = np.concatenate([np.stack(stacks["gate"]), np.stack(stacks["up"])], axis=1)
        down = np.stack(stacks["down"])
        if turned:
            gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
        self.put(family.experts.fused_gate_up[0].replace("{L}", str(layer)), gate_up)
        self.put(family.experts.fused_down[0].replace("{L}", str(layer)), down)


def expert_shapes(family: Family, arch: Arch) -> dict[str, tuple[int, ...]]:
    """One by one, where the family has them so; else fused."""
    found: dict[str, tuple[int, ...]] = {}
    turned = family.experts is not None and family.experts.square_is == "in_out"
    for index in arch.moe_layers():
        assert family.experts is not None
        ffn = arch.layers[index].ffn
        if not family.experts.gate:
            gate_up, down = family.experts.fused_gate_up[0], family.experts.fused_down[0]
            fused = {gate_up: (2 * ffn.expert_width, arch.hidden), down: (arch.hidden, ffn.expert_width)}
            for name, shape in fused.items():
                found[name.replace("{L}", str(index))] = (ffn.experts, *(shape[::-1] if turned else shape))
            if ffn.expert_bias:
                found[family.experts.gate_up_bias.replace("{L}", str(index))] = (ffn.experts, 2 * ffn.expert_width)
                found[family.experts.down_bias.replace("{L}", str(index))] = (ffn.experts, arch.hidden)
            continue
        for expert in range(ffn.experts):
            for part in ("gate", "up", "down"):
                name = getattr(family.experts, part)[0].replace("{L}", str(index)).replace("{E}", str(expert))
                found[name] = (arch.hidden, ffn.expert_width) if part == "down" else (ffn.expert_width, arch.hidden)
    return found


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")


def write_tokenizer(
    folder: Path, template: str | None = TEMPLATE, markers: tuple[str, ...] = MARKERS, **settings: Any
) -> None:
    """A character-level tokenizer with ChatML markers: tokenizer.json and tokenizer_config.json."""
    characters = [chr(code) for code in range(33, 33 + 80)]
    vocab = {text: token for token, text in enumerate([*markers, *characters])}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = [{"id": vocab[text], "content": text, "special": True, **dict.fromkeys(flags, False)} for text in markers]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    stated = {"eos_token": "<|im_end|>", "bos_token": None, **settings}
    if template is not None:
        stated["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
