"""Every family against transformers on tiny random checkpoints: float mode to 1e-4, routes equal, quantised weights against
the same dequantised weights, int8 activations within a stated KL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

reference = pytest.importorskip("tests.conformance.reference", reason="needs torch and transformers")

from scripts.make_tiny_model import make_tiny_model  # noqa: E402
from smoe_cli import _core  # noqa: E402
from tests.vaults import convert  # noqa: E402

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


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, extra = request.param
    return make_tiny_model(family, tmp_path_factory.mktemp("ckpt") / family, seed=3, **extra)


def check_routes(trace: np.ndarray, want: Any) -> None:
    """Equal sets of experts at every (position, layer), except where the reference itself is a near-tie."""
    for layer, (chosen, margin) in enumerate(zip(want.routes, want.margins, strict=True)):
        differs = (np.sort(trace[:, layer], axis=1) != chosen).any(axis=1)
        assert not (differs & (margin > 1e-5)).any(), f"MoE layer {layer}: routes differ at {np.flatnonzero(differs)}"


def test_float_mode_equals_transformers(checkpoint: Path, tmp_path: Path) -> None:
    vault = convert(checkpoint, tmp_path, "f32")
    model = reference.load(checkpoint)
    ids, top_k = ids_of(PROMPT + STEPS, model.config.vocab_size), top_k_of(checkpoint)
    want = reference.run(model, ids, top_k)
    engine = _core.Engine(str(vault), activations="float", ctx=512)
    got = np.asarray(engine.logits(ids, prefill=PROMPT))
    assert reference.relative_error(got, want.logits).max() < 1e-4
    once = np.asarray(engine.logits(ids))
    assert (once == got).all(), "decode is prefill of one token, bit for bit"
    if top_k:
        check_routes(np.asarray(engine.route_trace()).reshape(len(ids), -1, top_k), want)


@pytest.mark.parametrize("encoding", ["q8_0", "q4_0", "q4_k", "q6_k", "bf16", "f16"])
def test_quantised_weights_equal_dequantised_reference(checkpoint: Path, tmp_path: Path, encoding: str) -> None:
    if case_name_of(checkpoint) not in ("llama", "qwen2_moe", "mixtral") and encoding not in ("q8_0", "q4_k"):
        pytest.skip("every encoding on three families, two encodings on all")
    vault = convert(checkpoint, tmp_path, encoding)
    model = reference.load(checkpoint)
    reference.quantize(model, encoding, encoding)
    ids, top_k = ids_of(PROMPT, model.config.vocab_size), top_k_of(checkpoint)
    want = reference.run(model, ids, top_k)
    exact = np.asarray(_core.Engine(str(vault), activations="float", ctx=512).logits(ids))
    assert reference.relative_error(exact, want.logits).max() < 1e-4
    fast = np.asarray(_core.Engine(str(vault), activations="int8", ctx=512).logits(ids))
    # Random weights amplify a flipped route; the bound is on the median, and on the mean where nothing is routed.
    divergence = reference.kl(fast, want.logits)
    assert np.median(divergence) < 2e-3
    if not top_k:
        assert divergence.mean() < 2e-3


def case_name_of(checkpoint: Path) -> str:
    return checkpoint.name
