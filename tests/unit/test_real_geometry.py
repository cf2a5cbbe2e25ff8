"""Published models as their config.json states them, from header-only checkpoints: the family resolves, each tensor has
its place, and the numbers of parameters are those that the models are known by."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.convert.checkpoint import open_checkpoint
from smoe_cli.convert.encodings import choose_roles
from smoe_cli.convert.plan import Plan, make_plan

Shapes = dict[str, tuple[int, ...]]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write_headers(folder: Path, config: dict[str, Any], shapes: Shapes, dtypes: dict[str, str]) -> None:
    """A checkpoint of the right headers and sizes, without contents: the file is one hole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1}
    header, offset = {}, 0
    for name, shape in shapes.items():
        dtype = dtypes.get(name, "BF16")
        size = math.prod(shape) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)


def with_fp8(shapes: Shapes, packed: tuple[str, ...]) -> tuple[Shapes, dict[str, str]]:
    """Block scales beside every matrix of the named kinds."""
    found, dtypes = dict(shapes), {}
    for name, shape in shapes.items():
        if name.endswith(packed):
            dtypes[name] = "F8_E4M3"
            found[f"{name}_scale_inv"] = (-(-shape[0] // 128), -(-shape[1] // 128))
            dtypes[f"{name}_scale_inv"] = "F32"
    return found, dtypes


def gated(prefix: str, width: int, hidden: int) -> Shapes:
    down = {f"{prefix}.down_proj.weight": (hidden, width)}
    return {f"{prefix}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")} | down


def norms(config: dict[str, Any]) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: Shapes = {"model.norm.weight": (hidden,)}
    found |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name in ("input", "post_attention"):
            found[f"model.layers.{layer}.{name}_layernorm.weight"] = (hidden,)
    return found


def grouped(c: dict[str, Any], layer: int, bias: str = "") -> Shapes:
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    rows = {"q": heads * c["head_dim"], "k": kv * c["head_dim"], "v": kv * c["head_dim"], "o": hidden}
    prefix = f"model.layers.{layer}.self_attn"
    found: Shapes = {f"{prefix}.{part}_proj.weight": (rows[part], hidden) for part in "qkv"}
    found[f"{prefix}.o_proj.weight"] = (hidden, heads * c["head_dim"])
    return found | {f"{prefix}.{part}_proj.bias": (rows[part],) for part in bias}


GLM_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
KIMI: dict[str, Any] = DEEPSEEK | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 94, "mlp_only_layers": [], "moe_intermediate_size": 1536,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 94, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "qk_norm_type": "per_layer", "use_qk_norm": True, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_routing_bias": True,
    "vocab_size": 200064, "quantization_config": FP8,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_LARGE = GPT_OSS | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18
}  # fmt: skip


