"""A vault's matrices as rows again: panels undone, a piece at a time. Where bytes lie, ``_core.inspect`` says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.safetensors import FileReader, read_header
from smoe_cli.errors import UnsupportedError, from_core
from smoe_cli.families.spec import Family, load_families

PIECE_ROWS = 1 << 12  # a multiple of a panel's rows
PARTS = ("gate", "up", "down")
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """A matrix in a vault, [rows, cols]; a vector is one row. ``shape`` as the manifest has it."""

    encoding: str
    layout: str
    rows: int
    cols: int
    path: Path
    offset: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(_core.stored_bytes(self.encoding, "rows", 1, self.cols))

    def pieces(self, reader: FileReader) -> Iterator[NDArray[np.uint8]]:
        """The rows in the bytes of the encoding's own ecosystem, some at a time, [rows, bytes of a row]."""
        for first in range(0, self.rows, PIECE_ROWS):
            count = min(PIECE_ROWS, self.rows - first)
            begin = int(_core.stored_bytes(self.encoding, self.layout, first, self.cols)) if first else 0
            length = int(_core.stored_bytes(self.encoding, self.layout, count, self.cols))
            raw = reader.read(self.path, self.offset + begin, length)
            if self.layout != "rows":
                raw = np.frombuffer(_core.unpack(self.encoding, raw, count, self.cols), np.uint8)
            yield raw.reshape(count, -1)

    def raw(self, reader: FileReader) -> NDArray[np.uint8]:
        return np.concatenate(list(self.pieces(reader)))

    def values(self, reader: FileReader) -> F32:
        """float32 [rows, cols]."""
        return np.concatenate(
            [
                np.asarray(_core.decode(self.encoding, raw.reshape(-1), len(raw), self.cols)).reshape(-1, self.cols)
                for raw in self.pieces(reader)
            ]
        )


class VaultReader:
    """What an export needs of a vault. UnsupportedError where it was made before vaults kept their config."""

    def __init__(self, path: Path) -> None:
        try:
            info = _core.inspect(str(path))
        except _core.CoreError as error:
            raise from_core(error) from error
        self.path = path
        self.manifest: dict[str, Any] = json.loads(info["manifest"])
        self.arch: dict[str, Any] = self.manifest["arch"]
        self.config: dict[str, Any] = self.manifest.get("config", {})
        if not self.config:
            raise UnsupportedError(f"{path} does not hold its model's config", "convert the checkpoint again")
        self.family = self._family()
        self.tokenizer_dir = Path(info["tokenizer_dir"])
        self.reader = FileReader()
        self._offsets: list[list[int]] = info["record_offsets"]
        self._scout = Path(info["scout_path"])
        self._header, _ = read_header(self._scout)

    def _family(self) -> Family:
        for family in load_families():
            if family.name == self.manifest["family"]:
                return family
        raise UnsupportedError(f"{self.path} is of family {self.manifest['family']}, which is not known")

    def trunk(self) -> dict[str, Stored]:
        return {name: self._trunk(name, entry) for name, entry in self.manifest["tensors"].items()}

    def _trunk(self, name: str, entry: dict[str, Any]) -> Stored:
        shape = tuple(entry["shape"])
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        return Stored(entry["encoding"], entry["layout"], rows, cols, self._scout, self._header[name].offset, shape)

    def moe_layers(self) -> list[int]:
        return [index for index, layer in enumerate(self.arch["layers"]) if layer["ffn"]["block"] == "moe"]

    def expert(self, layer: int, part: str, expert: int) -> Stored:
        ffn, hidden = self.arch["layers"][layer]["ffn"], self.arch["hidden"]
        rows, cols = (hidden, ffn["expert_width"]) if part == "down" else (ffn["expert_width"], hidden)
        encoding = ffn["encodings"][part]
        layout = "rows" if encoding in ("f32", "f16", "bf16") else "panel16"
        offset = self._record(layer, expert) + self._layout(layer)[part]
        return Stored(encoding, layout, rows, cols, self.path, offset, (rows, cols))

    def bias(self, layer: int, part: str, expert: int) -> Stored:
        """Of an expert that has one, float32."""
        ffn, hidden = self.arch["layers"][layer]["ffn"], self.arch["hidden"]
        cols = hidden if part == "down" else ffn["expert_width"]
        offset = self._record(layer, expert) + self._layout(layer)[f"{part}_bias"]
        return Stored("f32", "rows", 1, cols, self.path, offset, (cols,))

    def _record(self, layer: int, expert: int) -> int:
        return self._offsets[self.moe_layers().index(layer)][expert]

    def _layout(self, layer: int) -> dict[str, int]:
        ffn = self.arch["layers"][layer]["ffn"]
        names = [ffn["encodings"][part] for part in PARTS]
        biased = ffn.get("expert_bias", False)
        return dict(_core.record_layout(self.arch["hidden"], ffn["expert_width"], names[0], names[1], names[2], biased))

    def text(self, name: str) -> str | None:
        """A file of the tokenizer."""
        path = self.tokenizer_dir / name
        return path.read_text("utf-8") if path.is_file() else None
