"""The sampler against transformers' logits processors over random parameters; its draws against its distribution."""

from __future__ import annotations

import numpy as np
import pytest

_core = pytest.importorskip("smoe_cli._core", reason="the engine module is not built")
torch = pytest.importorskip("torch", reason="the reference needs torch")
process = pytest.importorskip("transformers.generation.logits_process", reason="the reference needs transformers")

VOCAB = 700


def reference(logits, history, temperature, top_k, top_p, min_p, repetition_penalty, exempt=(), bias=()):
    """Probabilities float32 [vocab] by transformers' processors, in the order of its own ``generate``."""
    scores = torch.tensor(logits)[None]
    ids = torch.tensor([[i for i in history[-256:] if i not in exempt]], dtype=torch.long)
    if repetition_penalty != 1 and ids.numel():
        scores = process.RepetitionPenaltyLogitsProcessor(penalty=repetition_penalty)(ids, scores)
    for index, value in bias:
        scores[0, index] += value
    scores = process.TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = process.TopKLogitsWarper(top_k=top_k)(ids, scores)
    if top_p < 1:
        scores = process.TopPLogitsWarper(top_p=top_p)(ids, scores)
    if min_p:
        scores = process.MinPLogitsWarper(min_p=min_p)(ids, scores)
    return scores.softmax(-1)[0].numpy()


def random_case(rng):
    logits = (rng.standard_normal(VOCAB) * rng.choice([0.5, 2, 6])).astype(np.float32)
    history = rng.integers(0, VOCAB, rng.integers(0, 600)).tolist()
    params = {
        "temperature": float(rng.choice([0.3, 0.6, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 1, 5, 50, 699, 700])),
        "top_p": float(rng.choice([0.05, 0.5, 0.9, 0.95, 0.999, 1.0])),
        "min_p": float(rng.choice([0.0, 0.02, 0.3])),
        "repetition_penalty": float(np.float32(rng.choice([1.0, 1.1, 1.5, 0.7]))),
    }
    exempt = rng.integers(0, VOCAB, rng.integers(0, 30)).tolist()
    biased = rng.permutation(VOCAB)[: rng.integers(0, 5)]
    bias = [(int(i), float(np.float32(rng.standard_normal() * 5))) for i in biased]
    return logits, history, params, exempt, bias


def test_distribution_is_the_references():
    """Equal support and probabilities. A nucleus edge within float32 rounding of top_p may fall to either side: there
    one token at the edge may differ, and no more than a handful of the cases may need that."""
    rng = np.random.default_rng(7)
    edges = 0
    for case in range(400):
        logits, history, params, exempt, bias = random_case(rng)
        want = reference(logits, history, exempt=exempt, bias=bias, **params)
        got = _core.sample_probs(logits, history, exempt=exempt, bias=bias, **params)
        differs = np.flatnonzero((want > 0) != (got > 0))
        if differs.size:
            edges += 1
            at_edge = max(want[differs[0]], got[differs[0]]) <= want[want > 0].min() + 1e-6
            assert differs.size == 1 and at_edge, (case, params)
        else:
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7, err_msg=f"case {case}: {params}")
    assert edges <= 4


def test_greedy_is_the_references_argmax():
    rng = np.random.default_rng(8)
    for _ in range(50):
        logits, history, params, exempt, bias = random_case(rng)
        params["temperature"] = 1.0
        want = reference(logits, history, exempt=exempt, bias=bias, **params)
        params["temperature"] = 0.0
        got = _core.sample_probs(logits, history, exempt=exempt, bias=bias, **params)
        assert got.argmax() == want.argmax() and got.sum() == 1


def test_ties_at_the_top_k_edge_stay_as_in_the_reference():
    logits = np.array([1, 2, 1, 0, 1], np.float32)
    want = reference(logits, [], 1.0, 2, 1.0, 0.0, 1.0)
    np.testing.assert_allclose(_core.sample_probs(logits, temperature=1.0, top_k=2), want, rtol=1e-5)


def test_a_mask_is_minus_infinity_before_everything():
    rng = np.random.default_rng(9)
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    allowed = rng.random(VOCAB) < 0.1
    masked = np.where(allowed, logits, -np.inf).astype(np.float32)
    want = reference(masked, [], 0.8, 10, 0.9, 0.0, 1.0)
    bits = np.packbits(allowed, bitorder="little").tobytes()
    got = _core.sample_probs(logits, mask=bits, temperature=0.8, top_k=10, top_p=0.9)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("params", [{"top_k": 0}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.8, "min_p": 0.05}])
def test_draws_follow_the_distribution(params):
    """Chi-square over the support at the 99.99% point (normal approximation), with fixed seeds."""
    rng = np.random.default_rng(10)
    logits = rng.standard_normal(60).astype(np.float32)
    p = _core.sample_probs(logits, temperature=0.9, **params)
    n = 40_000
    draws = _core.sample_draws(logits, [], n, temperature=0.9, seed=1337, **params)
    seen = np.bincount(draws, minlength=60)
    assert seen[p == 0].sum() == 0
    expected = p[p > 0] * n
    chi = ((seen[p > 0] - expected) ** 2 / expected).sum()
    freedom = expected.size - 1
    assert chi < freedom + 3.72 * (2 * freedom) ** 0.5


def test_a_stream_resumed_with_its_own_tokens_goes_on_as_before():
    logits = np.random.default_rng(11).standard_normal(500).astype(np.float32)
    params = {"temperature": 1.0, "repetition_penalty": 1.3, "top_k": 40, "seed": 5}
    whole = _core.sample_draws(logits, [1, 2, 3], 40, grow=True, **params)
    head, tail = whole[:17], whole[17:]
    assert _core.sample_draws(logits, [1, 2, 3, *head], 23, grow=True, **params) == tail
    assert _core.sample_draws(logits, [1, 2, 3], 40, grow=True, **params | {"seed": 6}) != whole
