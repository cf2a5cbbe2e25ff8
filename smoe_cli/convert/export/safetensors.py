"""A vault as a Hugging Face checkpoint in plain precision: the family's own tensor names, experts where it has them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.export.vault import PARTS, Stored, VaultReader
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.arch import TrunkTensor, resolve, trunk_tensors
from smoe_cli.families.layout import taken_rows
from smoe_cli.families.model import Arch, Groups

SHARD_BYTES = 5 << 30
DTYPES = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Made:
    """A tensor of a safetensors file, and what gives its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], NDArray[np.uint8]]


def to_bytes(values: F32, dtype: str) -> NDArray[np.uint8]:
    """Little-endian bytes; bf16 rounded to nearest even. Values that fit are exact."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return rounded.astype("<u2").reshape(-1).view(np.uint8)
    return values.astype("<f2" if dtype == "F16" else "<f4").reshape(-1).view(np.uint8)


class CheckpointExport:
    """Every tensor of the checkpoint that a vault was made of; quantised ones in ``dtype``, plain ones as they are."""

    def __init__(self, vault: VaultReader, dtype: str = "bf16") -> None:
        self.vault, self.family, self.dtype = vault, vault.family, dtype
        self.arch: Arch = resolve(vault.family, vault.config)
        self.roles = {tensor.name: tensor.role for tensor in trunk_tensors(self.arch)}
        self.tensors: dict[str, Made] = self._trunk() | self._experts()

    def _kept(self, *stored: Stored) -> str:
        """Of tensors that become one: their precision, if it is the same plain one."""
        encodings = {each.encoding for each in stored}
        one = encodings.pop() if len(encodings) == 1 else self.dtype
        return DTYPES[one if one in DTYPES else self.dtype][0]

    def _made(self, stored: list[Stored], shape: tuple[int, ...], values: Callable[[], F32]) -> Made:
        dtype = self._kept(*stored)
        nbytes = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        return Made(dtype, shape, nbytes, lambda: to_bytes(values(), dtype))

    def _trunk(self) -> dict[str, Made]:
        """Several of our tensors may be parts of one of the checkpoint's."""
        whole: dict[str, list[tuple[str, Stored, Groups | None]]] = {}
        for canonical, stored in self.vault.trunk().items():
            source = self.family.source(canonical)
            needed = TrunkTensor(canonical, "", stored.shape)
            whole.setdefault(source.name, []).append((canonical, stored, taken_rows(self.arch, needed, source.take)))
        return {name: self._joined(name, parts) for name, parts in whole.items()}

    def _joined(self, name: str, parts: list[tuple[str, Stored, Groups | None]]) -> Made:
        canonical, stored, groups = parts[0]
        if groups is None:
            add = self.family.norm_offset if self.roles.get(canonical) == "norm" else 0.0
            return self._made(
                [] if add else [stored],  # in float32 the sum is not the source's precision any more
                stored.shape,
                lambda: self.vault.plain_values(canonical, stored).reshape(stored.shape) - np.float32(add),
            )
        rows, cols = groups.source_shape(stored.rows, stored.cols)
        taken = sum(part.rows * part.cols for _, part, _ in parts)
        if taken != rows * cols:
            raise UnsupportedError(f"{name} cannot be put together again: {taken} of {rows * cols} values are there")

        def values() -> F32:
            out = np.zeros((groups.count, groups.size, cols), np.float32)
            for name, part, place in parts:
                assert place is not None
                found = self.vault.plain_values(name, part).reshape(groups.count, -1, part.cols)
                found = found.transpose(0, 2, 1) if place.transposed else found
                out[:, place.first : place.first + place.rows] = found
            return out.reshape(rows, cols)

        # A convolution of each channel with itself has an axis of one in checkpoints.
        shape = (rows, 1, cols) if canonical.endswith("conv.weight") else (rows, cols)
        return self._made([part for _, part, _ in parts], shape, values)

    def _experts(self) -> dict[str, Made]:
        found: dict[str, Made] = {}
        names = self.family.experts
        for layer in self.vault.moe_layers():
            assert names is not None
            count = self.vault.arch["layers"][layer]["ffn"]["experts"]
            if names.gate:
                for part in PARTS:
                    pattern = getattr(names, part)[0].replace("{L}", str(layer))
                    for expert in range(count):
                        stored = self.vault.expert(layer, part, expert)
                        found[pattern.replace("{E}", str(expert))] = self._single(stored)
            else:
                found |= self._fused(layer, count)
        return found

    def _single(self, stored: Stored) -> Made:
        return self._made([stored], stored.shape, lambda: stored.values(self.vault.reader))

    def _fused(self, layer: int, count: int) -> dict[str, Made]:
        names = self.family.experts
        assert names is not None
        turned = names.square_is == "in_out"
        found = {}
        for pattern, parts in ((names.fused_gate_up[0], ("gate", "up")), (names.fused_down[0], ("down",))):
            stored = [self.vault.expert(layer, part, 0) for part in parts]
            rows, cols = sum(each.rows for each in stored), stored[0].cols
            shape = (count, cols, rows) if turned else (count, rows, cols)
            found[pattern.replace("{L}", str(layer))] = self._made(
                stored, shape, self._stack(layer, count, parts, turned)
            )
        if names.down_bias:
            for pattern, parts in ((names.gate_up_bias, ("gate", "up")), (names.down_bias, ("down",))):
                biases = [self.vault.bias(layer, part, 0) for part in parts]
                width = sum(each.cols for each in biases)
                found[pattern.replace("{L}", str(layer))] = self._made(
                    biases, (count, width), self._bias(layer, count, parts)
                )
        return found

    def _stack(self, layer: int, count: int, parts: tuple[str, ...], turned: bool) -> Callable[[], F32]:
        interleaved = self.family.experts is not None and self.family.experts.interleaved and len(parts) > 1

        def values() -> F32:
            out = []
            for expert in range(count):
                each = [self.vault.expert(layer, part, expert).values(self.vault.reader) for part in parts]
                rows = np.stack(each, axis=1).reshape(-1, each[0].shape[1]) if interleaved else np.concatenate(each)
                out.append(rows.T if turned else rows)
            return np.stack(out)

        return values

    def _bias(self, layer: int, count: int, parts: tuple[str, ...]) -> Callable[[], F32]:
        interleaved = self.family.experts is not None and self.family.experts.interleaved and len(parts) > 1

        def values() -> F32:
            out = []
            for expert in range(count):
                each = [self.vault.bias(layer, part, expert).values(self.vault.reader)[0] for part in parts]
                out.append(np.stack(each, axis=1).reshape(-1) if interleaved else np.concatenate(each))
            return np.stack(out)

        return values


def shards_of(tensors: dict[str, Made]) -> list[dict[str, Made]]:
    found: list[dict[str, Made]] = [{}]
    held = 0
    for name, made in tensors.items():
        if held and held + made.nbytes > SHARD_BYTES:
            found.append({})
            held = 0
        found[-1][name] = made
        held += made.nbytes
    return found


def write_folder(
    folder: Path, tensors: dict[str, Made], config: dict[str, Any], vault: VaultReader, metadata: dict[str, str]
) -> Iterator[int]:
    """config.json, shards with their index, tokenizer files; yields the bytes written so far."""
    folder.mkdir()
    shards, done = shards_of(tensors), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard, metadata))
            for made in shard.values():
                data = made.data()
                assert data.nbytes == made.nbytes
                file.write(np.ascontiguousarray(data).data)
                done += made.nbytes
                yield done
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    for name in vault.manifest["tokenizer"]["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((vault.tokenizer_dir / name).read_bytes())


def _header(shard: dict[str, Made], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, made in shard.items():
        entries[name] = {
            "dtype": made.dtype,
            "shape": list(made.shape),
            "data_offsets": [offset, offset + made.nbytes],
        }
        offset += made.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
