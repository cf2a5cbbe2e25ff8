"""Encodings: byte identity with the ecosystem's quantisers, exact arrangements, refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from smoe_cli import _core

GOLDENS = Path(__file__).parents[1] / "goldens"
VECTORS = GOLDENS / "quant_vectors.npz"
BLOCK_VALUES = {"f32": 1, "f16": 1, "bf16": 1, "q8_0": 32, "q4_0": 32, "q4_k": 256, "q6_k": 256}
BLOCK_VALUES |= {"q4_1": 32, "q5_0": 32, "q5_1": 32, "mxfp4": 32, "iq4_nl": 32}
BLOCK_VALUES |= {"q2_k": 256, "q3_k": 256, "q5_k": 256, "iq4_xs": 256}
BLOCKS = [name for name, values in BLOCK_VALUES.items() if values > 1]
WEIGHTED = [name for name in BLOCKS if name not in ("q8_0", "mxfp4")]  # whose fits take importance weights
SCALES = {"q6_k": (208,), "q3_k": (108,), "q2_k": (80, 82)}  # places of the f16 scales in a block
SCALES |= dict.fromkeys(("q4_k", "q5_k", "q4_1", "q5_1"), (0, 2))


def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quant_make", GOLDENS / "quant_make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names() -> None:
    assert _core.encodings() == list(BLOCK_VALUES)


def test_committed_vectors() -> None:
    checked = 0
    with np.load(VECTORS) as vectors:
        for key in vectors.files:
            case, name = key.split("/")
            if name == "x":
                continue
            x = vectors[f"{case}/x"]
            assert _core.encode(name, x) == vectors[key].tobytes(), key
            checked += 1
    assert checked > 150


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_live_against_ggml(name: str) -> None:
    make = oracle()
    try:
        lib = make.open_ggml()
    except ImportError:
        pytest.skip("SKIP: libggml-python is not installed, the live quantiser oracle did not run")
    for case, values in make.cases(seed=3, rows=300):
        x = values.astype(np.float32)
        assert _core.encode(name, x) == make.ggml_bytes(lib, name, x), case


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTED)
def test_live_against_ggml_with_importance(name: str) -> None:
    make = oracle()
    lib = make.open_ggml()
    for case, values in make.cases(seed=5, rows=40):
        x = values.astype(np.float32)
        for importance in make.importances(seed=6):
            # The library rounds numbers that a 32-bit float's trick cannot round, and gets any level at all; llama.cpp has since
            # clamped them first, as is done here.
            if case == "mixed" and not importance.all():
                continue
            assert _core.encode(name, x, importance) == make.ggml_bytes(lib, name, x, importance), case


@pytest.mark.parametrize("name", WEIGHTED)
def test_importance_lowers_the_error_that_matters(name: str) -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((32, 512)).astype(np.float32)
    importance = (rng.standard_normal(512) ** 8).astype(np.float32)
    plain, weighted = (_core.decode(name, _core.encode(name, x, w), 32, 512) for w in (None, importance))
    assert ((weighted - x) ** 2 @ importance).sum() < 0.97 * ((plain - x) ** 2 @ importance).sum()


def test_importance_weights_are_checked() -> None:
    x = np.ones((2, 64), np.float32)
    for bad in (np.ones(63, np.float32), np.ones((1, 64), np.float32), np.full(64, -1, np.float32)):
        with pytest.raises(_core.CoreError, match="importance"):
            _core.encode("q4_0", x, bad)
    with pytest.raises(_core.CoreError, match="importance"):
        _core.encode("q4_0", x, np.full(64, np.nan, np.float32))


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_live_against_gguf(name: str) -> None:
    make = oracle()
    for case, values in make.cases(seed=4, rows=20):
        x = values.astype(np.float32)
        if name in ("f16", "bf16") and np.abs(x).max() > 65504:
            continue
        assert _core.encode(name, x) == make.gguf_bytes(name, x), case


@pytest.mark.parametrize("name", ["f16", "bf16", *BLOCKS])
def test_decode_against_gguf(name: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(5)
    # Any bytes are a valid block, so decode is tried on random ones; scales are kept finite.
    x = rng.standard_normal((7, 768)).astype(np.float32)
    data = np.frombuffer(_core.encode(name, x), np.uint8).reshape(7, -1).copy()
    if name in BLOCKS:
        block = data.shape[1] // (768 // BLOCK_VALUES[name])
        random = rng.integers(0, 256, data.shape).astype(np.uint8)
        kept = SCALES.get(name, (0,))
        for start in range(0, data.shape[1], block):
            for at in () if name == "mxfp4" else kept:
                random[:, start + at : start + at + 2] = data[:, start + at : start + at + 2]
        data = random
    expected = dequantize(data, GGMLQuantizationType[name.upper()]).astype(np.float32)
    assert np.array_equal(_core.decode(name, data.tobytes(), 7, 768), expected)


@pytest.mark.parametrize("name", list(BLOCK_VALUES))
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_panels_keep_every_bit(name: str, rows: int) -> None:
    cols = 512
    size = _core.stored_bytes(name, "rows", rows, cols)
    data = np.random.default_rng(rows).integers(0, 256, size, dtype=np.uint8).tobytes()
    packed = _core.pack(name, data, rows, cols)
    padded = rows if name not in BLOCKS else -(-rows // 16) * 16
    assert len(packed) == size // rows * padded
    assert _core.unpack(name, packed, rows, cols) == data


@pytest.mark.parametrize("name", BLOCKS)
def test_decode_reads_both_layouts_alike(name: str) -> None:
    x = np.random.default_rng(6).standard_normal((21, 512)).astype(np.float32)
    data = _core.encode(name, x)
    rows = _core.decode(name, data, 21, 512)
    assert np.array_equal(_core.decode(name, _core.pack(name, data, 21, 512), 21, 512, "panel16"), rows)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *[
            ("f16", 3e-4),
            ("bf16", 3e-3),
            ("q8_0", 0.01),
            ("q6_k", 0.03),
            ("q5_k", 0.05),
            ("q5_1", 0.06),
            ("q5_0", 0.06),
        ],
        *[("q4_k", 0.1), ("iq4_xs", 0.1), ("iq4_nl", 0.1), ("q4_1", 0.12), ("q4_0", 0.12), ("mxfp4", 0.15)],
        *[("q3_k", 0.25), ("q2_k", 0.4)],
    ],
)
def test_error_is_of_the_expected_size(name: str, limit: float) -> None:
    x = np.random.default_rng(7).standard_normal((16, 1024)).astype(np.float32)
    back = _core.decode(name, _core.encode(name, x), 16, 1024)
    error = float(np.linalg.norm(back - x) / np.linalg.norm(x))
    assert limit / 4 < error < limit


@pytest.mark.parametrize("name", list(BLOCK_VALUES))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_names_the_index(name: str, bad: float) -> None:
    x = np.ones((3, 512), np.float32)
    x[1, 300] = bad
    with pytest.raises(_core.CoreError, match=f"flat index {512 + 300}") as info:
        _core.encode(name, x)
    assert info.value.code == "failed"


@pytest.mark.parametrize("name", ["f16", "bf16", *BLOCKS])
@pytest.mark.parametrize("bad", [3.4e38, -3.4e38, 5e8])
def test_overflow_of_a_scale_is_refused(name: str, bad: float) -> None:
    if name == "bf16" and bad == 5e8:
        return  # fits
    x = np.ones((1, 512), np.float32)
    x[0, 70] = bad
    with pytest.raises(_core.CoreError, match="flat index 70"):
        _core.encode(name, x)


@pytest.mark.parametrize("name", BLOCKS)
def test_large_values_that_fit_are_kept(name: str) -> None:
    # The minimum of Q4_1 and Q5_1 is a 16-bit float.
    x = np.full((1, 256), 60000.0 if name in ("q4_1", "q5_1") else 300000.0, np.float32)
    rtol = 0.15 if name == "mxfp4" else 0.02
    assert np.allclose(_core.decode(name, _core.encode(name, x), 1, 256), x, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "cols", "expected"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 96, "q5_0"),
        ("q5_k", 96, "q5_1"),
        ("iq4_xs", 96, "iq4_nl"),
        ("q3_k", 96, "iq4_nl"),
        ("q2_k", 96, "iq4_nl"),
        ("mxfp4", 48, "f16"),
        ("q6_k", 96, "q8_0"),
        ("q4_0", 48, "f16"),
        ("q8_0", 33, "f16"),
        ("bf16", 7, "bf16"),
    ],
)
def test_fallback(name: str, cols: int, expected: str) -> None:
    assert _core.fallback(name, cols) == expected


def test_wrong_sizes_and_names_are_refused() -> None:
    x = np.ones((2, 32), np.float32)
    data = _core.encode("q8_0", x)
    for call in (
        lambda: _core.encode("q9_9", x),
        lambda: _core.encode("q4_k", x),
        lambda: _core.encode("q8_0", np.ones(32, np.float32)),
        lambda: _core.decode("q8_0", data[:-1], 2, 32),
        lambda: _core.decode("q8_0", data, 2, 32, "columns"),
        lambda: _core.pack("q8_0", data + b"x", 2, 32),
        lambda: _core.stored_bytes("f32", "rows", 1 << 62, 1 << 62),
    ):
        with pytest.raises(_core.CoreError) as info:
            call()
        assert info.value.code == "usage"


def test_any_buffer_is_accepted() -> None:
    x = np.random.default_rng(8).standard_normal((16, 64)).astype(np.float32)
    data = _core.encode("q8_0", x)
    for view in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert _core.pack("q8_0", view, 16, 64) == _core.pack("q8_0", data, 16, 64)
