"""Writing a GGUF file: version 3, 32-byte alignment, tensors streamed one after the other."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.gguf.file import ALIGNMENT, ARRAY, MAGIC, STRING, TYPES

CODES = {name: (number, values, nbytes) for number, (name, values, nbytes) in TYPES.items()}
U8, U32, I32, F32, BOOL = 0, 4, 5, 6, 7


@dataclass(frozen=True)
class Typed:
    """A value with its type number; a list with the type of its items."""

    kind: int
    value: Any


@dataclass(frozen=True)
class Out:
    """A tensor to write: shape outermost first, and what gives its bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def nbytes(self) -> int:
        _, values, nbytes = CODES[self.kind]
        count = 1
        for size in self.shape:
            count *= size
        return count // values * nbytes


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(kind: int, value: Any) -> bytes:
    return (
        _string(value)
        if kind == STRING
        else struct.pack({U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)
    )


def _value(typed: Typed) -> bytes:
    if not isinstance(typed.value, list):
        return struct.pack("<I", typed.kind) + _scalar(typed.kind, typed.value)
    items = b"".join(_scalar(typed.kind, item) for item in typed.value)
    return struct.pack("<IIQ", ARRAY, typed.kind, len(typed.value)) + items


def header(metadata: dict[str, Typed], tensors: list[Out]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, typed in metadata.items():
        parts += [_string(key), _value(typed)]
    offset = 0
    for out in tensors:
        parts += [_string(out.name), struct.pack("<I", len(out.shape))]
        parts += [struct.pack("<Q", size) for size in reversed(out.shape)]
        parts.append(struct.pack("<IQ", CODES[out.kind][0], offset))
        offset += -(-out.nbytes // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)


def write_gguf(path: Path, metadata: dict[str, Typed], tensors: list[Out]) -> Iterator[int]:
    """Writes the file; yields the bytes written after each tensor."""
    with path.open("wb") as file:
        _padded(file, header(metadata, tensors))
        for out in tensors:
            written = 0
            for piece in out.pieces():
                file.write(np.ascontiguousarray(piece).data)
                written += piece.nbytes
            assert written == out.nbytes, f"{out.name}: {written} bytes for {out.nbytes}"
            file.write(bytes(-written % ALIGNMENT))
            yield file.tell()


def _padded(file: BinaryIO, data: bytes) -> None:
    file.write(data + bytes(-len(data) % ALIGNMENT))
