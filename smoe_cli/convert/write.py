"""Writing a vault from a plan: rows are read, encoded and packed by a pool of threads, outputs written in order. As
many threads as there are jobs compute at any time; the others read, without waiting for a turn to compute where what
they read needs no computing.

Memory: outputs in flight (at most ``IN_FLIGHT_BYTES``, or one output) and one chunk of rows per thread. A conversion
killed at any moment leaves part files only; the next run continues with what is not written yet. Relative errors are
kept in a journal beside the parts, so that a resumed conversion reports all of them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.calibrate import Columns, Importance
from smoe_cli.convert.encodings import is_plain
from smoe_cli.convert.matrix import Matrix
from smoe_cli.convert.plan import PARTS, ExpertOut, Plan, TensorOut
from smoe_cli.convert.safetensors import ALIGNMENT, FileReader
from smoe_cli.convert.turns import Turns
from smoe_cli.errors import SmoeError, from_core

IN_FLIGHT_BYTES = 512 << 20  # the two largest tensors of a trunk, so that reading goes on while one is written
CHUNK_VALUES = 2 << 20
WORKER_BYTES_PER_VALUE = 24  # source, its parts, float32
WORKERS_BYTES = 512 << 20
READERS = 8  # threads beside those that compute, so that the disk works while they do
PANEL_ROWS = 16

Progress = Callable[[int], None]  # source bytes done since the last call


@dataclass
class Errors:
    """Relative errors, |decoded - source| / |source|, of the trunk by name and of records by (layer, expert)."""

    tensors: dict[str, float] = field(default_factory=dict)
    records: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def per_layer(self) -> dict[str, dict[str, dict[str, float | int]]]:
        """The manifest's ``expert_errors``: mean, largest and worst expert of each part of each layer."""
        layers: dict[int, dict[int, list[float]]] = {}
        for (layer, expert), values in self.records.items():
            layers.setdefault(layer, {})[expert] = values
        found: dict[str, dict[str, dict[str, float | int]]] = {}
        for layer, experts in sorted(layers.items()):
            found[str(layer)] = {}
            for part, name in enumerate(PARTS):
                worst = max(sorted(experts), key=lambda expert: experts[expert][part])
                mean = sum(values[part] for values in experts.values()) / len(experts)
                found[str(layer)][name] = {"mean": mean, "max": experts[worst][part], "worst_expert": worst}
        return found

    def worst(self, count: int = 5) -> list[tuple[str, float]]:
        """The largest relative errors and where they are."""
        every = list(self.tensors.items())
        for (layer, expert), values in self.records.items():
            every += [
                (f"layers.{layer}.experts.{expert}.{part}", value) for part, value in zip(PARTS, values, strict=True)
            ]
        return sorted((item for item in every if item[1] > 0), key=lambda item: -item[1])[:count]


class Journal:
    """Errors of the outputs written so far, one JSON line each; the last line of a name counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = Errors()
        if path.is_file():
            for line in path.read_text("utf-8").splitlines():
                self._load(line)

    def _load(self, line: str) -> None:
        try:
            key, value = json.loads(line)
        except ValueError:
            return  # cut by a kill; that output is measured again
        if isinstance(key, str):
            self.errors.tensors[key] = value
        else:
            self.errors.records[key[0], key[1]] = value

    def add(self, key: str | tuple[int, int], value: float | list[float]) -> None:
        line = json.dumps([key, value])
        self._load(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass
class _Piece:
    """One matrix of an output: where its bytes go in the output's buffer."""

    name: str
    matrix: Matrix
    encoding: str
    layout: str
    offset: int
    importance: Columns | None = None  # of its columns


@dataclass
class _InFlight:
    out: TensorOut | ExpertOut
    write: bool
    buffer: NDArray[np.uint8]
    futures: list[tuple[int, Future[tuple[float, float]]]]  # (piece, (squared error, squared norm))


def _pieces(out: TensorOut | ExpertOut) -> list[_Piece]:
    if isinstance(out, TensorOut):
        return [_Piece(out.name, out.source, out.encoding, out.layout, 0)]
    where = f"layers.{out.layer}.experts.{out.expert}"
    pieces = [
        _Piece(f"{where}.{name}", matrix, encoding, "panel16", offset)
        for name, matrix, encoding, offset in zip(PARTS, out.parts, out.encodings, out.offsets, strict=True)
    ]
    for name, matrix, offset in zip(PARTS, out.biases, out.bias_offsets, strict=False):
        pieces.append(_Piece(f"{where}.{name}.bias", matrix, "f32", "rows", offset))
    return pieces


