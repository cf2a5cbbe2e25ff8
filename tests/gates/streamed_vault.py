"""A vault that is mostly experts, for the gates of memory and disk: quick to make, several times larger than what an
engine needs to run it. All experts hold the same random weights: what matters here is their number and size."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli import _core


@dataclass(frozen=True)
class Shape:
    hidden: int = 512
    vocab: int = 1024
    layers: int = 6
    experts: int = 64
    top_k: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 1 << 20


def make_vault(folder: Path, shape: Shape, stem: str = "streamed", seed: int = 0) -> Path:
    """Writes ``stem``.smoe and its parts into ``folder``. Weights q8_0, router and norms f32."""
    rng = np.random.default_rng(seed)
    s, q, kv = shape, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def quantised(rows: int, cols: int, layout: str = "panel16") -> bytes:
        data = _core.encode("q8_0", rng.normal(0, cols**-0.5, (rows, cols)).astype(np.float32))
        return _core.pack("q8_0", data, rows, cols) if layout == "panel16" else data

    tensors: dict[str, tuple[str, str, list[int], bytes]] = {}  # name -> encoding, layout, shape, bytes

    def add(name: str, *dims: int, encoding: str = "q8_0", layout: str = "panel16") -> None:
        if encoding == "q8_0":
            tensors[name] = encoding, layout, list(dims), quantised(dims[0], dims[1], layout)
        else:
            scale = np.ones(dims) if len(dims) == 1 else rng.normal(0, 1, dims)
            tensors[name] = "f32", "rows", list(dims), scale.astype(np.float32).tobytes()

    add("embed.weight", s.vocab, s.hidden, layout="rows")
    add("head.weight", s.vocab, s.hidden)
    add("final_norm.weight", s.hidden, encoding="f32")
    for i in range(s.layers):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"layers.{i}.{norm}.weight", s.hidden, encoding="f32")
        for name, rows, cols in (("q", q, s.hidden), ("k", kv, s.hidden), ("v", kv, s.hidden), ("o", s.hidden, q)):
            add(f"layers.{i}.attn.{name}.weight", rows, cols)
        add(f"layers.{i}.router.weight", s.experts, s.hidden, encoding="f32")

    layout = _core.record_layout(s.hidden, s.width, "q8_0", "q8_0", "q8_0")
    record = bytearray(layout["end"])
    for part, (rows, cols) in {
        "gate": (s.width, s.hidden), "up": (s.width, s.hidden), "down": (s.hidden, s.width)
    }.items():  # fmt: skip
        data = quantised(rows, cols)
        record[layout[part] : layout[part] + len(data)] = data

    folder.mkdir(parents=True, exist_ok=True)
    layers = [(i, s.experts, layout["length"]) for i in range(s.layers)]
    trunk = [
        (name, "F32" if encoding == "f32" else "U8", dims if encoding == "f32" else [len(data)], len(data))
        for name, (encoding, _, dims, data) in tensors.items()
    ]
    writer = _core.VaultWriter(str(folder), stem, "sha256:made", layers, trunk, False)
    for layer in range(s.layers):
        for expert in range(s.experts):
            writer.write_record(layer, expert, bytes(record))
    for name, (_, _, _, data) in tensors.items():
        writer.write_tensor(name, data)
    tokenizer = b"{}"
    (folder / f"{stem}.tokenizer.part").mkdir()
    (folder / f"{stem}.tokenizer.part" / "tokenizer.json").write_bytes(tokenizer)
    manifest = _manifest(shape, stem, tokenizer) | {
        "tensors": {
            name: {"encoding": encoding, "layout": kind, "shape": dims, "crc32c": writer.tensor_crc(name), "error": 0.0}
            for name, (encoding, kind, dims, _) in tensors.items()
        },
        "scout": writer.scout_info(),
    }
    writer.finish(json.dumps(manifest))
    return folder / f"{stem}.smoe"


def _manifest(s: Shape, stem: str, tokenizer: bytes) -> dict[str, Any]:
    attention = {
        "block": "gqa", "heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "scale": s.head_dim**-0.5,
        "window": 0, "qk_norm": "none", "qkv_clip": 0.0, "rope": 0,
    }  # fmt: skip
    ffn = {
        "block": "moe", "experts": s.experts, "top_k": s.top_k, "expert_width": s.width, "normalize": True,
        "scaling": 1.0, "activation": "silu", "shared_width": 0, "shared_gate": False,
        "encodings": {"gate": "q8_0", "up": "q8_0", "down": "q8_0"},
    }  # fmt: skip
    frequencies = [float(np.float32(10000.0 ** (-i / (s.head_dim // 2)))) for i in range(s.head_dim // 2)]
    digest = hashlib.sha256(tokenizer).hexdigest()
    return {
        "format": 1, "id": stem, "family": "made", "model_type": "made", "quant": "q8", "converter": "smoe test",
        "source": {"fingerprint": "sha256:made", "kind": "safetensors", "bytes": 1},
        "tokenizer": {
            "files": {"tokenizer.json": {"bytes": len(tokenizer), "sha256": digest}}, "template_sha256": None
        },
        "eos_ids": [], "bos_id": None, "generation": {}, "expert_errors": {},
        "arch": {
            "hidden": s.hidden, "vocab": s.vocab, "max_positions": s.max_positions, "norm_eps": 1e-6,
            "tied_head": False, "ropes": [{"inv_freq": frequencies, "scale": 1.0}],
            "layers": [{"attention": attention, "ffn": ffn} for _ in range(s.layers)],
        },
    }  # fmt: skip