def glm_shapes(c: dict[str, Any]) -> Shapes:
    found = norms(c)
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    for layer in range(c["num_hidden_layers"]):
        found |= grouped(c, layer, "qkv" if c["attention_bias"] else "")
        mlp = f"model.layers.{layer}.mlp"
        if layer < c["first_k_dense_replace"]:
            found |= gated(mlp, c["intermediate_size"], hidden)
            continue
        found |= gated(f"{mlp}.shared_experts", width, hidden)
        found[f"{mlp}.gate.weight"] = (c["n_routed_experts"], hidden)
        found[f"{mlp}.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            found |= gated(f"{mlp}.experts.{expert}", width, hidden)
    return found


def deepseek_shapes(c: dict[str, Any]) -> Shapes:
    found = glm_shapes({**c, "attention_bias": False, "head_dim": 1})
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        for part in "qkvo":
            del found[f"{prefix}.{part}_proj.weight"]
        rope, nope = c["qk_rope_head_dim"], c["qk_nope_head_dim"]
        found |= {
            f"{prefix}.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{prefix}.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{prefix}.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
            f"{prefix}.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
            f"{prefix}.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            f"{prefix}.kv_b_proj.weight": (heads * (nope + c["v_head_dim"]), c["kv_lora_rank"]),
            f"{prefix}.o_proj.weight": (hidden, heads * c["v_head_dim"]),
        }
    return found


def qwen_shapes(c: dict[str, Any]) -> Shapes:
    found = norms(c)
    for layer in range(c["num_hidden_layers"]):
        found |= grouped(c, layer)
        for part in ("q_norm", "k_norm"):
            found[f"model.layers.{layer}.self_attn.{part}.weight"] = (c["head_dim"],)
        mlp = f"model.layers.{layer}.mlp"
        found[f"{mlp}.gate.weight"] = (c["num_experts"], c["hidden_size"])
        for expert in range(c["num_experts"]):
            found |= gated(f"{mlp}.experts.{expert}", c["moe_intermediate_size"], c["hidden_size"])
    return found


def minimax_shapes(c: dict[str, Any]) -> Shapes:
    found = norms(c)
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for layer in range(c["num_hidden_layers"]):
        found |= grouped(c, layer)
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.q_norm.weight"] = (c["num_attention_heads"] * c["head_dim"],)
        found[f"{prefix}.self_attn.k_norm.weight"] = (c["num_key_value_heads"] * c["head_dim"],)
        moe = f"{prefix}.block_sparse_moe"
        found[f"{moe}.gate.weight"] = (experts, hidden)
        found[f"{moe}.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            for name, shape in {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}.items():
                found[f"{moe}.experts.{expert}.{name}.weight"] = shape
    return found


def gpt_oss_shapes(c: dict[str, Any]) -> tuple[Shapes, dict[str, str]]:
    found = norms(c)
    hidden, width, experts, heads = c["hidden_size"], c["intermediate_size"], c["num_local_experts"], 64
    dtypes = {}
    for layer in range(c["num_hidden_layers"]):
        found |= grouped(c, layer, "qkvo")
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.sinks"] = (heads,)
        found[f"{prefix}.mlp.router.weight"] = (experts, hidden)
        found[f"{prefix}.mlp.router.bias"] = (experts,)
        for name, rows, cols in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            stem = f"{prefix}.mlp.experts.{name}"
            found |= {
                f"{stem}_blocks": (experts, rows, cols // 32, 16),
                f"{stem}_scales": (experts, rows, cols // 32),
                f"{stem}_bias": (experts, rows),
            }
            dtypes |= {f"{stem}_blocks": "U8", f"{stem}_scales": "U8"}
    return found, dtypes


DEEPSEEK_FP8 = ("_proj.weight", "kv_a_proj_with_mqa.weight")
MINIMAX_FP8 = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
MODELS: dict[str, tuple[dict[str, Any], tuple[Shapes, dict[str, str]], float, float]] = {
    # name: config, tensors, parameters in billions as published: all, and those used for a token
    "GLM-4.5-Air": (GLM_AIR, (glm_shapes(GLM_AIR), {}), 106, 12),
    "DeepSeek-V3": (DEEPSEEK, with_fp8(deepseek_shapes(DEEPSEEK), DEEPSEEK_FP8), 671, 37),
    "Kimi-K2": (KIMI, with_fp8(deepseek_shapes(KIMI), DEEPSEEK_FP8), 1026, 32),
    "Qwen3-235B-A22B": (QWEN, (qwen_shapes(QWEN), {}), 235, 22),
    "MiniMax-M2": (MINIMAX, with_fp8(minimax_shapes(MINIMAX), MINIMAX_FP8), 230, 10),
    "gpt-oss-20b": (GPT_OSS, gpt_oss_shapes(GPT_OSS), 20.9, 3.6),
    "gpt-oss-120b": (GPT_OSS_LARGE, gpt_oss_shapes(GPT_OSS_LARGE), 116.8, 5.1),
}


def parameters(plan: Plan) -> tuple[float, float]:
    """Billions in all, and of them used for a token, which reads one row of the embedding."""
    trunk = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    embedding = math.prod(plan.tensors[0].shape)
    experts = used = 0
    for record in plan.experts:
        size = sum(part.rows * part.cols for part in (*record.parts, *record.biases))
        experts += size
        ffn = plan.arch.layers[record.layer].ffn
        used += size * ffn.top_k / ffn.experts
    return (trunk + experts) / 1e9, (trunk - embedding + used) / 1e9


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_the_parameters_they_are_known_by(name: str, tmp_path: Path) -> None:
    config, (shapes, dtypes), total, active = MODELS[name]
    write_headers(tmp_path, config, shapes, dtypes)
    plan = make_plan(open_checkpoint(tmp_path), "q4", choose_roles("q4"))
    found = parameters(plan)
    assert found[0] == pytest.approx(total, rel=0.01), found
    assert found[1] == pytest.approx(active, rel=0.07), "published rounded, sometimes without the head"
    assert plan.notices == []
