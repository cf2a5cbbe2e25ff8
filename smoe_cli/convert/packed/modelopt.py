"""NVIDIA ModelOpt: NVFP4 (NAME.weight U8, NAME.weight_scale, NAME.weight_scale_2), FP8 with a scale for each tensor."""

from __future__ import annotations

from typing import Any

from smoe_cli.convert.packed.floats import join_float8, join_nvfp4
from smoe_cli.convert.safetensors import SourceTensor
from smoe_cli.errors import UnsupportedError


def join(tensors: dict[str, SourceTensor], settings: dict[str, Any]) -> None:
    inner = settings.get("quantization")
    stated = {**settings, **inner} if isinstance(inner, dict) else settings
    method = stated.get("quant_algo")
    if method == "NVFP4":
        join_nvfp4(tensors, "weight", "weight_scale", "weight_scale_2", divides=False)
    elif method in ("FP8", "FP8_PB_WO"):
        join_float8(tensors, "weight_scale")
    else:
        raise UnsupportedError(f"config.json: ModelOpt {method!r} is not supported", "known: NVFP4, FP8")
    for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
        del tensors[name]
