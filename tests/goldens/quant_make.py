"""Writes quant_vectors.npz: inputs and the bytes that the ecosystem's own quantisers make of them.

Needs `gguf` (f16, bf16, Q8_0, Q4_0) and `libggml-python` (all the block formats, through ctypes). Run from the
repository root: `python tests/goldens/quant_make.py`. The live comparison over many more values is in
tests/unit/test_quant.py.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape, quantize

PATH = Path(__file__).with_name("quant_vectors.npz")
BLOCKS = "q8_0 q4_0 q4_k q6_k q4_1 q5_0 q5_1 mxfp4 iq4_nl q2_k q3_k q5_k iq4_xs"
GGML_TYPES = {name: name.upper() for name in [*BLOCKS.split(), "f16", "bf16"]}
COLS = 512


def open_ggml() -> Any:
    """The C library of libggml-python; ImportError where it is not installed."""
    import libggml

    found = glob.glob(os.path.join(os.path.dirname(libggml.__file__), "lib*", "libggml-base.so"))
    if not found:
        raise ImportError("libggml-python is installed without libggml-base.so")
    lib = ctypes.CDLL(found[0])
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return lib


def ggml_bytes(lib: Any, name: str, x: np.ndarray, importance: np.ndarray | None = None) -> bytes:
    """float32 [rows, cols] -> the bytes of ggml_quantize_chunk, with importance weights [cols] or without."""
    kind = GGMLQuantizationType[GGML_TYPES[name]]
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros(quant_shape_to_byte_shape(x.shape, kind), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32).ctypes.data
    lib.ggml_quantize_chunk(int(kind), x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], weights)
    return out.tobytes()


def gguf_bytes(name: str, x: np.ndarray) -> bytes:
    """float32 [rows, cols] -> the bytes of the Python package `gguf`."""
    with np.errstate(all="ignore"):
        return quantize(x, GGMLQuantizationType[GGML_TYPES[name]]).tobytes()


def cases(seed: int, rows: int) -> Iterator[tuple[str, np.ndarray]]:
    """Named float32 inputs [rows, COLS]: ordinary, and made to hurt."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, COLS))
    yield "normal", normal
    yield "weights", normal * 0.02
    yield "laplace", rng.laplace(size=(rows, COLS))
    yield "zeros", np.zeros((1, COLS))
    yield "constant", np.full((1, COLS), 0.37)
    yield "negative_constant", np.full((1, COLS), -0.37)
    yield "negative_only", -np.abs(normal)
    yield "positive_only", np.abs(normal) + 0.5
    spike = np.zeros((rows, COLS))
    spike[np.arange(rows), np.arange(rows) * 7 % COLS] = rng.standard_normal(rows)
    yield "spike", spike
    yield "integers", rng.integers(-8, 8, (rows, COLS))
    yield "halves", rng.integers(-255, 255, (rows, COLS)) / 2
    yield "mixed", normal * np.exp(rng.uniform(-40, 3, (rows, COLS)))
    yield "uneven_blocks", normal * np.repeat(np.exp(rng.uniform(-90, 3, (rows, COLS // 16))), 16, axis=1)
    for exponent in (-45, -42, -40, -38, -36, -20, -16, -15, -8, -6, -5, -4, 3, 4):
        yield f"scale_1e{exponent}", normal * 10.0**exponent


def importances(seed: int) -> Iterator[np.ndarray]:
    """Importance weights [COLS]: even, uneven, and with columns that never mattered."""
    rng = np.random.default_rng(seed)
    yield np.ones(COLS, np.float32)
    yield (rng.standard_normal(COLS) ** 4).astype(np.float32)
    yield (rng.random(COLS) < 0.3).astype(np.float32) * 1e-3


def main() -> None:
    lib = open_ggml()
    out: dict[str, np.ndarray] = {}
    for case, values in cases(seed=2, rows=3):
        x = values.astype(np.float32)
        out[f"{case}/x"] = x
        for name in GGML_TYPES:
            if name in ("f16", "bf16") and float(np.abs(x).max()) > 65504:
                continue
            data = gguf_bytes(name, x) if name in ("f16", "bf16") else ggml_bytes(lib, name, x)
            out[f"{case}/{name}"] = np.frombuffer(data, np.uint8)
    np.savez_compressed(PATH, **out)


if __name__ == "__main__":
    main()
