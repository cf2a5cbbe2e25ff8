"""A vault's matrices as rows again: panels undone, a piece at a time. Where bytes lie, ``_core.inspect`` says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.convert.safetensors import FileReader, read_header
from smoe_cli.errors import UnsupportedError, from_core
from smoe_cli.families.model import Recurrent
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

    def recurrent(self, layer: int) -> Recurrent | None:
        """The layer's block, where it is a recurrent one."""
        stated = dict(self.arch["layers"][layer]["attention"])
        if stated["block"] in ("gqa", "mla"):
            return None
        return Recurrent(**{"heads": 1, **stated})

    def _order(self, canonical: str, tiled: bool) -> tuple[Recurrent, int, NDArray[np.int64]] | None:
        """Where a tensor's heads have to be put in another order: the block, the axis that they lie along, and from
        where each comes."""
        match = re.fullmatch(r"layers\.(\d+)\.recur\.(v|gate|out|v_conv|beta|decay|rate)(\.weight|\.bias|)", canonical)
        recurrent = self.recurrent(int(match[1])) if match else None
        if not match or not recurrent or recurrent.tiled == tiled or recurrent.block != "delta":
            return None
        if recurrent.heads == recurrent.key_heads:
            return None
        each = recurrent.heads // recurrent.key_heads
        shape = (each, recurrent.key_heads) if recurrent.tiled else (recurrent.key_heads, each)
        axis = 1 if match[2] in ("out", "v_conv") or (match[2] in ("decay", "rate") and match[3] != ".weight") else 0
        return recurrent, axis, np.arange(recurrent.heads).reshape(shape).T.ravel()

    def reorders(self, canonical: str, tiled: bool) -> bool:
        return self._order(canonical, tiled) is not None

    def ordered_rows(self, canonical: str, stored: Stored, tiled: bool) -> NDArray[np.uint8]:
        """The rows' bytes, heads of a recurrent block value by value if ``tiled``, else key by key."""
        raw = stored.raw(self.reader)
        order = self._order(canonical, tiled)
        if order is None:
            return raw
        recurrent, axis, heads = order
        if axis == 0:
            return raw.reshape(recurrent.heads, -1, raw.shape[1])[heads].reshape(raw.shape)
        if _core.fallback(stored.encoding, recurrent.value_dim) != stored.encoding:
            raise UnsupportedError(
                f"{canonical} is stored as {stored.encoding}, whose blocks do not end where heads of "
                f"{recurrent.value_dim} values do, and their order has to be changed",
                "convert with --role attention=q8_0",
            )
        return raw.reshape(len(raw), recurrent.heads, -1)[:, heads].reshape(raw.shape)

    def plain_values(self, canonical: str, stored: Stored, tiled: bool = False, negative: bool = False) -> F32:
        """float32 [rows, cols], heads in that order; rates of a recurrence -exp(A_log) if ``negative``, else A_log."""
        values = stored.values(self.reader)
        if order := self._order(canonical, tiled):
            recurrent, axis, heads = order
            shape = (recurrent.heads, -1, values.shape[1]) if axis == 0 else (len(values), recurrent.heads, -1)
            found = values.reshape(shape)
            values = (found[heads] if axis == 0 else found[:, heads]).reshape(values.shape)
        if canonical.endswith(".recur.rate"):
            block = self.recurrent(int(canonical.split(".")[1]))
            assert block is not None
            if block.negative_rates != negative:
                wide = values.astype(np.float64)
                values = (-np.exp(wide) if negative else np.log(-wide)).astype(np.float32)
        return values

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
