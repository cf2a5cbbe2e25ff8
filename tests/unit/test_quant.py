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
MLX = [f"mlx{b}_g{g}_{t}" for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128) for t in ("bf16", "f16", "f32")]
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
    assert _core.encodings() == [*BLOCK_VALUES, *MLX]


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
            # The library rounds numbers beyond the reach of its rounding and gets any level at all; llama.cpp has since
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


def mlx_parts(name: str, data: bytes, rows: int, cols: int) -> tuple[bytes, bytes, bytes]:
    """Scales, biases and levels as MLX keeps them, each in an array of its own."""
    bits, group, scales = int(name[3]), int(name.split("_")[1][1:]), name.split("_")[2]
    size = 4 if scales == "f32" else 2
    blocks = np.frombuffer(data, np.uint8).reshape(rows * cols // group, 2 * size + group * bits // 8)
    return blocks[:, :size].tobytes(), blocks[:, size : 2 * size].tobytes(), blocks[:, 2 * size :].tobytes()


@pytest.mark.parametrize("name", MLX)
def test_live_against_mlx(name: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="SKIP: mlx is not installed, its quantiser did not run")
    mx.set_default_device(mx.cpu)
    bits, group, scales = int(name[3]), int(name.split("_")[1][1:]), name.split("_")[2]
    make = oracle()
    for case, values in make.cases(seed=8, rows=6):
        if scales != "f32" and np.abs(values).max() > 60000:
            continue
        kind = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}[scales]
        weight = mx.array(values.astype(np.float32)).astype(kind)
        x = np.array(weight.astype(mx.float32))
        levels, scale, bias = mx.quantize(weight, group_size=group, bits=bits)
        raw = [np.array(part.view(mx.uint8)).tobytes() for part in (scale, bias, levels)]
        assert list(mlx_parts(name, _core.encode(name, x, rule="mlx-cpu"), *x.shape)) == raw, case


def mlx_group_by_definition(x: np.ndarray, bits: int) -> tuple[np.float32, np.float32, np.ndarray]:
    """Scale, bias and levels of one group by the rule of MLX's GPU builds, step by step."""
    most = np.float32(2**bits - 1)

    def away(v: np.float32) -> np.float32:
        return np.float32(np.copysign(np.floor(np.abs(np.float64(v)) + 0.5), v))

    low, high = x.min(), max(x.max(), np.float32(0))
    scale = max(np.float32((high - low) / most), np.float32(1e-7))
    edge = low if abs(low) > abs(high) else high
    scale = scale if abs(low) > abs(high) else -scale
    bias, at_edge = np.float32(0), away(edge / scale)
    if at_edge != 0:
        scale, bias = edge / at_edge, edge
    return scale, bias, np.array([min(max(away((v - bias) / scale), np.float32(0)), most) for v in x])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_gpu_rule_is_its_definition(bits: int) -> None:
    make = oracle()
    for case, values in make.cases(seed=8, rows=2):
        x = values.astype(np.float32)[:, :64]
        if not 1e-20 < np.abs(x).max() < 1e5:
            continue
        found = _core.decode(f"mlx{bits}_g32_f32", _core.encode(f"mlx{bits}_g32_f32", x), *x.shape)
        for group, got in zip(x.reshape(-1, 32), found.reshape(-1, 32), strict=True):
            scale, bias, levels = mlx_group_by_definition(group, bits)
            assert np.array_equal(got, (scale * levels.astype(np.float32) + bias).astype(np.float32)), case


def test_the_rules_of_mlx_differ_where_all_are_negative_and_in_ties() -> None:
    x = -np.linspace(1, 2, 64, dtype=np.float32)[None]
    assert _core.encode("mlx4_g64_bf16", x, rule="mlx-gpu") != _core.encode("mlx4_g64_bf16", x, rule="mlx-cpu")
    with pytest.raises(_core.CoreError, match="rule"):
        _core.encode("mlx4_g64_bf16", x, rule="mlx")


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
    with np.errstate(over="ignore"):  # mxfp4's largest exponents
        expected = dequantize(data, GGMLQuantizationType[name.upper()]).astype(np.float32)
    assert np.array_equal(_core.decode(name, data.tobytes(), 7, 768), expected)


@pytest.mark.parametrize("name", [*BLOCK_VALUES, *MLX])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_panels_keep_every_bit(name: str, rows: int) -> None:
    cols = 512
    size = _core.stored_bytes(name, "rows", rows, cols)
    data = np.random.default_rng(rows).integers(0, 256, size, dtype=np.uint8).tobytes()
    packed = _core.pack(name, data, rows, cols)
    padded = rows if name in ("f32", "f16", "bf16") else -(-rows // 16) * 16
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
        *[("mlx8_g64_bf16", 0.01), ("mlx6_g64_bf16", 0.03), ("mlx5_g64_f16", 0.07), ("mlx4_g32_f32", 0.1)],
        *[("mlx4_g64_bf16", 0.12), ("mlx3_g64_bf16", 0.25), ("mlx2_g32_bf16", 0.5)],
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
