"""A vault of affine encodings as an MLX folder of the same codes, scales and biases, as mlx-lm names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.export.safetensors import CheckpointExport, Made
from smoe_cli.convert.export.vault import PARTS, Stored, VaultReader
from smoe_cli.convert.packed.mlx import PARTS as NAMES
from smoe_cli.convert.packed.mlx import place_of
from smoe_cli.errors import UnsupportedError

SCALE_BYTES = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}
Bytes = Callable[[], NDArray[np.uint8]]


class MlxExport:
    """``tensors`` by MLX's names. UnsupportedError where an encoding is not one of MLX's."""

    def __init__(self, vault: VaultReader) -> None:
        self.vault = vault
        self.modules: dict[str, tuple[int, int]] = {}  # (bits, group) by module
        self.tensors: dict[str, Made] = {}
        plain = CheckpointExport(vault)
        for canonical, stored in vault.trunk().items():
            source = vault.family.source(canonical)
            if source.take:
                raise UnsupportedError(f"export to MLX of family {vault.family.name} is not supported")
            if stored.encoding.startswith("mlx"):
                self._affine(source.name.removesuffix(".weight"), [stored], ())
            elif source.name in plain.tensors and stored.encoding in SCALE_BYTES:
                self.tensors[source.name] = plain.tensors[source.name]
            else:
                raise self._foreign(canonical, stored)
        for layer in vault.moe_layers():
            self._experts(layer)

    def _foreign(self, what: str, stored: Stored) -> UnsupportedError:
        return UnsupportedError(
            f"{what} is stored as {stored.encoding}, which is not an encoding of MLX",
            "convert the checkpoint with --quant mlx4_g64_bf16 or another of MLX's first",
        )

    def _experts(self, layer: int) -> None:
        place = place_of(self.vault.family)
        if not place or self.vault.arch["layers"][layer]["ffn"].get("expert_bias"):
            raise UnsupportedError(f"export to MLX of family {self.vault.family.name} is not supported")
        count = self.vault.arch["layers"][layer]["ffn"]["experts"]
        for part in PARTS:
            stored = [self.vault.expert(layer, part, expert) for expert in range(count)]
            name = f"{place.replace('{L}', str(layer))}.{NAMES[part]}"
            if stored[0].encoding.startswith("mlx"):
                self._affine(name, stored, (count,))
            elif stored[0].encoding in SCALE_BYTES:
                dtype, size = SCALE_BYTES[stored[0].encoding]
                shape = (count, *stored[0].shape)
                self.tensors[f"{name}.weight"] = Made(
                    dtype, shape, int(np.prod(shape)) * size, self._cut(stored, 0, stored[0].row_bytes, 1)
                )
            else:
                raise self._foreign(f"{part} of layer {layer}", stored[0])

    def _affine(self, module: str, stored: list[Stored], lead: tuple[int, ...]) -> None:
        bits, group, scales = _format(stored[0].encoding)
        self.modules[module] = (bits, group)
        dtype, size = SCALE_BYTES[scales]
        rows, cols = stored[0].shape
        groups, width = cols // group, group * bits // 8
        block = 2 * size + width
        for key, kind, begin, end, items in (
            ("weight", "U32", 2 * size, block, groups * width // 4),
            ("scales", dtype, 0, size, groups),
            ("biases", dtype, size, 2 * size, groups),
        ):
            shape = (*lead, rows, items)
            nbytes = len(stored) * rows * groups * (end - begin)
            self.tensors[f"{module}.{key}"] = Made(kind, shape, nbytes, self._cut(stored, begin, end, groups))

    def _cut(self, stored: list[Stored], begin: int, end: int, groups: int) -> Bytes:
        """Bytes [begin, end) of each block."""

        def data() -> NDArray[np.uint8]:
            parts = [each.raw(self.vault.reader).reshape(each.rows * groups, -1)[:, begin:end] for each in stored]
            return np.ascontiguousarray(np.concatenate(parts)).reshape(-1)

        return data

    def settings(self) -> dict[str, Any]:
        """config.json's ``quantization``: what most modules have, and the others by name."""
        if not self.modules:
            return {}
        (bits, group), _ = Counter(self.modules.values()).most_common(1)[0]
        found: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"}
        for module, own in self.modules.items():
            if own != (bits, group):
                found[module] = {"group_size": own[1], "bits": own[0]}
        trunk = {
            self.vault.family.source(name).name for name, each in self.vault.trunk().items() if len(each.shape) == 2
        }
        plain = [
            name.removesuffix(".weight")
            for name in trunk
            if name in self.tensors and name.removesuffix(".weight") not in self.modules
        ]
        found |= dict.fromkeys(sorted(plain), False)
        return {"quantization": found, "quantization_config": found}


def _format(encoding: str) -> tuple[int, int, str]:
    """mlx4_g64_bf16 -> (4, 64, "bf16")."""
    bits, group, scales = encoding.removeprefix("mlx").split("_")
    return int(bits), int(group.removeprefix("g")), scales
