"""Vaults of S-MoE (format versions 1 and 2) as a source: NAME.smoe with the experts, NAME.scout.safetensors with the
rest.

Header, 64 bytes: magic, u32 version, MoE layers, experts a layer, experts in all, u64 table offset, data offset, u32
group, bits (2 or 4), hidden, vocab, ffn, offset of the arch block (0 in version 1). Then 48 bytes an expert (u32 layer,
expert, u64 offset, bytes, padded bytes, u32 group, u64 groups, 4 unused), and three times 44 bytes an expert (u8 part,
dimensions, u16 unused, u32 rows, cols, u64 offset and bytes of the codes, offset and bytes of the scales, both within
the expert). Codes lie over the whole matrix, the lowest bits first; n = 2^bits - 1, value = (code - n / 2) / (n / 2) *
scale, a float16 scale for a group. As affine blocks: scale 2 s / n, bias -s, within a rounding of float32.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.convert.checkpoint import Checkpoint, read_json
from smoe_cli.convert.packed.affine import AffineTensor, Codes, Floats
from smoe_cli.convert.safetensors import FileReader, SourceTensor, read_header
from smoe_cli.convert.tokenizer import read_folder
from smoe_cli.errors import CorruptError, UnsupportedError, UsageError
from smoe_cli.families.spec import Family, match_family

MAGIC = b"SMOE\xde\xea\x00\x01"
HEADER = struct.Struct("<8sIIIIQQIIIIII")
ENTRY, DESCRIPTOR = struct.Struct("<IIQQQIQxxxx"), struct.Struct("<BBxxIIQQQQ")
ARCH = struct.Struct("<4sIIIfIIIIIIIIIf24s44x")
GROUP, PARTS = 64, ("gate", "up", "down")
MOST_EXPERTS = 1 << 20
AGAIN = "copy it again"
ASSUMED_POSITIONS = 32768


@dataclass(frozen=True)
class SeismicTensor(AffineTensor):
    """``offset`` is that of the codes in the file."""

    scale_offset: int = 0

    def parts(self, reader: FileReader, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        cols, levels = self.shape[-1], (1 << self.bits) - 1
        width, groups = cols * self.bits // 8, cols // self.group
        raw = reader.read(self.path, self.offset + first * width, count * width).reshape(count, width)
        bits = np.unpackbits(raw, axis=1, bitorder="little").reshape(count, cols, self.bits)
        codes = (bits * (1 << np.arange(self.bits)).astype(np.uint8)).sum(axis=2, dtype=np.uint8)
        stored = reader.read(self.path, self.scale_offset + first * groups * 2, count * groups * 2)
        scales = stored.view("<f2").astype(np.float32).reshape(count, groups)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number is found when it is stored
            return codes, scales * np.float32(2 / levels), -scales


def open_seismic(path: Path) -> Checkpoint:
    """Errors as ``open_checkpoint``'s."""
    scout = path.with_name(f"{path.name.removesuffix('.smoe')}.scout.safetensors")
    if not scout.is_file():
        raise UsageError(f"{path.name} is a vault of S-MoE, whose {scout.name} is not beside it", "copy it there")
    data = _Bytes(path)
    header, meta = data.header()
    trunk, raw = read_header(scout)
    notices: list[str] = []
    config = _config(path, data, header, trunk, notices)
    family = match_family(config)
    tensors = trunk | data.experts(header, family)
    texts = read_folder(path.parent)
    facts = {"version": header["version"], "bits": header["bits"]}
    return Checkpoint(
        path,
        config,
        family,
        tensors,
        {},
        [path, scout],
        [meta, raw],
        notices=notices,
        kind="s-moe",
        facts=facts,
        texts=texts,
    )


