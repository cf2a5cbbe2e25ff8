"""The vault registry: find the vaults of a folder, say what each is from its own bytes, resolve a name to one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from smoe_cli import _core, settings
from smoe_cli.errors import SmoeError, UsageError, from_core

SUFFIX = ".smoe"
SCOUT_SUFFIX = ".scout.safetensors"  # of the file beside it that holds the trunk


@dataclass(frozen=True)
class Vault:
    """A ``.smoe`` file as found. A damaged or half-there one has ``complete`` false and the reason in ``error``."""

    id: str
    path: Path
    scout: Path
    tokenizer_dir: Path
    bytes: int
    manifest: dict[str, Any] = field(default_factory=dict)
    error: SmoeError | None = None

    @property
    def complete(self) -> bool:
        return self.error is None

    @cached_property
    def moe_layers(self) -> list[dict[str, Any]]:
        """The routed layers' feed-forward blocks, in order."""
        layers = self.manifest.get("arch", {}).get("layers", [])
        return [layer["ffn"] for layer in layers if layer["ffn"]["block"] == "moe"]

    def describe(self) -> dict[str, Any]:
        """What ``smoe list --json`` prints of it."""
        experts = [layer["experts"] for layer in self.moe_layers]
        found: dict[str, Any] = {
            "id": self.id,
            "path": str(self.path),
            "quant": self.manifest.get("quant"),
            "model_type": self.manifest.get("model_type"),
            "moe_layers": len(self.moe_layers),
            "experts_per_layer": max(experts, default=0),
            "top_k": max((layer["top_k"] for layer in self.moe_layers), default=0),
            "bytes": self.bytes,
            "complete": self.complete,
        }
        return found if self.error is None else found | {"error": self.error.text}


def open_vault(path: Path) -> Vault:
    """A vault from the path of its ``.smoe``, with the cheap checks run. Never raises for a damaged file."""
    stem = path.name.removesuffix(SUFFIX)
    scout = path.with_name(f"{stem}{SCOUT_SUFFIX}")
    tokenizer_dir = path.with_name(f"{stem}.tokenizer")
    size = sum(part.stat().st_size for part in (path, scout, *_files(tokenizer_dir)) if part.is_file())
    manifest: dict[str, Any] = {}
    failure: SmoeError | None = None
    try:
        manifest = json.loads(_core.inspect(str(path))["manifest"])
    except _core.CoreError as error:
        failure = from_core(error)
    return Vault(stem, path, scout, tokenizer_dir, size, manifest, failure)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def find(folder: Path | None = None) -> list[Vault]:
    """Every ``.smoe`` of a folder (the vault folder by default), by id; damaged ones included, and marked."""
    folder = folder or settings.vault_dir()
    if not folder.is_dir():
        return []
    return [open_vault(path) for path in sorted(folder.glob(f"*{SUFFIX}")) if path.is_file()]


def resolve(model: str | None = None, folder: Path | None = None) -> Vault:
    """The vault that ``locate`` finds, which must be usable: what is wrong with a damaged one is raised."""
    vault = locate(model, folder)
    if vault.error is not None:
        raise vault.error
    return vault


def locate(model: str | None = None, folder: Path | None = None) -> Vault:
    """The vault that ``model`` names, damaged or not: an id in the folder, or a path to a ``.smoe``; left out,
    SMOE_MODEL, else the only one. UsageError (exit 2) lists the ids."""
    folder = folder or settings.vault_dir()
    model = model or settings.model()
    return _only(folder) if model is None else _named(model, folder)


def _named(model: str, folder: Path) -> Vault:
    path = Path(model)
    if path.name.endswith(SUFFIX) or path.parent != Path("."):
        if not path.is_file():
            raise UsageError(f"there is no vault at {path}", _ids(folder))
        return open_vault(path)
    inside = folder / f"{model}{SUFFIX}"
    if not inside.is_file():
        raise UsageError(f"there is no vault {model!r} in {folder}", _ids(folder))
    return open_vault(inside)


def _only(folder: Path) -> Vault:
    vaults = find(folder)
    whole = [vault for vault in vaults if vault.complete]
    if len(whole) == 1:
        return whole[0]
    if not whole:
        raise UsageError(f"there is no vault in {folder}", "make one with smoe convert, or name its folder")
    raise UsageError(f"{folder} holds {len(whole)} vaults: name one", "vaults: " + ", ".join(v.id for v in whole))


def _ids(folder: Path) -> str:
    ids = [vault.id for vault in find(folder) if vault.complete]
    return f"vaults in {folder}: {', '.join(ids)}" if ids else f"{folder} holds no vaults"
