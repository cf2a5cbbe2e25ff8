"""Which formats a checkpoint may have, and how it is told which one is there. Readers are imported when needed."""

from __future__ import annotations

from pathlib import Path

from smoe_cli.convert.checkpoint import Checkpoint, open_checkpoint
from smoe_cli.errors import UsageError
from smoe_cli.registry import SCOUT_SUFFIX

SEISMIC = b"SMOE\xde\xea\x00\x01"


def open_source(path: Path) -> Checkpoint:
    """A checkpoint in any format that is read. Errors as ``open_checkpoint``'s."""
    gguf = _gguf(path)
    if gguf is not None:
        from smoe_cli.convert.gguf.open import open_gguf

        return open_gguf(gguf)
    seismic = _seismic(path)
    if seismic is not None:
        from smoe_cli.convert.seismic import open_seismic

        return open_seismic(seismic)
    return open_checkpoint(path)


def locate(path: Path) -> Path:
    """The folder or file that is meant: of a repository in the hub's cache the snapshot that its main branch names,
    else its only one; any other path as it is."""
    snapshots = path / "snapshots"
    if not path.resolve().name.startswith("models--") or not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    named = snapshots / main.read_text("utf-8", "replace").strip() if main.is_file() else snapshots
    found = [named] if named != snapshots and named.is_dir() else sorted(snapshots.iterdir())
    if len(found) != 1:
        names = ", ".join(folder.name for folder in found) or "none"
        raise UsageError(f"{path} is a repository of the hub's cache; snapshots: {names}", "give the folder of one")
    return found[0]


def _gguf(path: Path) -> Path | None:
    """The GGUF file that is meant: the path itself, or the one model in a folder that holds no other kind."""
    if path.is_file():
        return path if path.suffix == ".gguf" or _begins(path, b"GGUF") else None
    if not path.is_dir() or any(not file.name.endswith(SCOUT_SUFFIX) for file in path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    from smoe_cli.convert.gguf.file import model_of

    if len({model_of(file.name) for file in found}) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise UsageError(f"{path} holds several GGUF models: {names}", "give one of the files")
    return found[0] if found else None


def _seismic(path: Path) -> Path | None:
    """A vault of S-MoE: the path itself, or the only one in a folder."""
    if path.is_file():
        return path if _begins(path, SEISMIC) else None
    found = sorted(path.glob("*.smoe")) if path.is_dir() and not (path / "model.safetensors").is_file() else []
    found = [file for file in found if _begins(file, SEISMIC)]
    if len(found) > 1:
        raise UsageError(f"{path} holds several vaults of S-MoE", "give one of the files")
    return found[0] if found else None


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def model_name(path: Path) -> str:
    """What a source is called: its folder, or its file without ending and number of a part; a folder of the Hugging
    Face hub's cache, which has a commit for a name, like its repository."""
    if path.is_file():
        from smoe_cli.convert.gguf.file import model_of

        return model_of(path.name)
    resolved = path.resolve()
    if resolved.parent.name == "snapshots" and resolved.parents[1].name.startswith("models--"):
        return resolved.parents[1].name.rsplit("--", 1)[-1]
    return resolved.name
