"""Reading parts of files: large ones past the page cache, shared ones once, from several threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from smoe_cli import _core
from smoe_cli.convert.safetensors import LARGE_BYTES, SHARED_BYTES, FileReader
from smoe_cli.convert.turns import Turns
from smoe_cli.errors import CorruptError


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 256, 3 * LARGE_BYTES + 777, np.uint8)
    path = tmp_path / "data"
    path.write_bytes(values.tobytes())
    return path, values


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, LARGE_BYTES), (1, 2 * LARGE_BYTES), (4095, LARGE_BYTES + 4097), (4096, 100), (1234, -1)]
)
def test_any_part_is_read(data: tuple[Path, np.ndarray], offset: int, nbytes: int, cached: bool) -> None:
    path, values = data
    nbytes = values.size - offset if nbytes < 0 else nbytes
    reader = FileReader()
    if not cached:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert np.array_equal(reader.read(path, offset, nbytes), values[offset : offset + nbytes])
    assert reader.bytes_read == nbytes
    with pytest.raises(CorruptError, match=f"{values.size} bytes there, {values.size + 1} bytes expected"):
        reader.read(path, offset, values.size - offset + 1)
    reader.close()


def test_what_is_shared_is_read_once_and_forgotten(data: tuple[Path, np.ndarray]) -> None:
    path, values = data
    reader = FileReader()
    turns = reader.turns = Turns(2)

    def read(_: int) -> bool:
        with turns.take():
            return bool(np.array_equal(reader.shared.read(path, 5, LARGE_BYTES), values[5 : LARGE_BYTES + 5]))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(40)))
    assert reader.bytes_read == LARGE_BYTES
    for offset in range(SHARED_BYTES // LARGE_BYTES + 1):
        reader.shared.read(path, 100 + offset, LARGE_BYTES)
    before = reader.bytes_read
    assert read(0) and reader.bytes_read == before + LARGE_BYTES
    with pytest.raises(CorruptError):
        reader.shared.read(path, 0, values.size + 1)
    assert turns._free._value == 2
    reader.close()


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "q4_0", "bf16", "mlx4_g64_bf16"])
@pytest.mark.parametrize("source", ["f32", "bf16", "f16"])
def test_storing_is_encoding_measuring_and_packing(name: str, source: str) -> None:
    """Of bytes that begin anywhere, into the middle of a buffer."""
    rng = np.random.default_rng(1)
    rows, cols = 37, 512
    plain = _core.encode(source, rng.normal(0, 1, (rows, cols)).astype(np.float32))
    values = _core.decode(source, plain, rows, cols)
    encoded = _core.encode(name, values)
    layout = "rows" if name == "bf16" else "panel16"
    want = np.frombuffer(encoded if name == "bf16" else _core.pack(name, encoded, rows, cols), np.uint8)
    target = np.full(want.size + 300, 7, np.uint8)
    odd = np.frombuffer(b"x" + plain, np.uint8)[1:]
    error, norm = _core.store(source, odd, rows, cols, name, layout, target, 100)
    assert np.array_equal(target[100:-200], want) and set(target[:100]) | set(target[-200:]) == {7}
    difference = _core.decode(name, encoded, rows, cols).astype(np.float64) - values
    assert error == pytest.approx((difference**2).sum(), rel=1e-5, abs=1e-12)
    assert norm == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-5)
    if name != "bf16":
        target[:] = 0
        assert _core.store(name, encoded, rows, cols, name, layout, target, 100)[0] == 0
        assert np.array_equal(target[100:-200], want)
    with pytest.raises(_core.CoreError, match="do not fit"):
        _core.store(source, odd, rows, cols, name, layout, target, 301)
    if name.startswith("q") and source != "f16":
        with pytest.raises(_core.CoreError, match="not encoded again"):
            _core.store("q5_0", encoded, rows, cols, name, layout, target, 0)
