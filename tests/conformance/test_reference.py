"""Every family against transformers on tiny random checkpoints: float mode to 1e-4, routes equal, quantised weights
against the same dequantised weights, int8 activations within a stated KL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference is torch and transformers")

import reference

from smoe_cli import _core

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
CASES = [
    *[(family, {}) for family in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")],
    ("llama", {"tied": True}),
    ("qwen3_moe", {"tied": True}),
    *[("llama", {"rope_parameters": rope}) for rope in ROPES.values()],
    ("qwen3_moe", {"rope_parameters": ROPES["yarn"]}),
]


def case_name(case: tuple[str, dict[str, Any]]) -> str:
    family, extra = case
    rope = extra.get("rope_parameters", {}).get("rope_type", "")
    return "-".join(filter(None, [family, "tied" if extra.get("tied") else "", rope]))


def ids_of(count: int, vocab: int, seed: int = 5) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, count)]


def top_k_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text()).get("num_experts_per_tok") or 0)


QUANTISED = [
    *[(case, encoding) for case in CASES[:8] for encoding in ("q8_0", "q4_k")],
    *[((family, {}), encoding) for family in ("llama", "qwen2_moe") for encoding in ("q4_0", "q6_k", "bf16", "f16")],
]


def quantised_name(value: Any) -> str:
    return value if isinstance(value, str) else case_name(value)


Vaults = Callable[..., tuple[Path, Path]]


def check_routes(trace: np.ndarray, want: Any) -> None:
    """Equal sets of experts at every (position, layer), except where the reference itself is a near-tie."""
    for layer, (chosen, margin) in enumerate(zip(want.routes, want.margins, strict=True)):
        differs = (np.sort(trace[:, layer], axis=1) != chosen).any(axis=1)
        assert not (differs & (margin > 1e-5)).any(), f"MoE layer {layer}: routes differ at {np.flatnonzero(differs)}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_float_mode_equals_transformers(tiny_vault: Vaults, case: tuple[str, dict[str, Any]]) -> None:
    checkpoint, vault = tiny_vault(case[0], "f32", seed=3, **case[1])
    model = reference.load(checkpoint)
    ids, top_k = ids_of(PROMPT + STEPS, model.config.vocab_size), top_k_of(checkpoint)
    want = reference.run(model, ids, top_k)
    engine = _core.Engine(str(vault), activations="float", ctx=512)
    got = np.asarray(engine.logits(ids, prefill=PROMPT))
    assert reference.relative_error(got, want.logits).max() < 1e-4
    once = np.asarray(engine.logits(ids))
    assert (once == got).all(), "decode is prefill of one token, bit for bit"
    if top_k:
        assert want.routes, "the reference reported no routes"
        check_routes(np.asarray(engine.route_trace()), want)


@pytest.mark.parametrize(("case", "encoding"), QUANTISED, ids=quantised_name)
def test_quantised_weights_equal_the_dequantised_reference(
    tiny_vault: Vaults, case: tuple[str, dict[str, Any]], encoding: str
) -> None:
    checkpoint, vault = tiny_vault(case[0], encoding, seed=3, **case[1])
    model = reference.load(checkpoint)
    reference.quantize(model, encoding)
    ids, top_k = ids_of(PROMPT, model.config.vocab_size), top_k_of(checkpoint)
    want = reference.run(model, ids, top_k)
    exact = np.asarray(_core.Engine(str(vault), activations="float", ctx=512).logits(ids))
    assert reference.relative_error(exact, want.logits).max() < 1e-4
    # int8 activations: these random networks are chaotic (logits of standard deviation 8; a flipped route changes all
    # that follows), so the bound is on logits scaled to unit deviation: mean KL 2e-3 where nothing is routed, median
    # 1e-2 where it is. test_real_model.py has the bound on a real model and real text.
    fast = np.asarray(_core.Engine(str(vault), activations="int8", ctx=512).logits(ids))
    unit = want.logits.std()
    divergence = reference.kl(fast / unit, want.logits / unit)
    assert np.median(divergence) < 1e-2 if top_k else divergence.mean() < 2e-3
