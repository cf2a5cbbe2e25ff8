"""The bytes of GGUF: header, metadata and tensor directory of a file, or of all parts of a split one.

A file is "GGUF", u32 version (2 or 3), u64 tensors, u64 metadata pairs; the pairs (name, u32 type, value); the
directory (name, u32 dimensions, u64 each, innermost first, u32 type, u64 offset); then the data, aligned. Nothing is
taken on trust: a count is compared with the bytes that are left before anything of that size is made.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.errors import CorruptError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4
MOST_VALUES = 1 << 40  # of one tensor
MOST_ITEMS = 1 << 24  # of one list in the metadata; vocabularies have less than a million
AGAIN = "download it again"

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# ggml type -> (name, values of a block, its bytes)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor of the directory: shape outermost first, its place in its file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass
class GgufFile:
    """``metadata`` of the first part; ``tensors`` of all of them."""

    paths: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, Entry]
    headers: list[bytes] = field(default_factory=list)


_Found = tuple[str, str, tuple[int, ...], int, int]  # name, type, shape, offset in the data, bytes


class _Cursor:
    """Reads forward through a mapped file; whatever would pass its end is an error that says where."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int, what: str) -> int:
        """Moves past ``count`` bytes; where they began."""
        begin = self.at
        if count < 0 or begin + count > len(self.data):
            raise CorruptError(
                f"{self.path.name} is cut short or damaged: {len(self.data)} bytes there, {what} would end at byte "
                f"{begin + count}",
                AGAIN,
            )
        self.at = begin + count
        return begin

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self.take(size, what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        begin = self.take(length, what)
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            raise CorruptError(f"{self.path.name}: {what} has the unknown type {kind}", AGAIN)
        return self.array(what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if count > MOST_ITEMS:
            raise CorruptError(f"{self.path.name}: {what} would be a list of {count} values", AGAIN)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            begin = self.take(count * dtype.itemsize, what)
            return list(np.frombuffer(self.data, dtype, count, begin).tolist())
        if kind != STRING:
            raise UnsupportedError(f"{self.path.name}: {what} is a list of type {kind}, which is not supported")
        if count * 8 > len(self.data) - self.at:
            self.take(count * 8, what)
        return [self.string(what) for _ in range(count)]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Entry], bytes]:
    """Metadata, directory and raw header of one file. CorruptError says what is wrong and where."""
    size = path.stat().st_size
    if size < 24:
        raise CorruptError(f"{path.name} is {size} bytes long, too short for a GGUF file", AGAIN)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        _check_start(path, data[: cursor.take(8, "the header") + 8])
        tensors, pairs = cursor.scalar("Q", "the header"), cursor.scalar("Q", "the header")
        for count, least, what in ((pairs, 13, "metadata pairs"), (tensors, 25, "tensors")):
            if count * least > size:
                raise CorruptError(f"{path.name} states {count} {what}, more than {size} bytes can hold", AGAIN)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = cursor.string("a metadata name")
            metadata[name] = cursor.value(cursor.scalar("I", f"metadata {name!r}"), f"metadata {name!r}")
        entries = [_entry(cursor) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise CorruptError(f"{path.name}: general.alignment is {alignment!r}", AGAIN)
        base = -(-cursor.at // alignment) * alignment
        header = data[: cursor.at]
    return metadata, _placed(path, size, base, entries), header


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != MAGIC:
        raise CorruptError(f"{path.name} is not a GGUF file", AGAIN)
    version = struct.unpack("<I", start[4:])[0]
    if version in VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise UnsupportedError(f"{path.name} is a big-endian GGUF file, which is not supported")
    raise UnsupportedError(f"{path.name} is GGUF version {version}, which is not supported", "versions: 2, 3")


def _entry(cursor: _Cursor) -> _Found:
    name = cursor.string("a tensor's name")
    dimensions = cursor.scalar("I", f"tensor {name!r}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise CorruptError(f"{cursor.path.name}: tensor {name!r} has {dimensions} dimensions", AGAIN)
    shape = tuple(reversed([cursor.scalar("Q", f"tensor {name!r}") for _ in range(dimensions)]))
    kind, offset = cursor.scalar("I", f"tensor {name!r}"), cursor.scalar("Q", f"tensor {name!r}")
    if kind not in TYPES:
        raise UnsupportedError(f"{cursor.path.name}: tensor {name!r} has ggml type {kind}, which is not supported")
    label, values, block = TYPES[kind]
    count = math.prod(shape)
    if not 0 < count <= MOST_VALUES or shape[-1] % values:
        raise CorruptError(f"{cursor.path.name}: tensor {name!r} of {label} cannot have shape {list(shape)}", AGAIN)
    return name, label, shape, offset, count // values * block


def _placed(path: Path, size: int, base: int, found: list[_Found]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, kind, shape, offset, nbytes in found:
        if name in entries:
            raise CorruptError(f"{path.name} names tensor {name!r} twice", AGAIN)
        entries[name] = Entry(name, kind, shape, path, base + offset, nbytes)
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=0)
    if end > size:
        raise CorruptError(f"{path.name} is cut short: {size} bytes there, {end} bytes expected", AGAIN)
    return entries


SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def model_of(name: str) -> str:
    """A file's name (or path) without its ending and the number of its part."""
    match = SPLIT.fullmatch(name)
    return match[1] if match else name.rpartition(".")[0] or name


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file, given any of them; the file alone otherwise. CorruptError lists those not there."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= count <= 9999:
        raise CorruptError(f"{path.name} says that it is split into {count} files")
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CorruptError(f"{path.parent}: parts of the model are not there: {listed}", "download them")
    return parts


def read_gguf(path: Path) -> GgufFile:
    """A model in one or several files, given any of them."""
    paths = parts_of(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, Entry] = {}
    headers: list[bytes] = []
    for index, part in enumerate(paths):
        stated, entries, header = read_file(part)
        metadata = metadata or stated
        _check_split(part, stated, index, len(paths))
        if twice := sorted(set(entries) & set(tensors)):
            raise CorruptError(f"{part.name} repeats {twice[0]} of another part", AGAIN)
        tensors |= entries
        headers.append(header)
    expected = metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise CorruptError(f"{paths[0].name}: the parts hold {len(tensors)} tensors, {expected} expected", AGAIN)
    return GgufFile(paths, metadata, tensors, headers)


def _check_split(part: Path, stated: dict[str, Any], index: int, count: int) -> None:
    number, total = stated.get("split.no", index), stated.get("split.count", count)
    if total not in (0, count) or (count > 1 and number != index):
        raise CorruptError(
            f"{part.name} is part {number} of {total} by its own word, part {index} of {count} by its name",
            "give the parts their own names again, NAME-00001-of-0000N.gguf",
        )
