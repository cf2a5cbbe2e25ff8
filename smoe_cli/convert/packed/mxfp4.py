"""MXFP4: blocks of 32 four-bit floats, two to a byte, the even ones in the low halves, each block times 2 ** (its scale
- 127). As gpt-oss stores its experts (NAME_blocks [E, R, G, 16], NAME_scales [E, R, G]) and others their matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor
from smoe_cli.errors import CorruptError, UnsupportedError

VALUES = 32
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Tensor(RowTensor):
    codes: SourceTensor | None = None
    scale: SourceTensor | None = None

    @property
    def native(self) -> str:
        return "mxfp4"

    def raw_rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.uint8]:
        """GGUF's order: the first half of a block in the low halves of its bytes."""
        assert self.codes is not None and self.scale is not None
        blocks = self.shape[-1] // VALUES
        width = blocks * VALUES // 2
        raw = reader.read(self.codes.path, self.codes.offset + first * width, count * width)
        scales = reader.read(self.scale.path, self.scale.offset + first * blocks, count * blocks)
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(count, blocks, VALUES)
        packed = codes[..., :16] | codes[..., 16:] << 4
        return np.concatenate([scales.reshape(count, blocks, 1), packed], axis=2).reshape(count, -1)

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        raw = self.raw_rows(reader, first, count).reshape(-1)
        return np.asarray(_core.decode("mxfp4", raw, count, self.shape[-1])).reshape(count, -1)


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        stem = name.removesuffix(BLOCKS)
        scale = tensors.pop(stem + SCALES, None)
        if scale is None:
            raise CorruptError(f"{name} has no scales ({stem}{SCALES})", "download the checkpoint again")
        blocks = tensors.pop(name)
        if blocks.dtype != "U8" or scale.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
            raise UnsupportedError(f"{name} is {blocks.dtype} {list(blocks.shape)}, expected U8 [E, rows, blocks, 16]")
        if scale.shape != blocks.shape[:3]:
            raise CorruptError(f"{scale.name} has shape {list(scale.shape)}, expected {list(blocks.shape[:3])}")
        shape = (*blocks.shape[:2], blocks.shape[2] * VALUES)
        nbytes = blocks.nbytes + scale.nbytes
        tensors[stem] = Mxfp4Tensor(stem, "MXFP4", shape, blocks.path, 0, nbytes, codes=blocks, scale=scale)