def _chunks(piece: _Piece, values: int) -> Iterator[tuple[int, int]]:
    """Row ranges of whole panels of about ``values`` values; a source that is stored across is read in one go."""
    rows = piece.matrix.rows
    step = max(PANEL_ROWS, values // piece.matrix.cols // PANEL_ROWS * PANEL_ROWS)
    step = rows if piece.matrix.reads_whole else step
    return ((start, min(rows, start + step)) for start in range(0, rows, max(1, step)))


def _encode_chunk(
    piece: _Piece, source: str, data: NDArray[Any], buffer: NDArray[np.uint8], start: int, stop: int
) -> tuple[float, float]:
    """Encode rows [start, stop) into their place in the buffer; the squared error and the squared norm."""
    rows, cols = stop - start, piece.matrix.cols
    before = int(_core.stored_bytes(piece.encoding, piece.layout, start, cols)) if start else 0
    try:
        squared, norm = _core.store(
            source, data, rows, cols, piece.encoding, piece.layout, buffer, piece.offset + before, piece.importance
        )
    except _core.CoreError as error:
        _refuse_odd_value(piece, source, data, start)
        raise SmoeError(f"{piece.matrix.tensor.name}: {error}", getattr(error, "hint", "")) from error
    if not math.isfinite(squared + norm):
        _refuse_odd_value(piece, source, data, start)
        name = piece.matrix.tensor.name
        raise SmoeError(f"{name} has values that {piece.encoding} cannot hold", "choose another encoding for it")
    return squared, norm


def _read_chunk(reader: FileReader, piece: _Piece, start: int, stop: int) -> tuple[str, NDArray[Any]]:
    """Rows as the engine takes them: in the bytes of the encoding that is kept, plain as they lie, or float32."""
    stored = piece.matrix.stored
    if stored and (stored == piece.encoding or is_plain(stored)):
        return stored, piece.matrix.read_stored(reader, start, stop)
    return "f32", np.ascontiguousarray(piece.matrix.read(reader, start, stop))


def _refuse_odd_value(piece: _Piece, source: str, data: NDArray[Any], start: int) -> None:
    """Names the first value that is no number, if there is one."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    cols = piece.matrix.cols
    rows = raw.size // int(_core.stored_bytes(source, "rows", 1, cols))
    flat = np.asarray(_core.decode(source, raw, rows, cols)).reshape(-1)
    bad = np.flatnonzero(~np.isfinite(flat))
    if bad.size:
        row, col = divmod(int(bad[0]), cols)
        where = f"[{start + row}, {col}] of {piece.name}"
        name = piece.matrix.tensor.name
        raise SmoeError(f"{name} holds {flat[bad[0]]} at {where}", "the checkpoint is damaged; download it again")


class VaultWrite:
    """One conversion: the part files, what is already in them, and the pool that makes the rest."""

    def __init__(
        self,
        plan: Plan,
        reader: FileReader,
        out_dir: Path,
        stem: str,
        fingerprint: str,
        jobs: int,
        importance: Importance | None = None,
    ) -> None:
        self.importance = importance or Importance()
        self.plan, self.reader, self.jobs = plan, reader, jobs
        self.turns = Turns(jobs)
        self.out_dir, self.stem = out_dir, stem
        trunk = [(t.name, *_st_entry(t), t.nbytes) for t in plan.tensors]
        try:
            self.writer = _core.VaultWriter(str(out_dir), stem, fingerprint, plan.layers(), trunk, True)
        except _core.CoreError as error:
            raise from_core(error) from error
        self.journal = Journal(journal_path(out_dir, stem))
        self.done_records = {(int(layer), int(expert)) for layer, expert in self.writer.done_records()}
        self.done_tensors = set(self.writer.done_tensors())

    def __enter__(self) -> VaultWrite:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the part files, which stay to be continued."""
        self.writer.abort()

    @property
    def resumed(self) -> bool:
        return bool(self.done_records or self.done_tensors)

    def todo(self) -> list[tuple[TensorOut | ExpertOut, bool]]:
        """(output, write it): what is written but was not measured is only measured."""
        errors = self.journal.errors
        found: list[tuple[TensorOut | ExpertOut, bool]] = []
        for tensor in self.plan.tensors:
            if tensor.name not in self.done_tensors or tensor.name not in errors.tensors:
                found.append((tensor, tensor.name not in self.done_tensors))
        for record in self.plan.experts:
            written = (record.moe_layer, record.expert) in self.done_records
            if not written or (record.layer, record.expert) not in errors.records:
                found.append((record, not written))
        return found

    def todo_bytes(self) -> int:
        """Source bytes that are still to be read."""
        return sum(piece.matrix.nbytes for out, _ in self.todo() for piece in _pieces(out))

    def run(self, progress: Progress) -> Errors:
        """Encode and write everything that is not there yet. Interrupted, the parts stay and the next run continues."""
        pool = ThreadPoolExecutor(self.jobs + READERS, thread_name_prefix="encode")
        self.reader.turns = self.turns
        flight: deque[_InFlight] = deque()
        held = 0
        try:
            for out, write in self.todo():
                while flight and held + out.nbytes > IN_FLIGHT_BYTES:
                    held -= self._complete(flight.popleft())
                flight.append(self._start(pool, out, write, progress))
                held += out.nbytes
            while flight:
                self._complete(flight.popleft())
        except _core.CoreError as error:
            raise from_core(error) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self.reader.turns = None
        return self.journal.errors

    def _start(
        self, pool: ThreadPoolExecutor, out: TensorOut | ExpertOut, write: bool, progress: Progress
    ) -> _InFlight:
        buffer = zeros(out.nbytes)
        values = min(CHUNK_VALUES, WORKERS_BYTES // (self.jobs * WORKER_BYTES_PER_VALUE))
        pieces = [replace(piece, importance=self.importance.of(piece.name)) for piece in _pieces(out)]
        futures = [
            (index, pool.submit(self._make_chunk, piece, buffer, start, stop, progress))
            for index, piece in enumerate(pieces)
            for start, stop in _chunks(piece, values)
        ]
        return _InFlight(out, write, buffer, futures)

    def _make_chunk(
        self, piece: _Piece, buffer: NDArray[np.uint8], start: int, stop: int, progress: Progress
    ) -> tuple[float, float]:
        """One chunk: its squared error and squared norm. While it waits for the disk another computes."""
        read = (self.reader, piece, start, stop)
        known = _read_chunk(*read) if is_plain(piece.matrix.stored) else None
        with self.turns.take():
            source, data = known or _read_chunk(*read)
            sums = _encode_chunk(piece, source, data, buffer, start, stop)
        progress(piece.matrix.stored_bytes(stop - start))
        return sums

    def _complete(self, item: _InFlight) -> int:
        """Wait for an output's chunks, note its errors, write it. Returns the bytes it held."""
        out = item.out
        sums = [[0.0, 0.0] for _ in _pieces(out)]
        for index, future in item.futures:
            error, norm = future.result()
            sums[index][0] += error
            sums[index][1] += norm
        errors = [float(f"{math.sqrt(error / norm):.4g}") if norm else 0.0 for error, norm in sums]
        if isinstance(out, TensorOut):
            self.journal.add(out.name, errors[0])
            if item.write:
                self.writer.write_tensor(out.name, item.buffer)
        else:
            self.journal.add((out.layer, out.expert), errors[: len(PARTS)])  # biases are stored as they are
            if item.write:
                self.writer.write_record(out.moe_layer, out.expert, item.buffer)
        return out.nbytes

    def finish(self, manifest: dict[str, Any]) -> None:
        """Put the manifest in and everything into place: the vault exists from here on."""
        try:
            self.writer.finish(json.dumps(manifest, ensure_ascii=False))
        except _core.CoreError as error:
            raise from_core(error) from error
        self.journal.path.unlink(missing_ok=True)


def zeros(nbytes: int) -> NDArray[np.uint8]:
    """Zeros at an address from which a file can be written past the page cache."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    return raw[-raw.ctypes.data % ALIGNMENT :][:nbytes]


def _st_entry(tensor: TensorOut) -> tuple[str, list[int]]:
    """dtype and shape of a trunk tensor in the scout: plain ones as they are, quantised ones as bytes."""
    plain = {"f32": "F32", "f16": "F16", "bf16": "BF16"}.get(tensor.encoding)
    return (plain, list(tensor.shape)) if plain else ("U8", [tensor.nbytes])


def journal_path(out_dir: Path, stem: str) -> Path:
    return out_dir / f"{stem}.errors.part"


def discard(out_dir: Path, stem: str) -> None:
    """Remove the part files of an earlier conversion."""
    try:
        _core.discard_parts(str(out_dir), stem)
    except _core.CoreError as error:
        raise from_core(error) from error
    journal_path(out_dir, stem).unlink(missing_ok=True)
