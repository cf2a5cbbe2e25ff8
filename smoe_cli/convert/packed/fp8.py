"""FP8 weights with one scale for each tensor or row, NAME.weight and NAME.weight_scale; those in blocks are plain
tensors to checkpoint.py."""

from __future__ import annotations

from typing import Any

from smoe_cli.convert.packed.floats import join_float8
from smoe_cli.convert.safetensors import SourceTensor


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    join_float8(tensors, "weight_scale")
