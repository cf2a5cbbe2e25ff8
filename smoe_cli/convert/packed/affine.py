"""Integer weights with a scale and a zero point for each group of a row: what MLX, GPTQ, AWQ and compressed-tensors
have in common. Each becomes MLX's affine blocks, value = scale * code + bias, which hold them exactly: the bias of a
symmetric format is a power of two times its scale, that of another fits float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor, to_float32
from smoe_cli.errors import CorruptError, UnsupportedError

GROUPS = (128, 64, 32)  # of the engine's encodings
SCALES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class AffineTensor(RowTensor):
    """``bits`` of a code, ``group`` values of a row to a scale; ``scales`` is the type that holds scale and bias."""

    bits: int = 4
    group: int = 128
    scales: str = "F32"
    ordered: bool = True  # groups are of neighbours

    @property
    def stored_group(self) -> int:
        """The group of the blocks: a longer one is several that are alike; 0 where none fits."""
        return next((group for group in GROUPS if self.group % group == 0), 0)

    @property
    def native(self) -> str:
        name = f"mlx{self.bits}_g{self.stored_group}_{SCALES[self.scales]}"
        return name if self.ordered and name in _core.encodings() else ""

    def parts(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        """Codes [count, cols], scales and biases [count, groups]."""
        raise NotImplementedError

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        codes, scales, biases = self.parts(reader, first, count)
        grouped = codes.reshape(count, -1, self.group).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # what is no number is found when it is stored
            values: Floats = grouped * scales[..., None] + biases[..., None]
        return values.reshape(count, -1)

    def raw_rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.uint8]:
        codes, scales, biases = self.parts(reader, first, count)
        times = self.group // self.stored_group
        stored = (_bytes(np.repeat(part, times, axis=1), self.scales) for part in (scales, biases))
        levels = _bit_stream(codes.reshape(count, -1, self.stored_group), self.bits)
        return np.concatenate([*stored, levels], axis=2).reshape(count, -1)


def _bytes(values: Floats, dtype: str) -> Codes:
    """[rows, groups] numbers that ``dtype`` holds as bytes [rows, groups, size]."""
    if dtype == "BF16":
        raw = np.ascontiguousarray(values.view(np.uint32) >> np.uint32(16)).astype("<u2")
    else:
        raw = values.astype("<f2" if dtype == "F16" else "<f4")
    return np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape, -1)


def _bit_stream(codes: Codes, bits: int) -> Codes:
    """[..., values] codes as bytes, each value's lowest bit first."""
    if bits == 8:
        return codes
    wide = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(wide.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_words(words: NDArray[np.uint32], bits: int, order: tuple[int, ...] | None = None) -> Codes:
    """The codes in the words of the last axis, the lowest bits first, or in ``order``."""
    count = 32 // bits
    places = np.arange(count, dtype=np.uint32) if order is None else np.array(order, np.uint32)
    shifts = places * np.uint32(bits)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def read_whole(reader: FileReader, tensor: SourceTensor) -> NDArray[np.uint8]:
    return reader.read(tensor.path, tensor.offset, tensor.nbytes)


def read_words(reader: FileReader, tensor: SourceTensor) -> NDArray[np.uint32]:
    return read_whole(reader, tensor).view("<u4").reshape(tensor.shape)


def read_floats(reader: FileReader, tensor: SourceTensor) -> Floats:
    return to_float32(read_whole(reader, tensor), tensor.dtype).reshape(tensor.shape)


def read_some(reader: FileReader, tensor: SourceTensor, first: int, count: int) -> NDArray[np.uint8]:
    """Rows of a stored tensor, counted over all but its last axis; bytes [count, width]."""
    width = tensor.shape[-1] * tensor.itemsize
    return reader.read(tensor.path, tensor.offset + first * width, count * width).reshape(count, width)


def expect(tensor: SourceTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> SourceTensor:
    """The tensor, if it is what the packing says. CorruptError names it."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise CorruptError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected {' or '.join(dtypes)} {list(shape)}",
            "download the checkpoint again",
        )
    return tensor


def take(tensors: dict[str, SourceTensor], name: str, of: str) -> SourceTensor:
    """A stored part, out of the checkpoint's tensors."""
    if name not in tensors:
        raise CorruptError(f"{of} is packed, but the checkpoint holds no {name}", "download the checkpoint again")
    return tensors.pop(name)


def whole_number(settings: dict[str, object], key: str, known: tuple[int, ...]) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or value not in known:
        listed = ", ".join(map(str, known))
        raise UnsupportedError(f"config.json: quantisation with {key} {value!r} is not supported", f"known: {listed}")
    return int(value)


def size_of(*parts: SourceTensor | None) -> int:
    return sum(part.nbytes for part in parts if part is not None)


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
