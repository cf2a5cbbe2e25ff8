"""Gates: streaming, caching, chunking, threads and reuse change time, never bytes. Numbered, never renumbered.

G1  streamed == resident            G5  any number of threads
G2  any cache size                  G6  warm == cold: append, edit, regenerate, wrapped ring, cancelled turn
G3  direct == buffered reads,       G7  any chunk; decode == prefill
    io_uring == pread               G8  any cache policy (test_policies.py)
G9  reading ahead on guesses, any number of them, or none
G10 any partners in a batch (test_batching.py)
G4  every ISA: each gate on each; integer kernels agree with scalar bit for bit
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import _core

ISAS = [name for name in ("scalar", "avx2", "avx512") if name in _core.isas()]
EXPERTS, LAYERS, TOP_K = 8, 4, 3


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, count)]


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return tiny_vault("qwen3_moe", "q4_k", ("expert.down=q8_0",), seed=11, layers=LAYERS, **every_layer)[1]


@pytest.fixture(scope="module")
def windowed(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("mistral", "q8_0", seed=12, sliding_window=24)[1]


@pytest.fixture(scope="module")
def even(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    """With heads that 32 divides, as 8-bit keys and values need them."""
    return tiny_vault("qwen3_moe", "q8_0", seed=13, head_dim=64)[1]


def engine(path: Path, **options: Any) -> Any:
    return _core.Engine(str(path), **{"ctx": 512, "threads": 2, **options})


@pytest.fixture(scope="module", params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def truth(vault: Path, isa: str) -> np.ndarray:
    """All experts resident, one prefill, one thread."""
    return np.asarray(engine(vault, isa=isa, threads=1, ring=EXPERTS * LAYERS).logits(ids_of(150)))


@pytest.mark.parametrize("ring", [2 * TOP_K, 7, 11, EXPERTS * LAYERS - 1])
def test_g1_g2_cache_size(vault: Path, isa: str, truth: np.ndarray, ring: int) -> None:
    small = engine(vault, isa=isa, ring=ring)
    assert (np.asarray(small.logits(ids_of(150))) == truth).all()
    assert (np.asarray(small.logits(ids_of(150), prefill=100)) == truth).all()


@pytest.mark.parametrize("io", ["uring", "pread"])
@pytest.mark.parametrize("read_mode", ["direct", "buffered"])
def test_g3_read_paths(vault: Path, isa: str, truth: np.ndarray, read_mode: str, io: str) -> None:
    try:
        small = engine(vault, isa=isa, ring=2 * TOP_K, read_mode=read_mode, io=io)
    except _core.CoreError as error:
        if "no io_uring here" not in str(error):
            raise
        pytest.skip(str(error))
    assert (np.asarray(small.logits(ids_of(150))) == truth).all()


@pytest.mark.parametrize("ring", [2 * TOP_K, 11, EXPERTS * LAYERS - 1])
@pytest.mark.parametrize("spec", [0, 1, EXPERTS])
def test_g9_reading_ahead(vault: Path, isa: str, truth: np.ndarray, ring: int, spec: int) -> None:
    small = engine(vault, isa=isa, ring=ring, spec=spec)
    assert (np.asarray(small.logits(ids_of(150), prefill=40)) == truth).all()


def test_g4_float_mode_agrees_between_isas(vault: Path, isa: str) -> None:
    """The integer kernels are compared bit for bit in the C++ tests; what is left is the order of float sums."""
    ids = ids_of(40)
    got = np.asarray(engine(vault, isa=isa, activations="float").logits(ids))
    scalar = np.asarray(engine(vault, isa="scalar", activations="float").logits(ids))
    assert np.abs(got - scalar).max() / np.abs(scalar).max() < 1e-4


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_g5_threads(vault: Path, isa: str, truth: np.ndarray, threads: int) -> None:
    assert (np.asarray(engine(vault, isa=isa, threads=threads).logits(ids_of(150))) == truth).all()


@pytest.mark.parametrize("chunk", [32, 64, 96, 512])
@pytest.mark.parametrize("prefill", [0, 1, 63, 64, 150])
def test_g7_chunks(vault: Path, isa: str, truth: np.ndarray, chunk: int, prefill: int) -> None:
    assert (np.asarray(engine(vault, isa=isa, chunk=chunk).logits(ids_of(150), prefill=prefill)) == truth).all()


def test_g5_g7_with_8_bit_keys_and_values(even: Path, vault: Path, isa: str) -> None:
    with pytest.raises(_core.CoreError, match="heads"):
        engine(vault, kv="q8")
    whole = np.asarray(engine(even, isa=isa, threads=1, kv="q8").logits(ids_of(150)))
    for chunk, prefill, threads in ((32, 150, 2), (64, 63, 1), (512, 0, 3)):
        got = engine(even, isa=isa, chunk=chunk, threads=threads, ring=2 * TOP_K, kv="q8").logits(
            ids_of(150), prefill=prefill
        )
        assert (np.asarray(got) == whole).all()


def test_8_bit_keys_and_values_cost_no_more_than_8_bit_activations(windowed: Path, isa: str) -> None:
    """Where no router can tip over: twice the distance that int8 activations have from float ones at most."""
    f16, q8 = (np.asarray(engine(windowed, isa=isa, kv=kv).logits(ids_of(150))) for kv in ("f16", "q8"))
    exact = np.asarray(engine(windowed, isa=isa, activations="float").logits(ids_of(150)))
    assert 0 < np.linalg.norm(q8 - f16) < 2 * np.linalg.norm(f16 - exact)


def greedy(e: Any, ids: list[int], count: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
    out, outcome = e.generate(ids, count, temperature=0.0, **more)
    return list(out), dict(outcome)


@pytest.mark.parametrize(("which", "kv"), [("vault", "f16"), ("windowed", "f16"), ("even", "q8"), ("windowed", "q8")])
def test_g6_warm_equals_cold(which: str, kv: str, isa: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    warm = engine(path, isa=isa, ctx=128, chunk=32, kv=kv)

    def both(ids: list[int], count: int = 12, expect_cached: int | None = None) -> list[int]:
        got, outcome = greedy(warm, ids, count)
        assert got == greedy(engine(path, isa=isa, ctx=128, chunk=32, kv=kv), ids, count)[0]
        if expect_cached is not None:
            assert outcome["cached_tokens"] == expect_cached
        return got

    first = ids_of(40)
    reply = both(first, expect_cached=0)
    longer = first + reply + ids_of(9, seed=2)
    both(longer, expect_cached=len(first) + len(reply) - 1)  # the last sampled token was never evaluated
    both(longer)  # regenerate: a full hit re-evaluates the last token only
    edited = longer[:30] + ids_of(25, seed=3)
    both(edited)
    long = ids_of(300, seed=4)  # more than the window: the ring has wrapped
    both(long)
    both(long + ids_of(5, seed=5))
    both(long[:290] + ids_of(5, seed=6))
    both(long[:150])
    both(first)


def test_g6_after_a_cancelled_turn(vault: Path, isa: str) -> None:
    warm, ids = engine(vault, isa=isa, ctx=128, chunk=32), ids_of(100)
    _, outcome = greedy(warm, ids, 50, cancel_after=4)
    assert outcome["finish"] == "cancel"
    longer = ids + ids_of(8, seed=9)
    assert greedy(warm, longer, 10)[0] == greedy(engine(vault, isa=isa, ctx=128, chunk=32), longer, 10)[0]


STORED = [
    ("experts=q3_k", "expert.down=q2_k", "attention=iq4_xs", "head=q5_k"),
    ("experts=mxfp4", "expert.down=mlx4_g32_bf16", "attention=iq4_nl", "embed=mlx8_g64_f32"),
    ("experts=q4_1", "expert.down=q5_0", "attention=q5_1", "head=mlx3_g32_f16"),
]


@pytest.mark.parametrize("roles", STORED, ids=lambda roles: "-".join(role.partition("=")[2] for role in roles))
def test_g1_g4_g7_every_encoding(tiny_vault: Callable[..., tuple[Path, Path]], roles: tuple[str, ...]) -> None:
    """Cache size, chunks and threads change no bit, and the vector ISAs agree; that integer products have scalar's bits
    is tests/engine/test_kernels.cpp's to hold, as its exponentials differ."""
    found = {}
    for isa in ISAS:
        vault = tiny_vault("qwen3_moe", "q8_0", roles, seed=14)[1]
        whole = np.asarray(engine(vault, isa=isa, threads=1).logits(ids_of(90)))
        small = engine(vault, isa=isa, ring=2 * TOP_K, chunk=32)
        assert (np.asarray(small.logits(ids_of(90), prefill=60)) == whole).all()
        found[isa] = whole
    fast = [logits for isa, logits in found.items() if isa != "scalar"]
    assert all((logits == fast[0]).all() for logits in fast)
