"""Reading safetensors files: headers, checked against the file's size, and parts of tensors, never a whole file.

A file is u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.turns import Turns
from smoe_cli.errors import CorruptError, UnsupportedError

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
}
DTYPE_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "I8": 1, "BOOL": 1}
WEIGHT_DTYPES = ("F32", "F16", "BF16", "F8_E4M3")
MAX_HEADER_BYTES = 256 << 20
LARGE_BYTES = 1 << 20  # of a read that is worth asking the disk for at once
SHARED_BYTES = 64 << 20
ALIGNMENT = 4096  # of direct reads
DIRECT = getattr(os, "O_DIRECT", 0)
AGAIN = "download it again"


@dataclass(frozen=True)
class SourceTensor:
    """Where a tensor's bytes are. ``offset`` is absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of one value, for dtypes that have whole ones."""
        return DTYPE_BYTES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, SourceTensor], bytes]:
    """The tensors of a file and its raw header. CorruptError names the file, the bytes there and the bytes expected."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CorruptError(f"{path.name} is {size} bytes long, too short for a safetensors file", AGAIN)
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER_BYTES:
            raise CorruptError(f"{path.name} is not a safetensors file: its header would be {length} bytes", AGAIN)
        if 8 + length > size:
            raise _cut(path, size, 8 + length)
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(path, 8 + length, name, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path.name}: its safetensors header cannot be read: {error}", AGAIN) from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if end > size:
        raise _cut(path, size, end)
    return tensors, raw


def _cut(path: Path, there: int, expected: int) -> CorruptError:
    return CorruptError(f"{path.name} is cut short: {there} bytes there, {expected} bytes expected", AGAIN)


def _entry(path: Path, base: int, name: str, entry: dict[str, object]) -> SourceTensor:
    dtype, shape, offsets = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape of {name}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(n, int) for n in offsets):
        raise ValueError(f"data_offsets of {name}")
    begin, end = offsets
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"{path.name}: tensor {name} has dtype {dtype}, which is not supported")
    if begin < 0 or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{name} takes {end - begin} bytes, its shape {shape} of {dtype} does not")
    return SourceTensor(name, dtype, tuple(shape), path, base + begin, end - begin)


class FileReader:
    """Positioned reads from many files and threads; each file is opened once. Large parts of what is not in the page
    cache are read past it: the disk is faster asked for all of it at once, and the cache has other uses.

    ``turns``: what calling threads may have while they compute; given up while the disk is waited for.
    """

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self.bytes_read = 0
        self.large_bytes, self.reading_s = 0, 0.0  # of large reads; the time in which there were any
        self._reading, self._reading_since = 0, 0.0
        self._files: dict[tuple[Path, int], int] = {}
        self._lock = threading.Lock()
        self._shared: SharedReader | None = None

    @property
    def shared(self) -> SharedReader:
        """For parts that several matrices are taken from: what was read last is not read again."""
        with self._lock:
            if self._shared is None:
                self._shared = SharedReader(self)
            return self._shared

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Exactly ``nbytes`` bytes. CorruptError if the file ends before."""
        with self._lock:
            self.bytes_read += nbytes
        if nbytes < LARGE_BYTES:
            return self._read(path, offset, nbytes)
        with self.waiting():
            self._begin_reading()
            try:
                return self._read_large(path, offset, nbytes)
            finally:
                self._end_reading(nbytes)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around a wait for the disk."""
        return self.turns.give_up() if self.turns is not None else contextlib.nullcontext()

    def _begin_reading(self) -> None:
        with self._lock:
            if self._reading == 0:
                self._reading_since = time.monotonic()
            self._reading += 1

    def _end_reading(self, nbytes: int) -> None:
        with self._lock:
            self._reading -= 1
            self.large_bytes += nbytes
            if self._reading == 0:
                self.reading_s += time.monotonic() - self._reading_since

    def _read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        out = np.empty(nbytes, np.uint8)
        there = self._fill(self._descriptor(path), path, offset, out)
        if there < nbytes:
            raise _cut(path, offset + there, offset + nbytes)
        return out

    def _read_large(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        descriptor = self._descriptor(path)
        direct = -1 if _is_cached(descriptor, offset) else self._descriptor(path, DIRECT)
        if direct < 0:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
            return self._read(path, offset, nbytes)
        head = offset % ALIGNMENT
        length = -(-(head + nbytes) // ALIGNMENT) * ALIGNMENT
        raw = np.empty(length + ALIGNMENT, np.uint8)
        aligned = raw[-raw.ctypes.data % ALIGNMENT :][:length]
        try:
            there = self._fill(direct, path, offset - head, aligned, ALIGNMENT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._read(path, offset, nbytes)  # a device of larger blocks
        if there < head + nbytes:
            raise _cut(path, offset - head + there, offset + nbytes)
        return aligned[head : head + nbytes]

    def _fill(self, descriptor: int, path: Path, offset: int, out: NDArray[np.uint8], unit: int = 1) -> int:
        """Bytes read; fewer than there is room for at the end of the file, the only place where a direct read ends
        within a unit."""
        view, done = memoryview(out.data), 0
        while done < out.size and done % unit == 0:
            try:
                count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error  # it does not know the file's name
            if count == 0:
                break
            done += count
        return done

    def _descriptor(self, path: Path, flags: int = 0) -> int:
        """-1 where the file system does not take the flags."""
        with self._lock:
            if (path, flags) not in self._files:
                try:
                    self._files[path, flags] = os.open(path, os.O_RDONLY | flags)
                except OSError:
                    if not flags:
                        raise
                    self._files[path, flags] = -1
            return self._files[path, flags]

    def close(self) -> None:
        with self._lock:
            for descriptor in self._files.values():
                if descriptor >= 0:
                    os.close(descriptor)
            self._files.clear()
            self._shared = None


class SharedReader(FileReader):
    """Reads through another reader and keeps what was read last, at most SHARED_BYTES or one part. Read only: what it
    gives is given to others too."""

    def __init__(self, reader: FileReader) -> None:
        super().__init__()
        self._reader = reader
        self._held: OrderedDict[tuple[Path, int, int], Future[NDArray[np.uint8]]] = OrderedDict()

    @property
    def shared(self) -> SharedReader:
        return self

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        key = (path, offset, nbytes)
        with self._lock:
            found = self._held.get(key)
            if found is None:
                mine = self._held[key] = Future()
                self._forget_oldest()
            else:
                self._held.move_to_end(key)
        if found is not None:
            with self._reader.waiting():  # another thread may be reading it still, and needs its turn for that
                return found.result()
        try:
            mine.set_result(self._reader.read(path, offset, nbytes))
        except BaseException as error:
            with self._lock:
                self._held.pop(key, None)
            mine.set_exception(error)
        return mine.result()

    def _forget_oldest(self) -> None:
        while len(self._held) > 1 and sum(nbytes for _, _, nbytes in self._held) > SHARED_BYTES:
            self._held.popitem(last=False)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page cache has the byte at ``offset``; True where that cannot be found out."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return True


def _e4m3_table() -> NDArray[np.float32]:
    """Values of the 256 codes of float8 e4m3fn: bias 7, no infinities, 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(codes & 0x7F) == 0x7F] = np.nan
    return (sign * value).astype(np.float32)


_E4M3 = _e4m3_table()


def to_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The exact float32 values of little-endian bytes; one dimension."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[raw]
    raise UnsupportedError(f"dtype {dtype} cannot be read as weights")