class _Bytes:
    """The first part of the file, read in checked pieces."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size

    def read(self, offset: int, nbytes: int, what: str) -> bytes:
        if offset + nbytes > self.size:
            raise CorruptError(
                f"{self.path.name} is cut short or damaged: {self.size} bytes there, {what} would end at byte "
                f"{offset + nbytes}",
                AGAIN,
            )
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def header(self) -> tuple[dict[str, int], bytes]:
        raw = self.read(0, HEADER.size, "the header")
        names = (
            "version",
            "layers",
            "most",
            "experts",
            "table",
            "data",
            "group",
            "bits",
            "hidden",
            "vocab",
            "ffn",
            "arch",
        )
        found = dict(zip(names, HEADER.unpack(raw)[1:], strict=True))
        if found["version"] not in (1, 2):
            raise UnsupportedError(f"{self.path.name} is of S-MoE's format version {found['version']}", "known: 1, 2")
        if found["group"] != GROUP or found["bits"] not in (2, 4):
            raise UnsupportedError(f"{self.path.name}: {found['bits']} bits in groups of {found['group']}")
        if not 0 < found["experts"] <= MOST_EXPERTS or found["table"] > MOST_EXPERTS:
            raise CorruptError(
                f"{self.path.name} states {found['experts']} experts, from byte {found['table']} on", AGAIN
            )
        tables = found["experts"] * (ENTRY.size + 3 * DESCRIPTOR.size)
        return found, self.read(0, found["table"] + tables, "its tables")

    def experts(self, header: dict[str, int], family: Family) -> dict[str, SourceTensor]:
        names, count = family.experts, header["experts"]
        if names is None or not names.gate:
            raise UnsupportedError(f"family {family.name} has no experts one by one, as S-MoE stores them")
        table = self.read(header["table"], count * ENTRY.size, "the table")
        descriptors = self.read(header["table"] + len(table), 3 * count * DESCRIPTOR.size, "the descriptors")
        found: dict[str, SourceTensor] = {}
        for index, (layer, expert, offset, nbytes, *_) in enumerate(ENTRY.iter_unpack(table)):
            for place in range(3):
                part, dims, *sizes = DESCRIPTOR.unpack_from(descriptors, (3 * index + place) * DESCRIPTOR.size)
                where = f"{self.path.name}: expert {expert} of layer {layer}"
                if part > 2 or dims != 2:
                    raise CorruptError(f"{where} has a part {part} of {dims} dimensions", AGAIN)
                name = getattr(names, PARTS[part])[0].replace("{L}", str(layer)).replace("{E}", str(expert))
                if name in found:
                    raise CorruptError(f"{where} is there twice", AGAIN)
                found[name] = self._tensor(name, where, header["bits"], offset, nbytes, sizes)
        return found

    def _tensor(self, name: str, where: str, bits: int, offset: int, nbytes: int, sizes: list[int]) -> SourceTensor:
        rows, cols, codes, codes_bytes, scales, scales_bytes = sizes
        if cols % GROUP or not rows or not cols:
            raise UnsupportedError(f"{where}: rows of {cols} values do not divide into groups of {GROUP}")
        values = rows * cols
        if (codes_bytes, scales_bytes) != (values * bits // 8, values // GROUP * 2):
            raise CorruptError(f"{where}: {codes_bytes} and {scales_bytes} bytes for {rows} x {cols} values", AGAIN)
        if max(codes + codes_bytes, scales + scales_bytes) > nbytes or offset + nbytes > self.size:
            raise CorruptError(f"{where} leads outside of its {nbytes} bytes or of the file's {self.size}", AGAIN)
        return SeismicTensor(
            name,
            f"SMOE-Q{bits}",
            (rows, cols),
            self.path,
            offset + codes,
            codes_bytes + scales_bytes,
            bits=bits,
            group=GROUP,
            scale_offset=offset + scales,
        )


def _config(
    path: Path, data: _Bytes, header: dict[str, int], trunk: dict[str, SourceTensor], notices: list[str]
) -> dict[str, Any]:
    """The checkpoint's own config.json where it lies beside; else what the arch block of version 2 says."""
    beside = path.with_name("config.json")
    if beside.is_file():
        return read_json(beside)
    if header["version"] < 2 or not header["arch"]:
        raise UsageError(
            f"{path.name} is a vault of S-MoE's first version, which does not state its model",
            "put the checkpoint's config.json beside it",
        )
    magic, *block = ARCH.unpack(data.read(header["arch"], ARCH.size, "the arch block"))
    if magic != b"SARC":
        raise CorruptError(f"{path.name} has no arch block at byte {header['arch']}", AGAIN)
    _, _, flags, theta, heads, kv_heads, head_dim, top_k, width, dense, shared, activation, layers, eps, kind = block
    if activation:
        raise UnsupportedError(f"{path.name}: activation {activation} of S-MoE is not supported")
    notices.append(f"{path.name} does not state its longest context: {ASSUMED_POSITIONS} positions are assumed")
    found = {
        "model_type": kind.rstrip(b"\0").decode("utf-8", "replace"), "hidden_size": header["hidden"],
        "vocab_size": header["vocab"], "num_hidden_layers": layers, "max_position_embeddings": ASSUMED_POSITIONS,
        "rms_norm_eps": float(f"{eps:.6g}"), "hidden_act": "silu", "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "rope_theta": float(theta),
        "num_experts": header["most"], "n_routed_experts": header["most"], "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "intermediate_size": dense, "norm_topk_prob": bool(flags & 1),
        "tie_word_embeddings": "lm_head.weight" not in trunk,
    }  # fmt: skip
    if shared:
        found |= {"n_shared_experts": shared // max(width, 1), "shared_expert_intermediate_size": shared}
    if flags & 4:
        found |= {"first_k_dense_replace": 1, "mlp_only_layers": [0]}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]
