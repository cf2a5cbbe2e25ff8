"""Packings of weights inside safetensors: several stored tensors that are one matrix. Found by the name of the method
in config.json; each module's ``join`` takes its stored tensors out of the checkpoint's and puts the matrix in."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from smoe_cli.convert.safetensors import SourceTensor
from smoe_cli.errors import UnsupportedError

Join = Callable[[dict[str, SourceTensor], dict[str, Any]], None]
METHODS = {
    "mlx": "mlx",
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
}


def find_join(method: str) -> Join:
    """UnsupportedError, naming the method, before a byte is read as a number."""
    if method not in METHODS:
        raise UnsupportedError(
            f"config.json: weights quantised with {method!r} are not supported as a source",
            f"methods: fp8 in blocks, {', '.join(METHODS)}; or the checkpoint in bf16, f16 or f32",
        )
    join: Join = import_module(f"{__name__}.{METHODS[method]}").join
    return join
