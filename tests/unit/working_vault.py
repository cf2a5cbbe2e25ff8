"""The tiny vault of tiny_vault.py with weights that compute: random but finite, so that an engine generates from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from smoe_cli import _core
from tests.unit.tiny_vault import EXPERTS, HIDDEN, WIDTH, TinyVault


class WorkingVault(TinyVault):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.manifest["eos_ids"] = [2]
        rng = np.random.default_rng(self.seed)
        for name, entry in self.manifest["tensors"].items():
            self.tensors[name] = _stored(rng, name, entry)
        for moe_layer, layer in enumerate(self.manifest["arch"]["layers"][1:]):
            for expert in range(EXPERTS):
                self.records[moe_layer, expert] = _record(rng, layer["ffn"]["encodings"])


def _stored(rng: np.random.Generator, name: str, entry: dict[str, Any]) -> bytes:
    shape = entry["shape"] if len(entry["shape"]) == 2 else [1, *entry["shape"]]
    values = (rng.standard_normal(shape) * 0.2).astype(np.float32)
    if name.endswith("norm.weight"):
        values += 1
    data = _core.encode(entry["encoding"], values)
    return _core.pack(entry["encoding"], data, *shape) if entry["layout"] == "panel16" else data


def _record(rng: np.random.Generator, encodings: dict[str, str]) -> bytes:
    layout = _core.record_layout(HIDDEN, WIDTH, encodings["gate"], encodings["up"], encodings["down"])
    record = bytearray(layout["end"])
    for part, shape in {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}.items():
        name = encodings[part]
        data = _core.encode(name, (rng.standard_normal(shape) * 0.2).astype(np.float32))
        if not name.startswith(("f", "bf")):
            data = _core.pack(name, data, *shape)
        record[layout[part] : layout[part] + len(data)] = data
    return bytes(record)
