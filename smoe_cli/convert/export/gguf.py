"""A vault as a GGUF file of the same bytes, as llama.cpp reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.export.limits import require_known
from smoe_cli.convert.export.metadata import Metadata
from smoe_cli.convert.export.vault import PARTS, Stored, VaultReader
from smoe_cli.convert.gguf import names
from smoe_cli.convert.gguf.write import CODES, Out, Typed
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.layout import head_rows
from smoe_cli.families.model import Groups, TrunkTensor
from smoe_cli.families.recurrent import recurrent_rows

Rows = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """One of our tensors, and its place in one of GGUF's; all of it without ``groups``."""

    canonical: str
    stored: Stored
    groups: Groups | None


class GgufExport:
    """``metadata`` and ``tensors`` of a vault. UnsupportedError where GGUF or llama.cpp has no place for something."""

    def __init__(self, vault: VaultReader) -> None:
        self.vault = vault
        self.stated = vault.family.gguf
        if not self.stated:
            raise UnsupportedError(f"family {vault.family.name} has no GGUF architecture that is known")
        require_known(vault)
        self.facts = Metadata(vault)
        self.tensors = [*self._trunk(), *self._experts(), *self._factors()]

    def metadata(self) -> dict[str, Typed]:
        return self.facts.pairs(self.tensors)

    def _trunk(self) -> list[Out]:
        whole: dict[str, list[Part]] = {}
        for canonical, stored in self.vault.trunk().items():
            match = re.match(r"layers\.(\d+)\.", canonical)
            pattern = "layers.{L}." + canonical[match.end() :] if match else canonical
            sources = names.sources(self.vault.family, pattern)
            if not sources:
                named = f"{canonical}, which family {self.vault.family.name} has"
                raise UnsupportedError(f"GGUF has no name for {named}", "export to safetensors instead")
            name = sources[0].name.replace("{L}", match[1]) if match else sources[0].name
            groups = self._groups(canonical, stored, sources[0].take)
            whole.setdefault(name, []).append(Part(canonical, stored, groups))
        return [self._out(name, parts) for name, parts in whole.items()]

    def _groups(self, canonical: str, stored: Stored, take: str) -> Groups | None:
        if take in ("", "latent_keys", "latent_values"):
            return None
        layer = int(canonical.split(".")[1])
        needed = TrunkTensor(canonical, "", stored.shape)
        if recurrent := self.vault.recurrent(layer):
            return recurrent_rows(recurrent, needed, take)
        attention = self.vault.arch["layers"][layer]["attention"]
        return head_rows(attention["heads"], attention["kv_heads"], attention["head_dim"], needed, take)

    def _out(self, name: str, parts: list[Part]) -> Out:
        """A tensor of GGUF, of one or several of ours."""
        canonical, stored = parts[0].canonical, parts[0].stored
        turned = parts[0].groups is not None and parts[0].groups.transposed
        vector = len(stored.shape) == 1 and len(parts) == 1
        small = vector or turned or "router" in canonical or "shared_gate" in canonical
        if canonical.endswith(".rate") or small:
            kind, read = "F32", self._floats
        else:
            kind, read = self._kind(stored, canonical), self._raw
            if any(self._kind(part.stored, part.canonical) != kind for part in parts):
                raise UnsupportedError(f"parts of {name} have different encodings", "convert with one --quant for all")
        tiled = self.stated.get("tiled", False)
        if len(parts) == 1 and parts[0].groups is None and kind != "F32" and not self.vault.reorders(canonical, tiled):
            return Out(name, kind, self._shape(canonical, stored.shape), lambda: stored.pieces(self.vault.reader))

        def pieces() -> Iterable[NDArray[np.uint8]]:
            return [np.ascontiguousarray(_joined([(part.groups, read(part)) for part in parts])).view(np.uint8)]

        return Out(name, kind, self._shape(canonical, _joined_shape(parts)), pieces)

    def _floats(self, part: Part) -> Rows:
        values = self.vault.plain_values(part.canonical, part.stored, self.stated.get("tiled", False), negative=True)
        vector = len(part.stored.shape) == 1
        return values.reshape(-1, 1) if vector and part.groups is not None else values

    def _raw(self, part: Part) -> Rows:
        return self.vault.ordered_rows(part.canonical, part.stored, self.stated.get("tiled", False))

    def _shape(self, canonical: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As llama.cpp wants it: it compares all of four dimensions."""
        if match := re.fullmatch(r"layers\.(\d+)\.attn\.(k_up|v_up)\.weight", canonical):
            heads = self.vault.arch["layers"][int(match[1])]["attention"]["heads"]
            return (heads, shape[0] // heads, shape[1])
        if ".recur." not in canonical:
            return shape
        recurrent = self.vault.recurrent(int(canonical.split(".")[1]))
        assert recurrent is not None
        if recurrent.channel_decay and canonical.endswith("_conv.weight"):
            return (1, shape[0], 1, shape[1])
        if recurrent.block == "mamba2" and canonical.endswith("norm.weight"):
            return (recurrent.key_heads, shape[0] // recurrent.key_heads)
        if recurrent.channel_decay and canonical.endswith(".rate"):
            return (1, 1, *shape, 1)
        return (*shape, 1) if recurrent.block == "mamba2" and canonical.endswith((".rate", ".skip")) else shape

    def _kind(self, stored: Stored, what: str) -> str:
        kind = stored.encoding.upper()
        if kind not in CODES:
            raise UnsupportedError(
                f"{what} is stored as {stored.encoding}, which GGUF does not have", "convert with another --quant"
            )
        return kind

    def _experts(self) -> list[Out]:
        found = []
        for layer in self.vault.moe_layers():
            ffn = self.vault.arch["layers"][layer]["ffn"]
            for part in PARTS:
                stored = self.vault.expert(layer, part, 0)
                kind = self._kind(stored, f"{part} of layer {layer}")
                shape = (ffn["experts"], *stored.shape)
                found.append(Out(names.EXPERTS[part].replace("{L}", str(layer)), kind, shape, self._stack(layer, part)))
                if ffn.get("expert_bias"):
                    name = names.EXPERT_BIASES[part].replace("{L}", str(layer))
                    found.append(Out(name, "F32", (ffn["experts"], stored.rows), self._biases(layer, part)))
        return found

    def _stack(self, layer: int, part: str) -> Callable[[], Iterable[NDArray[np.uint8]]]:
        def pieces() -> Iterable[NDArray[np.uint8]]:
            for expert in range(self.vault.arch["layers"][layer]["ffn"]["experts"]):
                yield from self.vault.expert(layer, part, expert).pieces(self.vault.reader)

        return pieces

    def _biases(self, layer: int, part: str) -> Callable[[], Iterable[NDArray[np.uint8]]]:
        def pieces() -> Iterable[NDArray[np.uint8]]:
            for expert in range(self.vault.arch["layers"][layer]["ffn"]["experts"]):
                yield self.vault.bias(layer, part, expert).raw(self.vault.reader)

        return pieces

    def _factors(self) -> list[Out]:
        """Frequencies that are not powers of the base, as divisors of those."""
        if self.facts.rope_settings()["rope_type"] not in ("llama3", "longrope"):
            return []
        rope = self.vault.arch["ropes"][0]
        count = len(rope["inv_freq"])
        plain = np.float64(self.facts.rope_base()) ** -(np.arange(count) / count)
        sets = {"rope_freqs.weight": rope["inv_freq"]}
        if rope.get("long_from") and rope["inv_freq"] != rope["long_inv_freq"]:
            sets = {"rope_factors_short.weight": rope["inv_freq"], "rope_factors_long.weight": rope["long_inv_freq"]}
        found = []
        for name, frequencies in sets.items():
            values = (plain / np.array(frequencies)).astype(np.float32)
            found.append(Out(name, "F32", values.shape, lambda values=values: [values.view(np.uint8)]))  # type: ignore[misc]
        return found


def _joined_shape(parts: list[Part]) -> tuple[int, ...]:
    groups, stored = parts[0].groups, parts[0].stored
    if groups is None or groups.pairs:
        return stored.shape
    if len(stored.shape) == 1:
        return (groups.count * groups.size,)
    taken = sum(part.stored.rows * part.stored.cols for part in parts)
    rows, cols = groups.source_shape(stored.rows, stored.cols)
    if taken != rows * cols:
        raise UnsupportedError(f"{parts[0].canonical} cannot be put together with others: {taken} of {rows * cols}")
    return rows, cols


def _joined(parts: list[tuple[Groups | None, Rows]]) -> Rows:
    """Rows of the whole tensor, of the rows [rows, columns or bytes] of its parts."""
    groups, rows = parts[0]
    if groups is None:
        return rows
    if groups.pairs:
        halves = rows.reshape(groups.count, 2, groups.size // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
    width = rows.shape[0] // groups.count if groups.transposed else rows.shape[1]
    out = np.empty((groups.count, groups.size, width), rows.dtype)
    for place, part in parts:
        assert place is not None
        found = part.reshape(place.count, -1, part.shape[1])
        out[:, place.first : place.first + place.rows] = found.transpose(0, 2, 1) if place.transposed else found
    return out.reshape(-1, width)
