"""Make a tiny random checkpoint of a family, for conformance tests: ``make_tiny_model.py FAMILY OUT [--seed N] ...``.

Needs torch and transformers. Asymmetric sizes, grouped-query heads, expert width different from hidden, random biases,
norm weights around one, and a real tokenizer (byte-level BPE, ChatML markers) trained on this file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HIDDEN = 256
HEADS, KV_HEADS = 8, 2
VOCAB = 320
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}

SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GRANITE = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.09, "logits_scaling": 2.5,
}  # fmt: skip
LATENT = {
    **SIGMOID, "num_key_value_heads": 8, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 20,
    "v_head_dim": 32,
}  # fmt: skip

LINEAR = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 40, "linear_value_head_dim": 72,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip

# What each family adds to the common sizes: the cases that its file has to get right.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "head_dim": 48},
    "mistral": {"sliding_window": 24, "head_dim": 32},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"head_dim": 64, "attention_bias": True},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 128},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 160, "mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_moe": {**MOE, "head_dim": 48, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "glm4_moe": {**SIGMOID, "use_qk_norm": True, "attention_bias": True, "head_dim": 48},
    "dots1": {**SIGMOID, "n_group": 4, "topk_group": 2, "head_dim": 48, "sliding_window": 24, "max_window_layers": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 96,
        "use_bias": True,
        "moe_num_shared_experts": 2,
        "moe_layer_end_index": 2,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "head_dim": 48,
        **PARTIAL,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3, "intermediate_size": 96, "head_dim": 48},
    "phimoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.4,
    },
    "granitemoe": {**GRANITE, "attention_bias": True},
    "granitemoeshared": {**GRANITE, "shared_intermediate_size": 160},
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.3,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {**LATENT, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "attention_bias": True},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 40, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "head_dim": 48,
        "sliding_window": 24,
        "attention_bias": True,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "afmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "head_dim": 48,
        "sliding_window": 24,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.7,
        "mup_enabled": True,
        "attention_bias": True,
    },
    "exaone_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "num_shared_experts": 2,
        "head_dim": 48,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "n_group": 4,
        "topk_group": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "routed_scaling_factor": 1.7,
    },
    "solar_open": {**SIGMOID, "head_dim": 48},
    "mellum": {
        **MOE,
        "head_dim": 48,
        "sliding_window": 24,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96, "norm_topk_prob": True},
    "gemma3": {
        "head_dim": 48,
        "query_pre_attn_scalar": 40,
        "sliding_window": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "llama4": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "intermediate_size_mlp": 352,
        "head_dim": 48,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 20,
        "no_rope_layers": [1, 0, 1, 1],
        "floor_scale": 16,
        "attn_scale": 0.3,
        "use_qk_norm": True,
    },
    "qwen3_next": {
        **MOE,
        **LINEAR,
        "head_dim": 48,
        "shared_expert_intermediate_size": 160,
        "mlp_only_layers": [1],
        **PARTIAL,
    },
    "qwen3_5_moe": {**MOE, **LINEAR, "head_dim": 64, "shared_expert_intermediate_size": 160, **PARTIAL},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "linear_head_dim": 40,
        "linear_num_heads": 5,
        "num_local_experts": 8,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "granitemoehybrid": {
        **GRANITE,
        "shared_intermediate_size": 160,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_proj_bias": True,
        "mamba_chunk_size": 32,
    },
    "jamba": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 12,
        "mamba_proj_bias": True,
    },
    "lara_mini": {
        **MOE,
        **LINEAR,
        "head_dim": 48,
        "shared_expert_intermediate_size": 160,
        "attention_bias": True,
        "sliding_window": 24,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    },
    "hy_v3": {**MOE, "num_shared_experts": 2, "head_dim": 48, "router_scaling_factor": 1.7, "attention_bias": True},
    "flint": {
        **MOE,
        "head_dim": 48,
        "sliding_window": 24,
        "shared_expert_intermediate_size": 160,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "attention_bias": True,
        "norm_topk_prob": True,
    },
    "kolibri1": {
        **MOE,
        "head_dim": 48,
        "sliding_window": 24,
        "shared_expert_intermediate_size": 160,
        "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "intermediate_size": None,
    },
    "aria_text": {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 2, "intermediate_size": 96},
    "granitemoe_swa": {
        **GRANITE,
        "shared_intermediate_size": 160,
        "sliding_window": 24,
        "layer_rope_theta": [10000.0, 0, 500.0, 10000.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "sarvam_mla": {**LATENT, "q_lora_rank": None},
    "sarvam_moe": {**SIGMOID, "head_dim": 48, "use_qk_norm": True},
    "lfm2_moe": {
        **MOE,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_bias": True,
        "routed_scaling_factor": 1.7,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96, "clip_qkv": 1.5},
}


MODEL_TYPES = {"gemma3": "gemma3_text", "llama4": "llama4_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # of the text part


def common_config(layers: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 352,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def make_model(family: str, seed: int, layers: int, tied: bool, extra: dict[str, Any]) -> Any:
    """A model of the family with random weights; biases and norms included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**common_config(layers, tied), **FAMILIES[family], **extra}
    theta = settings.pop("rope_theta")
    settings.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(MODEL_TYPES.get(family, family), **settings)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
                weight.normal_(0.0 if family == "gemma3" else 1.0, 0.2)
            elif name.endswith((".bias", "_bias", ".sinks")):
                weight.normal_(0.0, 0.3)
            elif "embed" in name or "lm_head" in name:
                weight.normal_(0.0, 0.5)
            else:
                weight.normal_(0.0, 1.4 / weight.shape[-1] ** 0.5)
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
            if "e_score_correction_bias" in name or "expert_bias" in name:
                buffer.normal_(0.0, 0.1)
    return model.float().eval()


def write_tokenizer(out: Path) -> None:
    """A byte-level BPE of VOCAB tokens with ChatML markers, trained on this very file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text("utf-8")], trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
    generation = {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8, "top_k": 20, "do_sample": True}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1), "utf-8")


def make_tiny_model(
    family: str,
    out: Path,
    seed: int = 0,
    layers: int = 4,
    tied: bool = False,
    dtype: str = "float32",
    shard_bytes: int = 50 << 30,
    **extra: Any,
) -> Path:
    """Write the checkpoint folder ``out`` and return it. ``extra`` overrides keys of the family's config."""
    import torch

    model = make_model(family, seed, layers, tied, extra)
    out.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(out, max_shard_size=shard_bytes)
    write_tokenizer(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--config", type=json.loads, default={}, help="JSON object of config keys to override")
    arguments = parser.parse_args()
    folder = make_tiny_model(
        arguments.family,
        arguments.out,
        arguments.seed,
        arguments.layers,
        arguments.tied,
        arguments.dtype,
        **arguments.config,
    )
    print(folder)


if __name__ == "__main__":
    main()
