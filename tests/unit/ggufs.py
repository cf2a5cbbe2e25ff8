"""GGUF files of made checkpoints, written as llama.cpp's own converter writes them, with the PyPI package ``gguf``: its
table says what a tensor is called, and what that converter does to weights is done here again, by family.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import FakeCheckpoint, config_of

Array = np.ndarray[Any, Any]
ARCHS = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gemma3": "gemma3", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2",
    "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe", "dots1": "dots1", "llama4": "llama4", "afmoe": "afmoe", "exaone_moe": "exaone-moe",
    "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5_moe": "qwen35moe", "jamba": "jamba",
    "granitemoehybrid": "granitehybrid", "kimi_linear": "kimi-linear", "sarvam_moe": "bailingmoe2", "phimoe": "phimoe",
}  # fmt: skip
PAIRED = ("llama", "mistral", "mixtral", "granitemoe", "granitemoeshared", "granitemoehybrid")
TILED = ("qwen3_5_moe",)  # whose value heads are put in another order
# What such a file cannot say, out of the way.
QUARTER = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "olmoe": {"clip_qkv": None},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "dots1": {"sliding_window": None},
    "afmoe": {"mup_enabled": True},
    "minimax_m2": {"rotary_dim": 8, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "deepseek_v3": {"rope_interleave": True},
    "lfm2_moe": {"tie_word_embeddings": True, "norm_topk_prob": True, "norm_eps": 1e-6},
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01},
    "qwen3_next": {"linear_value_head_dim": 16, "rope_parameters": QUARTER},
    "qwen3_5_moe": {"linear_value_head_dim": 16, "rope_parameters": QUARTER},
    "kimi_linear": {
        "linear_attn_config": {"full_attn_layers": [2], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4},
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoehybrid": {"mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2, "position_embedding_type": "nope"},
    "jamba": {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
}
# What of SETTINGS llama.cpp does not compute, so that no export is made of it.
COMPUTED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False},
}
NUMBERS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "attention.head_count_kv":
    "num_key_value_heads", "attention.head_count": "num_attention_heads", "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_dt_rank"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state"), "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups"), "full_attention_interval": "full_attention_interval",
}  # fmt: skip
REALS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta", "expert_weights_scale":
    ("routed_scaling_factor", "route_scale"), "attention.scale": "attention_multiplier", "embedding_scale":
    "embedding_multiplier", "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip


def fake_of(family: str, **more: Any) -> FakeCheckpoint:
    """A checkpoint in float32 that a GGUF can say all of."""
    return FakeCheckpoint(config_of(family, **{**SETTINGS.get(family, {}), **more}), dtype="F32")


def metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    arch = ARCHS[family]
    for numbers, add in ((NUMBERS, writer.add_uint32), (REALS, writer.add_float32)):
        for key, names in numbers.items():
            stated = [config[name] for name in ([names] if isinstance(names, str) else names) if config.get(name)]
            if stated:
                add(f"{arch}.{key}", stated[0])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_file_type(0)
    if family == "deepseek_v3" or config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    if "kv_lora_rank" in config:
        writer.add_uint32(f"{arch}.attention.head_count_kv", 1)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    elif family == "lfm2_moe":
        writer.add_head_count_kv([0, config["num_key_value_heads"], 0])
        writer.add_shortconv_l_cache(3)
    elif family in ("minimax_m2", "glm4_moe"):
        writer.add_rope_dimension_count(8)
    recurrent_metadata(writer, family, config)


def recurrent_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    if family in ("qwen3_next", "qwen3_5_moe"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_rope_dimension_count(4)
        if family == "qwen3_5_moe":
            writer.add_rope_dimension_sections([1, 1, 0, 0])
    elif family == "kimi_linear":
        writer.add_head_count_kv([0, 1, 0])
        writer.add_ssm_conv_kernel(4)
        writer.add_kda_head_dim(16)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif family == "granitemoehybrid":
        writer.add_head_count_kv([0, heads, 0])
        writer.add_ssm_inner_size(2 * config["hidden_size"])
        writer.add_rope_scaling_finetuned(False)
    elif family == "jamba":
        writer.add_head_count_kv([0, heads, 0])
        writer.add_ssm_inner_size(2 * config["hidden_size"])


def paired(values: Array, heads: int) -> Array:
    """Rows of each head as llama.cpp wants them: (0, half), (1, half + 1) ..."""
    rows = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)


def stacked(fake: FakeCheckpoint) -> dict[str, Array]:
    """The tensors by their Hugging Face names; experts [experts, out, in] under their names without the number."""
    found: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    for name in fake.tensors:
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(fake.values(name))
        else:
            found[name] = fake.values(name)
    return found | {name: np.stack(parts) for name, parts in experts.items()}


def changed(family: str, config: dict[str, Any], name: str, values: Array) -> dict[str, Array]:
    """What the converter makes of one tensor."""
    if family in PAIRED and re.search(r"\.q_proj\.(weight|bias)$", name):
        return {name: paired(values, config["num_attention_heads"])}
    if family in PAIRED and re.search(r"\.k_proj\.(weight|bias)$", name):
        return {name: paired(values, config["num_key_value_heads"])}
    offset = family in ("gemma3", "qwen3_next", "qwen3_5_moe") and not name.endswith("linear_attn.norm.weight")
    if offset and name.endswith("norm.weight"):
        return {name: values + np.float32(1)}
    if any(part in name for part in (".linear_attn.", ".mamba.", "A_log", "dt_bias", "_conv1d.")):
        return recurrent(family, config, name, values)
    if name.endswith("kv_b_proj.weight"):
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
        nope = config["qk_nope_head_dim"]
        keys = heads[:, :nope].transpose(0, 2, 1)
        return {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): heads[:, nope:]}
    if family in ("gpt_oss", "llama4") and "experts" in name and "shared" not in name:
        return turned(family, name, values)
    if family.startswith("granite") and name.endswith("input_linear.weight"):
        gate, up = np.split(values, 2, axis=-2)
        part = "block_sparse_moe.input_linear" if "sparse" in name else "shared_mlp.input_linear"
        new = "block_sparse_moe.{}_proj" if "sparse" in name else "shared_mlp.{}_proj"
        return {
            name.replace(part, new.format("gate")): gate,
            name.replace(part, new.format("up")): up,
        }
    if name.endswith("conv.conv.weight"):
        return {name: values.reshape(len(values), -1)}
    if name.endswith((".sinks", "e_score_correction_bias", "expert_bias")):
        return {name + (".weight" if name.endswith("sinks") else ".bias"): values}
    return {name: values}


def tiled(config: dict[str, Any], values: Array, axis: int = 0) -> Array:
    """Heads of values one of each key head after the other, from those of each key head together."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if axis:
        return tiled(config, values.T).T
    return values.reshape(keys, heads // keys, len(values) // heads, -1).swapaxes(0, 1).reshape(values.shape)


def recurrent(family: str, config: dict[str, Any], name: str, values: Array) -> dict[str, Array]:
    if name.endswith(("dt_bias", ".A_log")):
        if name.endswith("A_log"):  # in float32 one library's exponential is another's but for the last bit
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        name = name.replace("dt_bias", "dt_proj.bias")
    elif "conv1d.weight" in name:
        values = values.reshape(len(values), -1)
    if family in TILED:
        return retiled(config, name, values)
    if family == "qwen3_next" and "in_proj_qkvz" in name:
        each, keys = config["linear_key_head_dim"], config["linear_num_key_heads"]
        ends = [each, 2 * each, 2 * each + config["linear_num_value_heads"] * config["linear_value_head_dim"] // keys]
        parts = np.split(values.reshape(keys, -1, values.shape[-1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
        qkv, gate = name.replace("qkvz", "qkv"), name.replace("qkvz", "z")
        return {qkv: np.concatenate([q, k, v]), gate: z}
    if family == "kimi_linear":
        shaped = {"A_log": (1, 1, -1, 1), "conv1d.weight": (1, len(values), 1, values.shape[-1])}
        return {name: next((values.reshape(shape) for end, shape in shaped.items() if name.endswith(end)), values)}
    if family == "granitemoehybrid":
        if name.endswith((".A_log", ".D")):
            return {name: values.reshape(-1, 1)}
        if name.endswith("mamba.norm.weight"):
            return {name: values.reshape(config["mamba_n_groups"], -1)}
    return {name: values}


def retiled(config: dict[str, Any], name: str, values: Array) -> dict[str, Array]:
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return {name: np.concatenate([values[:keys], tiled(config, values[keys:])])}
    if name.endswith("out_proj.weight"):
        return {name: tiled(config, values, axis=1)}
    if name.endswith("linear_attn.norm.weight"):
        return {name: values}
    return {name: tiled(config, values.reshape(len(values), -1)).reshape(values.shape)}


def turned(family: str, name: str, values: Array) -> dict[str, Array]:
    """Fused experts stored [experts, in, out], apart."""
    bias = name.endswith("_bias")
    stem = name.removesuffix("_bias")
    values = values if bias else values.transpose(0, 2, 1)
    end = ".bias" if bias else ".weight"
    if not stem.endswith("gate_up_proj"):
        return {stem + end: values}
    if family == "gpt_oss":
        gate, up = values[:, ::2], values[:, 1::2]
    else:
        gate, up = np.split(values, 2, axis=1)
    return {stem.replace("gate_up", part) + end: half for part, half in (("gate", gate), ("up", up))}


BY_HAND = {  # names that the package's table has in another spelling, or not at all
    "block_sparse_moe.gate_proj.weight": "ffn_gate_exps.weight",
    "block_sparse_moe.up_proj.weight": "ffn_up_exps.weight",
    "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "expert_bias.bias": "exp_probs_b.bias",
    "e_score_correction_bias.bias": "exp_probs_b.bias",
    "block_sparse_moe.experts.w1.weight": "ffn_gate_exps.weight",
    "block_sparse_moe.experts.w2.weight": "ffn_down_exps.weight",
    "block_sparse_moe.experts.w3.weight": "ffn_up_exps.weight",
    "feed_forward.experts.w1.weight": "ffn_gate_exps.weight",
    "feed_forward.experts.w2.weight": "ffn_down_exps.weight",
    "feed_forward.experts.w3.weight": "ffn_up_exps.weight",
    "feed_forward.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "feed_forward.experts.up_proj.weight": "ffn_up_exps.weight",
    "feed_forward.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.experts.w1.weight": "ffn_gate_exps.weight",
    "mlp.experts.w2.weight": "ffn_down_exps.weight",
    "mlp.experts.w3.weight": "ffn_up_exps.weight",
    "A_log": "ssm_a",
    "mamba.D": "ssm_d",
}


def gguf_name(table: gguf.TensorNameMap, name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    for end, ours in BY_HAND.items():
        if layer and name.endswith(end):
            return f"blk.{layer[1]}.{ours}"
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


def encoded(values: Array, kind: str) -> tuple[Array, gguf.GGMLQuantizationType]:
    """Matrices in ``kind``, vectors and routers in float32."""
    wanted = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    if kind == "F32" or values.ndim < 2 or values.shape[-1] % block:
        return np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType.F32
    return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), wanted), wanted


def write_gguf(fake: FakeCheckpoint, family: str, path: Path, kind: str = "F32", split: int = 0, **more: Any) -> Path:
    """The checkpoint as ``path``, or as several files of ``split`` tensors each; the first of them. ``more`` is
    metadata as ``add_key_value`` takes it, (value, type)."""
    arch = ARCHS[family]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    metadata(writer, family, fake.config)
    for key, (value, value_type, *sub_type) in more.items():
        writer.add_key_value(key, value, value_type, *sub_type)
    number = next(value for value, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, fake.config["num_hidden_layers"])
    for name, values in stacked(fake).items():
        for new, part in changed(family, fake.config, name, values).items():
            router = "gate_inp" in gguf_name(table, new)
            data, stored = encoded(part, "F32" if router else kind)
            writer.add_tensor(gguf_name(table, new), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
