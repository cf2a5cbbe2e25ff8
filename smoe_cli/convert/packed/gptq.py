"""GPTQ: NAME.qweight I32 [in / n, out], NAME.qzeros I32 [groups, out / n], NAME.scales [groups, out], NAME.g_idx I32
[in], n codes to a word, the lowest bits first. value = scale * (code - zero); the first version stores zero - 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.packed.affine import (
    AffineTensor,
    Codes,
    Floats,
    expect,
    read_floats,
    read_words,
    size_of,
    take,
    unpack_words,
    whole_number,
)
from smoe_cli.convert.safetensors import FileReader, SourceTensor
from smoe_cli.errors import CorruptError

BITS = (2, 4, 8)
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the code of each column stands in its word


@dataclass(frozen=True)
class ColumnTensor(AffineTensor):
    """Stored [in, out]: words down the input (GPTQ) or along the output (AWQ)."""

    qweight: SourceTensor | None = None
    qzeros: SourceTensor | None = None
    scale: SourceTensor | None = None
    g_idx: SourceTensor | None = None
    zero_add: int = 0
    order: tuple[int, ...] | None = None  # AWQ's; None = GPTQ

    @property
    def whole(self) -> bool:
        return True

    def parts(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        codes, scales, zeros = self._columns(reader, first, count)
        return codes, scales, -(scales * zeros)

    def rows(self, reader: FileReader, first: int, count: int) -> NDArray[np.float32]:
        if self.ordered:
            return super().rows(reader, first, count)
        assert self.g_idx is not None
        codes, scales, zeros = self._columns(reader, first, count)
        groups = read_words(reader, self.g_idx).astype(np.int64)
        values: Floats = scales[:, groups] * (codes.astype(np.float32) - zeros[:, groups])
        return values

    def _columns(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        """Codes [count, in], scales and zeros [count, groups] of outputs from ``first`` on."""
        assert self.qweight is not None and self.qzeros is not None and self.scale is not None
        reader = reader.shared if count < self.shape[0] else reader
        words = read_words(reader, self.qweight)
        if self.order is None:
            codes = unpack_words(np.ascontiguousarray(words[:, first : first + count].T), self.bits)
        else:
            codes = np.ascontiguousarray(self._along_output(words, first, count).T)
        zeros = self._along_output(read_words(reader, self.qzeros), first, count)
        scales = read_floats(reader, self.scale)[:, first : first + count]
        kept = (zeros.T.astype(np.float32) + self.zero_add).astype(np.float32)
        return codes, np.ascontiguousarray(scales.T), kept

    def _along_output(self, words: NDArray[np.uint32], first: int, count: int) -> Codes:
        """Columns ``first`` and on of codes whose words lie along the output."""
        each = 32 // self.bits
        begin, end = first // each, -(-(first + count) // each)
        return unpack_words(words[:, begin:end], self.bits, self.order)[:, first - begin * each :][:, :count]


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    bits, group = whole_number(settings, "bits", BITS), whole_number(settings, "group_size", GROUP_SIZES)
    add = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    reader = FileReader()
    try:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            tensors[f"{stem}.weight"] = column_tensor(tensors, stem, bits, group, add, None, reader)
    finally:
        reader.close()


def column_tensor(
    tensors: dict[str, SourceTensor],
    stem: str,
    bits: int,
    group: int,
    add: int,
    order: tuple[int, ...] | None,
    reader: FileReader,
) -> SourceTensor:
    qweight, qzeros, scale = (take(tensors, f"{stem}.{part}", stem) for part in ("qweight", "qzeros", "scales"))
    codes = 32 // bits
    expect(scale, ("F16", "BF16", "F32"), scale.shape if len(scale.shape) == 2 else (0, 0))
    groups, outputs = scale.shape
    inputs = qweight.shape[0] * (codes if order is None else 1)
    group = inputs if group == -1 else group
    expect(scale, (scale.dtype,), (-(-inputs // group), outputs))
    expect(qweight, ("I32", "U32"), (inputs // codes, outputs) if order is None else (inputs, outputs // codes))
    expect(qzeros, ("I32", "U32"), (groups, outputs // codes))
    g_idx = tensors.pop(f"{stem}.g_idx", None)
    ordered = True
    if g_idx is not None:
        expect(g_idx, ("I32", "U32"), (inputs,))
        found = read_words(reader, g_idx)
        ordered = bool((found == np.arange(inputs) // group).all())
        if not ordered and found.max() >= groups:
            raise CorruptError(f"{g_idx.name} names group {found.max()} of {groups}", "download the checkpoint again")
    return ColumnTensor(
        f"{stem}.weight",
        f"GPTQ{bits}" if order is None else f"AWQ{bits}",
        (outputs, inputs),
        qweight.path,
        0,
        size_of(qweight, qzeros, scale, g_idx),
        bits=bits,
        group=group,
        ordered=ordered,
        qweight=qweight,
        qzeros=qzeros,
        scale=scale,
        g_idx=g_idx,
        zero_add=add,
        order=order,
    )
