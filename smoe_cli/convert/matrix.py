"""A logical matrix [rows, cols] inside a checkpoint: a whole tensor, one expert of a fused one, either orientation.

``read`` gives rows as float32, exactly; memory is the rows asked for, or one expert's slab where that is stored
transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor, to_float32
from smoe_cli.families.model import Groups

PLAIN = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class Matrix:
    """Rows ``first`` to ``first + rows`` of ``tensor`` (of its slab ``expert`` if it is 3-D), seen as [out, in]; or the
    rows that ``groups`` picks from it."""

    tensor: SourceTensor
    rows: int
    cols: int
    expert: int | None = None
    first: int = 0
    transposed: bool = False
    scale: SourceTensor | None = None
    scale_block: tuple[int, int] = (128, 128)
    groups: Groups | None = None
    add: float = 0.0  # to every value

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.stored_bytes(self.rows)

    def stored_bytes(self, rows: int) -> int:
        """Bytes that ``rows`` rows take in the checkpoint, block scales of packed weights included."""
        values = rows * self.cols
        if isinstance(self.tensor, RowTensor):
            return values * self.tensor.nbytes // math.prod(self.tensor.shape)
        return values * self.tensor.itemsize

    @property
    def native(self) -> str:
        """The encoding whose bytes ``read_native`` gives; "" where the values have to be read."""
        turned = self.transposed or (self.groups is not None and self.groups.transposed)
        return self.tensor.native if isinstance(self.tensor, RowTensor) and not turned and not self.add else ""

    @property
    def stored(self) -> str:
        """The encoding whose bytes ``read_stored`` gives, or a plain one; "" where the values have to be read."""
        if isinstance(self.tensor, RowTensor) or self.groups is not None:
            return self.native
        return PLAIN.get(self.dtype, "") if self.scale is None and not self.transposed and not self.add else ""

    @property
    def reads_whole(self) -> bool:
        """Whether any row costs as much to read as all of them."""
        return self.transposed or (isinstance(self.tensor, RowTensor) and self.tensor.whole)

    def read_stored(self, reader: FileReader, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) in the bytes of ``stored``."""
        if isinstance(self.tensor, RowTensor):
            return self.read_native(reader, start, stop)
        return self.read_raw(reader, start, stop)

    def read_native(self, reader: FileReader, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) in the bytes of ``native``, [stop - start, bytes of a row]."""
        assert isinstance(self.tensor, RowTensor)
        if self.groups is None:
            return self.tensor.raw_rows(reader, self._first_row() + start, stop - start)
        begin, end = self.groups.span(start, stop)
        raw = self.tensor.raw_rows(reader.shared, self._first_row() + begin, end - begin)
        return np.ascontiguousarray(self.groups.pick(raw, start, stop))

    def _first_row(self) -> int:
        """In a row tensor, the first row of this matrix."""
        return (self.expert or 0) * self.tensor.shape[-2] + self.first if len(self.tensor.shape) > 2 else self.first

    def read_raw(self, reader: FileReader, start: int, stop: int) -> NDArray[np.uint8]:
        """Stored bytes of rows [start, stop); only for matrices that are not transposed."""
        width = self.cols * self.tensor.itemsize
        return reader.read(self.tensor.path, self._slab_offset() + (self.first + start) * width, (stop - start) * width)

    def read(self, reader: FileReader, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) as float32 [stop - start, cols]."""
        if self.add:
            return replace(self, add=0.0).read(reader, start, stop) + np.float32(self.add)
        if self.groups is not None:
            return self._read_groups(reader, self.groups, start, stop)
        if isinstance(self.tensor, RowTensor):
            return self._read_rows(self.tensor, reader, start, stop)
        if self.transposed:
            return self._read_transposed(reader, start, stop)
        values = to_float32(self.read_raw(reader, start, stop), self.dtype).reshape(stop - start, self.cols)
        if self.scale is None:
            return values
        first = self.first + start
        return values * self._scales(reader, first, first + stop - start, 0, self.cols)

    def _read_groups(self, reader: FileReader, groups: Groups, start: int, stop: int) -> NDArray[np.float32]:
        rows, stored = groups.source_shape(self.rows, self.cols)
        whole = replace(self, rows=rows, cols=stored, groups=None)
        if not groups.transposed:
            values = whole.read(reader.shared, *groups.span(start, stop))
            return np.ascontiguousarray(groups.pick(values, start, stop))
        begin, end = start // stored, -(-stop // stored)  # a group gives as many rows as it has columns
        values = whole.read(reader.shared, begin * groups.size, end * groups.size).reshape(
            end - begin, groups.size, stored
        )
        taken = values[:, groups.first : groups.first + groups.rows].transpose(0, 2, 1)
        return np.ascontiguousarray(taken).reshape(-1, self.cols)[start - begin * stored : stop - begin * stored]

    def _read_rows(self, tensor: RowTensor, reader: FileReader, start: int, stop: int) -> NDArray[np.float32]:
        if not self.transposed:
            return tensor.rows(reader, self._first_row() + start, stop - start)
        first = (self.expert or 0) * self.cols  # stored [in, out]
        values = tensor.rows(reader.shared, first, self.cols)[:, self.first + start : self.first + stop]
        return np.ascontiguousarray(values.T)

    def _read_transposed(self, reader: FileReader, start: int, stop: int) -> NDArray[np.float32]:
        width = self.tensor.shape[-1]
        raw = reader.shared.read(self.tensor.path, self._slab_offset(), self.cols * width * self.tensor.itemsize)
        begin, end = self.first + start, self.first + stop
        stored = raw.view(f"V{self.tensor.itemsize}").reshape(self.cols, width)[:, begin:end]
        values = to_float32(np.ascontiguousarray(stored).view(np.uint8).reshape(-1), self.dtype).reshape(
            self.cols, end - begin
        )
        if self.scale is not None:
            values = values * self._scales(reader, 0, self.cols, begin, end)
        return np.ascontiguousarray(values.T)

    def _slab_offset(self) -> int:
        slab = math.prod(self.tensor.shape[1:]) * self.tensor.itemsize
        return self.tensor.offset + (self.expert or 0) * (slab if self.expert is not None else 0)

    def _scales(self, reader: FileReader, row0: int, row1: int, col0: int, col1: int) -> NDArray[np.float32]:
        """Block scales spread over stored rows [row0, row1) and columns [col0, col1); the last block may be ragged."""
        assert self.scale is not None
        block_rows, block_cols = self.scale_block
        shape = self.scale.shape[-2:]
        nbytes = math.prod(shape) * self.scale.itemsize
        raw = reader.read(self.scale.path, self.scale.offset + (self.expert or 0) * nbytes, nbytes)
        scales = to_float32(raw, self.scale.dtype).reshape(shape)
        return scales[np.arange(row0, row1)[:, None] // block_rows, np.arange(col0, col1)[None, :] // block_cols]
