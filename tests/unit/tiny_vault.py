"""A small vault with random contents, described once, for the tests of whatever reads or writes vaults."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli import _core

HIDDEN, VOCAB, EXPERTS, WIDTH, SHARED = 64, 96, 4, 96, 32
TOKENIZER = {
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "chat_templates/tool.jinja": b"{}",
}


def _attention() -> dict[str, Any]:
    return {
        "block": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25, "window": 0, "qk_norm": "head",
        "qkv_clip": 0.0, "rope": 0,
    }  # fmt: skip


def _moe(gate: str, down: str) -> dict[str, Any]:
    return {
        "block": "moe", "experts": EXPERTS, "top_k": 2, "expert_width": WIDTH, "normalize": True, "scaling": 1.0,
        "activation": "silu", "shared_width": SHARED, "shared_gate": True,
        "encodings": {"gate": gate, "up": "q8_0", "down": down},
    }  # fmt: skip


@dataclass
class TinyVault:
    """Everything that goes into a vault: layer 0 is dense, 1 and 2 are mixtures with records of two sizes."""

    seed: int = 0
    manifest: dict[str, Any] = field(init=False)
    layers: list[tuple[int, int, int]] = field(init=False)
    trunk: list[tuple[str, str, list[int], int]] = field(init=False)
    records: dict[tuple[int, int], bytes] = field(init=False)
    tensors: dict[str, bytes] = field(init=False)
    fingerprint: str = "sha256:source"

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        moe = [_moe("q4_0", "q8_0"), _moe("f32", "f16")]
        dense = {"block": "ffn", "width": 128, "activation": "silu"}
        layers = [{"attention": _attention(), "ffn": ffn} for ffn in [dense, *moe]]
        self.layers, self.records = [], {}
        for index, ffn in enumerate(moe):
            encodings = ffn["encodings"]
            layout = _core.record_layout(HIDDEN, WIDTH, encodings["gate"], encodings["up"], encodings["down"])
            self.layers.append((index + 1, EXPERTS, layout["length"]))
            for expert in range(EXPERTS):
                self.records[index, expert] = rng.bytes(layout["end"])
        tensors = self._tensors()
        self.trunk, self.tensors = [], {}
        for name, entry in tensors.items():
            plain = {"f32": "F32", "f16": "F16", "bf16": "BF16"}.get(entry["encoding"])
            count = int(np.prod(entry["shape"]))
            size = count * (4 if plain == "F32" else 2) if plain else count // 32 * 34
            self.trunk.append((name, plain or "U8", entry["shape"] if plain else [size], size))
            self.tensors[name] = rng.bytes(size)
        self.manifest = self._manifest(layers, tensors)

    def _tensors(self) -> dict[str, dict[str, Any]]:
        shapes: dict[str, list[int]] = {
            "embed.weight": [VOCAB, HIDDEN], "final_norm.weight": [HIDDEN], "head.weight": [VOCAB, HIDDEN],
        }  # fmt: skip
        for i in range(3):
            p = f"layers.{i}."
            shapes |= {p + "attn_norm.weight": [HIDDEN], p + "ffn_norm.weight": [HIDDEN], p + "attn.q.bias": [64]}
            shapes |= {p + "attn.q.weight": [64, HIDDEN], p + "attn.o.weight": [HIDDEN, 64]}
            shapes |= {p + "attn.k.weight": [32, HIDDEN], p + "attn.v.weight": [32, HIDDEN]}
            shapes |= {p + "attn.q_norm.weight": [16], p + "attn.k_norm.weight": [16]}
            if i == 0:
                ffn = {"gate": [128, HIDDEN], "up": [128, HIDDEN], "down": [HIDDEN, 128]}
                shapes |= {f"{p}ffn.{k}.weight": shape for k, shape in ffn.items()}
                continue
            shapes |= {p + "router.weight": [EXPERTS, HIDDEN], p + "shared_gate.weight": [1, HIDDEN]}
            shared = {"gate": [SHARED, HIDDEN], "up": [SHARED, HIDDEN], "down": [HIDDEN, SHARED]}
            shapes |= {f"{p}shared.{k}.weight": shape for k, shape in shared.items()}
        out: dict[str, dict[str, Any]] = {}
        for name, shape in shapes.items():
            quantised = name.endswith(("embed.weight", "head.weight", ".q.weight", "gate.weight")) and shape[0] > 1
            encoding = "q8_0" if quantised else "f32" if len(shape) == 1 else "bf16"
            layout = "panel16" if quantised and name != "embed.weight" else "rows"
            out[name] = {"encoding": encoding, "layout": layout, "shape": shape, "error": 0.0}
        return out

    def _manifest(self, layers: list[Any], tensors: dict[str, Any]) -> dict[str, Any]:
        files = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in TOKENIZER.items()
        }
        return {
            "format": 1, "id": "tiny", "family": "qwen2_moe", "model_type": "qwen2_moe", "quant": "q8",
            "converter": "smoe test", "source": {"fingerprint": self.fingerprint, "kind": "safetensors", "bytes": 1},
            "tokenizer": {"files": files, "template_sha256": None},
            "eos_ids": [2, 0], "bos_id": None, "generation": {"temperature": 0.7, "top_k": 20},
            "arch": {
                "hidden": HIDDEN, "vocab": VOCAB, "max_positions": 4096, "norm_eps": 1e-6, "tied_head": False,
                "ropes": [{"inv_freq": [1.0, 0.5, 0.25], "scale": 1.0}], "layers": layers,
            },
            "tensors": tensors, "expert_errors": {},
        }  # fmt: skip

    def open(self, folder: Path, stem: str = "tiny", resume: bool = True) -> _core.VaultWriter:
        return _core.VaultWriter(str(folder), stem, self.fingerprint, self.layers, self.trunk, resume)

    def fill(self, writer: _core.VaultWriter, pause: float = 0) -> int:
        """Write what is not there yet, with a pause in seconds before each record; the number of items written."""
        done = set(writer.done_records())
        todo = [item for item in self.records if item not in done]
        for layer, expert in todo:
            time.sleep(pause)
            writer.write_record(layer, expert, self.records[layer, expert])
        names = [name for name in self.tensors if name not in set(writer.done_tensors())]
        for name in names:
            writer.write_tensor(name, self.tensors[name])
        return len(todo) + len(names)

    def finish(self, writer: _core.VaultWriter, folder: Path, stem: str = "tiny") -> Path:
        """Tokenizer folder, manifest with the writer's checksums, final names. The path of the .smoe."""
        for name, data in TOKENIZER.items():
            path = folder / f"{stem}.tokenizer.part" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        writer.finish(self.manifest_json(writer))
        return folder / f"{stem}.smoe"

    def manifest_json(self, writer: _core.VaultWriter) -> str:
        manifest = json.loads(json.dumps(self.manifest))
        for name, entry in manifest["tensors"].items():
            entry["crc32c"] = writer.tensor_crc(name)
        manifest["scout"] = writer.scout_info()
        return json.dumps(manifest)

    def make(self, folder: Path, stem: str = "tiny") -> Path:
        writer = self.open(folder, stem, resume=False)
        self.fill(writer)
        return self.finish(writer, folder, stem)
