"""AWQ (gemm): NAME.qweight I32 [in, out / 8], NAME.qzeros I32 [groups, out / 8], NAME.scales [groups, out]; the eight
codes of a word are those of columns 0 2 4 6 1 3 5 7, the lowest bits first. value = scale * (code - zero)."""

from __future__ import annotations

from typing import Any

from smoe_cli.convert.packed.affine import whole_number
from smoe_cli.convert.packed.gptq import AWQ_ORDER, GROUP_SIZES, column_tensor
from smoe_cli.convert.safetensors import FileReader, SourceTensor
from smoe_cli.errors import UnsupportedError


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedError(f"config.json: AWQ of version {version!r} is not supported", "known: gemm")
    bits = whole_number({"bits": settings.get("bits", settings.get("w_bit"))}, "bits", (4,))
    size = settings.get("group_size", settings.get("q_group_size"))
    group = whole_number({"group_size": size}, "group_size", GROUP_SIZES)
    reader = FileReader()
    for name in [name for name in tensors if name.endswith(".qweight")]:
        stem = name.removesuffix(".qweight")
        tensors[f"{stem}.weight"] = column_tensor(tensors, stem, bits, group, 0, AWQ_ORDER, reader)
