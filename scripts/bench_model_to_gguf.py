#!/usr/bin/env python3
"""Write a qwen3_moe vault as a GGUF of the same weights, bit for bit, so that llama.cpp runs exactly what we run.

    scripts/bench_model_to_gguf.py vault/bench.smoe checkpoints/bench.gguf

Only for measuring one program against another: no tokenizer goes in (`tokenizer.ggml.model` is `none`), ids are fed
directly. Panels are unpacked to the ecosystem's rows; experts are stacked [experts, out, in]. Norms and routers become
float32, as llama.cpp wants them, which is exact from bf16 and f16. The `.gguf` appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from smoe_cli import _core
from smoe_cli.errors import SmoeError, UsageError, from_core

Array = np.ndarray[Any, Any]
GGML = gguf.GGMLQuantizationType
GGML_TYPES = {
    name: GGML.__members__[name.upper()]
    for name in _core.encodings()
    if name.upper() in GGML.__members__  # MLX's are not GGUF's
}
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17}
FILE_TYPES |= {"q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "mxfp4": 38, "f32": 0, "f16": 1, "bf16": 32}
TRUNK_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "router": "ffn_gate_inp",
}
EXPERT_MATRICES = ("gate", "up", "down")


@dataclass
class Tensor:
    """One GGUF tensor: its shape with the outermost dimension first, and a function that reads its bytes."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    read: Callable[[], Array]


def gguf_name(canonical: str) -> str:
    """``layers.3.attn.q.weight`` -> ``blk.3.attn_q.weight``. Raises UsageError for what llama.cpp has no name for."""
    stem = canonical.removesuffix(".weight")
    if stem in TRUNK_NAMES:
        return TRUNK_NAMES[stem] + ".weight"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "layers" or part not in LAYER_NAMES or stem == canonical:
        raise UsageError(f"tensor {canonical} has no place in a qwen3moe GGUF", "only qwen3_moe vaults are supported")
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def rope_theta(inv_freq: list[float]) -> float:
    """The base whose powers ``inv_freq`` are: inv_freq[i] = theta^(-i / n). Raises UsageError for scaled ropes."""
    n = len(inv_freq)
    theta = float(round(inv_freq[-1] ** (-n / (n - 1))))
    if any(not math.isclose(f, theta ** (-i / n), rel_tol=1e-5) for i, f in enumerate(inv_freq)):
        raise UsageError("the vault's rotary embedding is scaled", "measure with a model of the default one")
    return theta


class Vault:
    """A vault's tensors by their GGUF names. Where its bytes lie, `_core.inspect` says; the scout is safetensors."""

    def __init__(self, path: Path) -> None:
        info = _core.inspect(str(path))
        self.manifest = json.loads(info["manifest"])
        self.arch = self.manifest["arch"]
        if self.manifest["model_type"] != "qwen3_moe":
            raise UsageError(f"{path} is a {self.manifest['model_type']} model", "only qwen3_moe vaults are supported")
        self._file = np.memmap(path, dtype=np.uint8, mode="r")
        self._offsets = info["record_offsets"]
        self._scout = np.memmap(info["scout_path"], dtype=np.uint8, mode="r")
        (header_bytes,) = struct.unpack("<Q", self._scout[:8].tobytes())
        self._header = json.loads(self._scout[8 : 8 + header_bytes].tobytes())
        self._data = 8 + header_bytes

    def tensors(self) -> Iterator[Tensor]:
        for name, entry in self.manifest["tensors"].items():
            yield self._trunk_tensor(name, entry)
        for index, layer in enumerate(self.arch["layers"]):
            ffn = layer["ffn"]
            if ffn["block"] != "moe" or not ffn["normalize"]:
                raise UsageError(f"layer {index} is not a mixture as llama.cpp computes it", "measure another model")
            for part in EXPERT_MATRICES:
                yield self._expert_tensor(index, ffn, part)

    def _trunk_tensor(self, name: str, entry: dict[str, Any]) -> Tensor:
        encoding, shape = entry["encoding"], tuple(entry["shape"])
        begin, end = self._header[name]["data_offsets"]
        stored = self._scout[self._data + begin : self._data + end]
        small = len(shape) == 1 or name.endswith("router.weight")

        def read() -> Array:
            if small:
                return np.asarray(_core.decode(encoding, stored, *shape_2d(shape))).reshape(shape)
            rows = _core.unpack(encoding, stored, *shape) if entry["layout"] == "panel16" else stored.tobytes()
            return np.frombuffer(rows, np.uint8)

        return Tensor(gguf_name(name), shape, "f32" if small else encoding, read)

    def _expert_tensor(self, index: int, ffn: dict[str, Any], part: str) -> Tensor:
        hidden, width, names = self.arch["hidden"], ffn["expert_width"], ffn["encodings"]
        rows, cols = (hidden, width) if part == "down" else (width, hidden)
        layout = _core.record_layout(hidden, width, names["gate"], names["up"], names["down"])
        size = _core.stored_bytes(names[part], "panel16", rows, cols)

        def read() -> Array:
            pieces = []
            for offset in self._offsets[index]:
                begin = offset + layout[part]
                pieces.append(_core.unpack(names[part], self._file[begin : begin + size], rows, cols))
            return np.frombuffer(b"".join(pieces), np.uint8)

        return Tensor(f"blk.{index}.ffn_{part}_exps.weight", (ffn["experts"], rows, cols), names[part], read)


def shape_2d(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def write_metadata(writer: gguf.GGUFWriter, vault: Vault) -> None:
    arch, layer = vault.arch, vault.arch["layers"][0]
    attention, ffn = layer["attention"], layer["ffn"]
    writer.add_name(vault.manifest["id"])
    writer.add_vocab_size(arch["vocab"])
    writer.add_context_length(arch["max_positions"])
    writer.add_embedding_length(arch["hidden"])
    writer.add_block_count(len(arch["layers"]))
    writer.add_feed_forward_length(ffn["expert_width"] * ffn["top_k"])
    writer.add_expert_feed_forward_length(ffn["expert_width"])
    writer.add_expert_count(ffn["experts"])
    writer.add_expert_used_count(ffn["top_k"])
    writer.add_head_count(attention["heads"])
    writer.add_head_count_kv(attention["kv_heads"])
    writer.add_key_length(attention["head_dim"])
    writer.add_value_length(attention["head_dim"])
    writer.add_rope_freq_base(rope_theta(arch["ropes"][attention["rope"]]["inv_freq"]))
    writer.add_layer_norm_rms_eps(arch["norm_eps"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(FILE_TYPES[ffn["encodings"]["gate"]])
    writer.add_quantization_version(2)


def export(vault: Vault, out: Path) -> None:
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, "qwen3moe")
    write_metadata(writer, vault)
    tensors = list(vault.tensors())
    for tensor in tensors:
        kind = GGML_TYPES[tensor.encoding]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(tensor.shape) // block * size
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for i, tensor in enumerate(tensors, 1):
        writer.write_tensor_data(tensor.read())
        print(f"\r{i}/{len(tensors)} tensors", end="", file=sys.stderr)
    writer.close()
    part.replace(out)
    print(f"\r{out}: {out.stat().st_size} bytes", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="A qwen3_moe vault as a GGUF of the same weights.")
    parser.add_argument("vault", type=Path, help="a .smoe")
    parser.add_argument("out", type=Path, help="the .gguf to write")
    options = parser.parse_args()
    try:
        export(Vault(options.vault), options.out)
    except (SmoeError, _core.CoreError) as raised:
        error = raised if isinstance(raised, SmoeError) else from_core(raised)
        print(f"error: {error.text}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
