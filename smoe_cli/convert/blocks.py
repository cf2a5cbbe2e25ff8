"""Tensors whose rows are not plain numbers: they decode themselves, row by row.

A reader hands out ``SourceTensor`` for plain numbers and a ``RowTensor`` for anything packed. Rows are counted over the
whole tensor, all experts of a stacked one after each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.safetensors import FileReader, SourceTensor


@dataclass(frozen=True)
class RowTensor(SourceTensor):
    """``shape`` is the one of the values; ``offset`` and ``nbytes`` are those of the largest stored part."""

    @property
    def native(self) -> str:
        """The encoding whose bytes ``raw_rows`` gives; "" where the engine has none such."""
        return ""

    @property
    def near(self) -> str:
        """The encoding that takes the place of the source's own where that is not native."""
        return "q8_0"

    @property
    def whole(self) -> bool:
        """Whether rows lie across the stored bytes, so that all are better read at once."""
        return False

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        """The values, float32 [count, cols]."""
        raise NotImplementedError

    def raw_rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of ``native``, [count, bytes of a row]."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlockTensor(RowTensor):
    """Rows of whole blocks one after the other, as GGUF stores them; ``dtype`` is the ggml name."""

    @property
    def native(self) -> str:
        return self.dtype.lower() if self.dtype.lower() in _core.encodings() else ""

    @property
    def row_bytes(self) -> int:
        return self.nbytes // math.prod(self.shape[:-1])

    def raw_rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.uint8]:
        width = self.row_bytes
        return reader.read(self.path, self.offset + first * width, count * width).reshape(count, width)

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        raw, cols = self.raw_rows(reader, first, count), self.shape[-1]
        if self.native:
            return np.asarray(_core.decode(self.native, raw.reshape(-1), count, cols)).reshape(count, cols)
        import gguf.quants

        kind = gguf.GGMLQuantizationType[self.dtype]
        return np.asarray(gguf.quants.dequantize(raw, kind), np.float32).reshape(count, cols)
