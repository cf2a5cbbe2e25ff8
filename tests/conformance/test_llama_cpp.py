"""llama.cpp as the reference of GGUF: what is exported loads there and gives our logits, in float32, and is read back
as the same model. The tables say of every family what holds (ARCHITECTURE.md tells it in short)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="checkpoints are made with torch and transformers")
pytest.importorskip("llama_cpp", reason="the reference is llama.cpp, in the PyPI package llama-cpp-python")

import reference
from test_reference import ids_of

from smoe_cli import _core
from smoe_cli.convert.export.run import export
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.spec import load_families

WORKER = Path(__file__).parents[2] / "smoe_cli" / "bench" / "llama_worker.py"
PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["sparse"] * 4, "norm_topk_prob": True}
ONE_BASE: dict[str, Any] = {
    "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), PLAIN["rope_parameters"])
}
LINEAR: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
LLAMA4 = {"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 8192, "attn_scale": 0.1}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 128}
# Family -> settings over those of scripts/make_tiny_model.py, of what llama.cpp computes of it.
SAME: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": {**YARN, "factor": 4.0}}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"attention_bias": False}),
    ("qwen2_moe", {"mlp_only_layers": []}),
    ("qwen3_moe", {"decoder_sparse_step": 1}),
    ("glm4_moe", {}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    ("solar_open", {"first_k_dense_replace": 0}),
    ("sarvam_moe", {"head_dim": 32}),
    ("hy_v3", {"attention_bias": False}),
    ("dots1", {"sliding_window": None, "num_key_value_heads": 8}),
    ("ernie4_5_moe", {"moe_layer_end_index": -1, "use_bias": False}),
    ("minimax_m2", {}),
    ("hunyuan_v1_moe", {}),
    ("granitemoe", {}),
    ("granitemoeshared", {}),
    ("granitemoehybrid", {"mamba_proj_bias": False, "position_embedding_type": "nope"}),
    ("granitemoehybrid", {"mamba_proj_bias": False, "position_embedding_type": "rope"}),
    ("granitemoehybrid", {"mamba_proj_bias": False, "num_local_experts": 0}),
    ("deepseek_v2", {"layers": 26, **ONE_GROUP}),
    ("deepseek_v2", {"q_lora_rank": 40, **ONE_GROUP}),
    ("deepseek_v3", {"attention_bias": False}),
    ("deepseek_v3", {"attention_bias": False, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("kimi_linear", {"linear_num_heads": 8, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    ("gpt_oss", {"swiglu_limit": 7.0, **PLAIN}),
    ("afmoe", {"attention_bias": False, "global_attn_every_n_layers": 4, "layers": 8}),
    ("exaone_moe", {}),
    ("mellum", {**SPARSE, **ONE_BASE}),
    ("gemma3", {"query_pre_attn_scalar": 48}),
    ("llama4", LLAMA4),
    ("olmoe", {"num_key_value_heads": 8, "clip_qkv": None}),
    ("jamba", {"mamba_proj_bias": False}),
    ("lfm2_moe", {"conv_bias": False, "routed_scaling_factor": 1.0}),
    ("qwen3_next", {**LINEAR, "mlp_only_layers": [], "norm_topk_prob": True}),
    ("qwen3_5_moe", LINEAR),
]
# Where llama.cpp computes something else: what it does, and settings that must be refused.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {}, "windows"),
    ("qwen2", {}, "windows"),
    ("qwen3", {}, "biases of o"),
    ("qwen2_moe", {}, "layers 1 have no experts"),
    ("qwen3_moe", {}, "layers 0, 2 have no experts"),
    ("dots1", {"sliding_window": None}, "fewer heads of keys"),
    ("ernie4_5_moe", {}, "layers 0, 3 have no experts"),
    ("deepseek_v2", {}, "best one"),
    ("deepseek_v2", ONE_GROUP, "26 or 27 layers"),
    ("deepseek_v3", {}, "biases of"),
    ("gpt_oss", {}, "swiglu_limit"),
    ("afmoe", {"attention_bias": False}, "not one layer of 4"),
    ("mellum", SPARSE, "another base"),
    ("llama4", {}, "attention_chunk_size|rotation"),
    ("olmoe", {"num_key_value_heads": 8}, "clip_qkv"),
    ("gemma3", {}, "scores are scaled"),
    ("sarvam_moe", {}, "as wide as the model"),
    ("jamba", {}, "no name for layers.0.recur.in.bias"),
    ("granitemoehybrid", {}, "no name for layers.0.recur.in.bias"),
    ("lfm2_moe", {"conv_bias": False}, "routed_scaling_factor"),
    ("qwen3_next", {**LINEAR, "norm_topk_prob": True}, "layers 1 have no experts"),
    ("qwen3_5_moe", {}, "keys of 40 and values of 72"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, "5 heads of 40"),
    ("phimoe", {"lm_head_bias": False, "router_jitter_noise": 0.01}, "no head.bias"),
]
# Phi-3.5-MoE: llama.cpp routes by a plain softmax, and its norms do not take the mean away; all else is the same.
NEARLY = ("phimoe",)
# No architecture of llama.cpp's, or one that lacks what the model needs.
NONE = ("aria_text", "flex_olmo", "flint", "granitemoe_swa", "kolibri1", "lara_mini", "sarvam_mla")
Vaults = Callable[..., tuple[Path, Path]]


def exported(vault: Path, out: Path) -> Path:
    export(vault, "gguf", out, "", lambda done, whole: None)
    return out


def read_back(source: Path, out: Path) -> Path:
    job = prepare(Options(source, out, name="back", quant="source"), Quiet())
    convert(job, Quiet())
    return job.vault


def ours(vault: Path, ids: list[int], activations: str = "float") -> np.ndarray:
    return np.asarray(_core.Engine(str(vault), activations=activations, ctx=256).logits(ids))


def theirs(path: Path, ids: list[int]) -> np.ndarray:
    """llama.cpp's logits, float32 [positions, vocab], in a process of its own: it ends that when it is surprised."""
    request = {"op": "logits", "ids": ids, "file": str(path) + ".npy"}
    command = [sys.executable, str(WORKER), "--model", str(path), "--threads", "2", "--ctx", "256"]
    done = subprocess.run(
        [*command, "--exact", "--no-repack"], input="\n" + json.dumps(request) + "\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray = np.load(str(path) + ".npy")
    return found


def case_name(case: tuple[Any, ...]) -> str:
    return f"{case[0]}-{'-'.join(sorted(case[1]))[:40]}".rstrip("-")


def slow_but(*families: str) -> list[Any]:
    return [case if case[0] in families else pytest.param(case, marks=pytest.mark.slow) for case in SAME]


QUICK = slow_but("llama", "granitemoehybrid", "kimi_linear", "jamba", "lfm2_moe", "qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize("case", QUICK, ids=case_name)
def test_llama_cpp_gives_our_logits_of_what_is_exported(
    tiny_vault: Vaults, tmp_path: Path, case: tuple[str, dict[str, Any]]
) -> None:
    """In float32 on both sides: any wrong order, name, sign or number is far outside 1e-4."""
    _, vault = tiny_vault(case[0], "f32", seed=3, **case[1])
    path = exported(vault, tmp_path / "x.gguf")
    ids = ids_of(64, 320)
    want = ours(vault, ids)
    bound = 2e-4 if case[0] == "gemma3" else 1e-4  # its GELU is a table of float16 there
    assert reference.relative_error(theirs(path, ids), want).max() < bound
    assert reference.relative_error(ours(read_back(path, tmp_path), ids), want).max() < 2e-5


@pytest.mark.parametrize("case", REFUSED, ids=case_name)
def test_what_llama_cpp_would_compute_otherwise_is_not_written(
    tiny_vault: Vaults, tmp_path: Path, case: tuple[str, dict[str, Any], str]
) -> None:
    _, vault = tiny_vault(case[0], "f32", seed=3, **case[1])
    with pytest.raises(UnsupportedError, match=case[2]):
        exported(vault, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_phimoe_is_llama_cpp_s_but_for_routing_and_mean(tiny_vault: Vaults, tmp_path: Path) -> None:
    """With experts that add nothing and a stream whose mean is always zero: biases, attention, the head."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint, _ = tiny_vault("phimoe", "f32", seed=3, router_jitter_noise=0.01)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts.down_proj" in name or name.endswith("w2.weight"):
                weight.zero_()
            elif "embed_tokens" in name:
                weight.sub_(weight.mean(dim=1, keepdim=True))
            elif "o_proj" in name:
                weight.sub_(weight.mean(dim=0, keepdim=True))
    model.save_pretrained(tmp_path / "src")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "src" / name).write_bytes((checkpoint / name).read_bytes())
    job = prepare(Options(tmp_path / "src", tmp_path, name="m", quant="f32"), Quiet())
    convert(job, Quiet())
    path, ids, said = tmp_path / "x.gguf", ids_of(64, 320), list[str]()
    export(job.vault, "gguf", path, "", lambda done, whole: None, said.append)
    assert len(said) == 1 and "plain softmax" in said[0]
    want = ours(job.vault, ids)
    assert reference.relative_error(theirs(path, ids), want).max() < 1e-4
    assert reference.relative_error(ours(read_back(path, tmp_path), ids), want).max() < 2e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "granitemoehybrid"])
def test_quantised_weights_agree_within_the_noise_of_activations(
    tiny_vault: Vaults, tmp_path: Path, family: str
) -> None:
    """q8: llama.cpp and int8 mode round activations, each in blocks of its own. Rows of heads in another order too."""
    options = next(options for name, options in SAME if name == family)
    _, vault = tiny_vault(family, "q8", seed=3, **options)
    path = exported(vault, tmp_path / "x.gguf")
    ids = ids_of(64, 320)
    exact, got = ours(vault, ids), theirs(path, ids)
    unit = exact.std()
    assert np.median(reference.kl(got / unit, exact / unit)) < 1e-2
    back = read_back(path, tmp_path)
    assert reference.relative_error(ours(back, ids), exact).max() < 2e-5, "the same codes, whatever their order"


def test_the_table_is_of_all_families() -> None:
    known = {family.name: family for family in load_families()}
    assert {name for name, _ in SAME} | set(NEARLY) | set(NONE) == set(known)
    assert {name for name, family in known.items() if not family.gguf} == set(NONE)
