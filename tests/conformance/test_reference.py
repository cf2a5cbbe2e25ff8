"""Every family against transformers on tiny random checkpoints: float mode to 1e-4, routes equal, quantised weights
against the same dequantised weights, int8 activations within a stated KL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference is torch and transformers")

import reference

from smoe_cli import _core
from smoe_cli.families.spec import load_families

PROMPT, STEPS = 64, 32
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
DEEP_YARN = {**ROPES["yarn"], "mscale": 0.8, "mscale_all_dim": 0.6}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0 + i / 4 for i in range(16)],
    "short_mscale": 1.1, "long_mscale": 1.3,
}  # fmt: skip
FAMILIES = [family.name for family in load_families()]
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    ("llama", {"tied": True}),
    ("qwen3_moe", {"tied": True}),
    *[("llama", {"rope_parameters": rope}) for rope in ROPES.values()],
    ("qwen3_moe", {"rope_parameters": ROPES["yarn"]}),
    *[(family, {"rope_parameters": DEEP_YARN}) for family in ("deepseek_v2", "deepseek_v3")],
    ("deepseek_v3", {"rope_interleave": False}),
    (
        "hunyuan_v1_moe",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10000.0}},
    ),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    ("lfm2_moe", {"use_expert_bias": False, "conv_bias": False}),
    ("qwen3_next", {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}),
    ("phimoe", {"rope_parameters": LONGROPE, "max_position_embeddings": 512}),
]


def case_name(case: tuple[str, dict[str, Any]]) -> str:
    family, extra = case
    rope = extra.get("rope_parameters", {}).get("rope_type", "")
    return "-".join(filter(None, [family, "tied" if extra.get("tied") else "", rope]))


def ids_of(count: int, vocab: int, seed: int = 5) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, count)]


QUANTISED = [
    *[((family, {}), encoding) for family in FAMILIES for encoding in ("q8_0", "q4_k")],
    *[((family, {}), encoding) for family in ("llama", "qwen2_moe") for encoding in ("q4_0", "q6_k", "bf16", "f16")],
    *[
        (("qwen3_moe", {}), encoding)
        for encoding in ("q4_1", "q5_0", "q5_1", "mxfp4", "iq4_nl", "iq4_xs", "q5_k", "q3_k", "q2_k")
    ],
    *[
        (("qwen3_moe", {}), encoding)
        for encoding in ("mlx8_g64_bf16", "mlx4_g32_f16", "mlx3_g128_f32", "mlx2_g64_bf16")
    ],
]


def quantised_name(value: Any) -> str:
    return value if isinstance(value, str) else case_name(value)


Vaults = Callable[..., tuple[Path, Path]]


def check_routes(trace: np.ndarray, want: Any) -> None:
    """Equal sets of experts at every (position, layer)."""
    assert len(want.routes) == trace.shape[1], "a router for each MoE layer"
    for layer, chosen in enumerate(want.routes):
        differs = (np.sort(trace[:, layer, : chosen.shape[1]], axis=1) != chosen).any(axis=1)
        assert not differs.any(), f"MoE layer {layer}: routes differ at {np.flatnonzero(differs)}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_float_mode_equals_transformers(tiny_vault: Vaults, case: tuple[str, dict[str, Any]]) -> None:
    checkpoint, vault = tiny_vault(case[0], "f32", seed=3, **case[1])
    model = reference.load(checkpoint)
    ids = ids_of(PROMPT + STEPS, model.config.vocab_size)
    want = reference.run(model, ids)
    engine = _core.Engine(str(vault), activations="float", ctx=256)
    got = np.asarray(engine.logits(ids, prefill=PROMPT))
    assert reference.relative_error(got, want.logits).max() < 1e-4
    once = np.asarray(engine.logits(ids))
    assert (once == got).all(), "decode is prefill of one token, bit for bit"
    assert bool(want.routes) == (_core.inspect(str(vault))["records"] > 0), "a mixture's routers are seen"
    if want.routes:
        check_routes(np.asarray(engine.route_trace()), want)


@pytest.mark.parametrize(("case", "encoding"), QUANTISED, ids=quantised_name)
def test_quantised_weights_equal_the_dequantised_reference(
    tiny_vault: Vaults, case: tuple[str, dict[str, Any]], encoding: str
) -> None:
    checkpoint, vault = tiny_vault(case[0], encoding, seed=3, **case[1])
    model = reference.load(checkpoint)
    reference.quantize(model, encoding)
    ids = ids_of(PROMPT, model.config.vocab_size)
    want = reference.run(model, ids)
    exact = np.asarray(_core.Engine(str(vault), activations="float", ctx=512).logits(ids))
    assert reference.relative_error(exact, want.logits).max() < 1e-4
    # int8 activations: these random networks are chaotic (logits of standard deviation 8; a flipped route changes all
    # that follows), so the bound is on logits scaled to unit deviation: mean KL 2e-3 where nothing is routed, median
    # 1e-2 where it is. test_real_model.py has the bound on a real model and real text.
    fast = np.asarray(_core.Engine(str(vault), activations="int8", ctx=512).logits(ids))
    unit = want.logits.std()
    divergence = reference.kl(fast / unit, want.logits / unit)
    assert np.median(divergence) < 1e-2 if want.routes else divergence.mean() < 2e-3


def test_longrope_changes_with_the_window_not_with_the_position(tiny_vault: Vaults) -> None:
    """transformers takes the short frequencies at every length, the model's authors the long ones past the original
    length; here the window decides, once and for all."""
    always_long = {**LONGROPE, "short_factor": LONGROPE["long_factor"], "short_mscale": LONGROPE["long_mscale"]}
    both, long = (
        tiny_vault("phimoe", "f32", seed=3, rope_parameters=rope, max_position_embeddings=512)[1]
        for rope in (LONGROPE, always_long)
    )
    ids = ids_of(40, 320)
    want = np.asarray(_core.Engine(str(long), ctx=256).logits(ids))
    assert (np.asarray(_core.Engine(str(both), ctx=512).logits(ids)) == want).all()
    assert not np.allclose(np.asarray(_core.Engine(str(both), ctx=256).logits(ids)), want)


READS = {  # what a trunk matrix of the engine is called in transformers' llama and qwen3_moe
    "attn.q": "self_attn.q_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def test_column_sums_are_what_transformers_multiplies_with(tiny_vault: Vaults) -> None:
    checkpoint, vault = tiny_vault("llama", "f32", seed=3)
    model = reference.load(checkpoint)
    ids = ids_of(PROMPT, model.config.vocab_size)
    wanted: dict[str, np.ndarray] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            wanted[name] = (inputs[0][0].double() ** 2).sum(0).numpy()

        return hook

    for layer, block in enumerate(model.model.layers):
        for ours, theirs in READS.items():
            block.get_submodule(theirs).register_forward_pre_hook(watch(f"layers.{layer}.{ours}.weight"))
    model.lm_head.register_forward_pre_hook(watch("head.weight"))
    reference.run(model, ids)
    engine = _core.Engine(str(vault), activations="float", ctx=256, watch_columns=True)
    engine.logits(ids)
    sums = engine.column_sums()
    for name, squares in wanted.items():
        counted, rows = sums[name]
        assert rows == len(ids), name
        assert np.allclose(counted, squares, rtol=2e-3, atol=1e-6 * squares.max()), name
