"""What a measurement must know of a vault: the bytes one token has to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smoe_cli import _core


def describe_vault(path: Path) -> dict[str, Any]:
    """Sizes of a vault and the bytes a decode step must read: every trunk matrix but an embedding that is not the head
    too, and top-k records of each layer. Raises CoreError for a vault that cannot be opened."""
    info = _core.inspect(str(path))
    manifest = json.loads(info["manifest"])
    arch, tensors = manifest["arch"], manifest["tensors"]
    top_k = [layer["ffn"]["top_k"] for layer in arch["layers"] if layer["ffn"]["block"] == "moe"]
    experts = sum(k * size for k, size in zip(top_k, info["record_bytes"], strict=True))
    skipped = {"embed.weight"} if not arch["tied_head"] else set()
    trunk = {name: tensor_bytes(entry) for name, entry in tensors.items() if name not in skipped}
    return {
        "id": manifest["id"],
        "vocab": arch["vocab"],
        "layers": len(arch["layers"]),
        "experts": [layer["ffn"]["experts"] for layer in arch["layers"] if layer["ffn"]["block"] == "moe"],
        "top_k": top_k,
        "encodings": sorted({entry["encoding"] for entry in tensors.values()} | set(expert_encodings(arch))),
        "head": tensors.get("head.weight", tensors["embed.weight"])["encoding"],
        "record_bytes": info["record_bytes"],
        "total_bytes": info["total_bytes"],
        "active_expert_bytes": experts,
        "active_bytes": experts + sum(trunk.values()),
        "alone_bytes": sum(size for name, size in trunk.items() if alone(name, arch)),
    }


def alone(name: str, arch: dict[str, Any]) -> bool:
    """Whether a trunk tensor is read while it cannot be known which experts will be: the output head, for the next
    token depends on it, and all up to the first router."""
    if not name.startswith("layers."):
        return True
    mixtures = [i for i, layer in enumerate(arch["layers"]) if layer["ffn"]["block"] == "moe"]
    _, layer, part = name.split(".", 2)
    first = mixtures[0] if mixtures else len(arch["layers"])
    return int(layer) < first or (int(layer) == first and not part.startswith("shared"))


def expert_encodings(arch: dict[str, Any]) -> list[str]:
    return [name for layer in arch["layers"] for name in layer["ffn"].get("encodings", {}).values()]


def tensor_bytes(entry: dict[str, Any]) -> int:
    shape = entry["shape"] if len(entry["shape"]) == 2 else [1, *entry["shape"]]
    return _core.stored_bytes(entry["encoding"], entry["layout"], *shape)
