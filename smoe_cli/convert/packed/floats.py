"""Small floats with scales. NVFP4: two four-bit floats to a byte, the even one in the low half, a scale in float8 e4m3
for 16 of them and one in float32 for the tensor. FP8: e4m3 with a scale for each tensor, row or block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.packed.affine import expect, read_floats, read_some, size_of, take
from smoe_cli.convert.safetensors import FileReader, SourceTensor, to_float32
from smoe_cli.errors import UnsupportedError

NVFP4_GROUP = 16
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Nvfp4Tensor(RowTensor):
    codes: SourceTensor | None = None
    scale: SourceTensor | None = None
    whole_scale: SourceTensor | None = None
    divides: bool = False  # by the tensor's scale

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        assert self.codes is not None and self.scale is not None and self.whole_scale is not None
        raw = read_some(reader, self.codes, first, count)
        values = np.stack([FP4[raw & 15], FP4[raw >> 4]], axis=-1).reshape(count, -1, NVFP4_GROUP)
        scales = to_float32(read_some(reader, self.scale, first, count).reshape(-1), "F8_E4M3").reshape(count, -1)
        whole = np.float32(read_floats(reader, self.whole_scale).reshape(-1)[0])
        scales = scales / whole if self.divides else scales * whole
        scaled: NDArray[np.float32] = values * scales[..., None].astype(np.float32)
        return scaled.reshape(count, -1)


def join_nvfp4(tensors: dict[str, SourceTensor], codes: str, scale: str, whole: str, divides: bool) -> None:
    for name in [name for name in tensors if name.endswith(f".{whole}")]:
        stem = name.removesuffix(f".{whole}")
        if f"{stem}.{codes}" not in tensors:
            continue
        packed, scales, one = (take(tensors, f"{stem}.{part}", stem) for part in (codes, scale, whole))
        for extra in ("input_scale", "input_global_scale"):
            tensors.pop(f"{stem}.{extra}", None)
        shape = (*packed.shape[:-1], packed.shape[-1] * 2)
        expect(packed, ("U8",), packed.shape)
        expect(scales, ("F8_E4M3",), (*shape[:-1], shape[-1] // NVFP4_GROUP))
        if math.prod(one.shape) != 1 or one.dtype != "F32":
            raise UnsupportedError(f"{one.name} is {one.dtype} {list(one.shape)}, expected one number in F32")
        tensors[f"{stem}.weight"] = Nvfp4Tensor(
            f"{stem}.weight", "NVFP4", shape, packed.path, 0, size_of(packed, scales), packed, scales, one, divides
        )


@dataclass(frozen=True)
class Float8Tensor(RowTensor):
    codes: SourceTensor | None = None
    scale: SourceTensor | None = None

    @property
    def near(self) -> str:
        return "f32"

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        assert self.codes is not None and self.scale is not None
        values = to_float32(read_some(reader, self.codes, first, count).reshape(-1), "F8_E4M3").reshape(count, -1)
        one = self.scale.nbytes == self.scale.itemsize
        begin, many = (0, 1) if one else (first, count)
        size = self.scale.itemsize
        raw = reader.read(self.scale.path, self.scale.offset + begin * size, many * size)
        scaled: NDArray[np.float32] = values * to_float32(raw, self.scale.dtype)[:, None]
        return scaled


def join_float8(tensors: dict[str, SourceTensor], scale: str) -> None:
    """One scale for each tensor or for each row."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3"]:
        stem = name.removesuffix(".weight")
        found = take(tensors, f"{stem}.{scale}", name)
        codes = tensors[name]
        rows = math.prod(codes.shape[:-1])
        if math.prod(found.shape) not in (1, rows) or found.dtype not in ("F32", "BF16", "F16"):
            raise UnsupportedError(f"{found.name} is {found.dtype} {list(found.shape)} for {list(codes.shape)}")
        tensors.pop(f"{stem}.input_scale", None)
        nbytes = size_of(codes, found)
        tensors[name] = Float8Tensor(name, "FP8", codes.shape, codes.path, 0, nbytes, codes, found)
