"""``smoe export``: one vault, one format, checked before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smoe_cli.convert.export.vault import VaultReader
from smoe_cli.convert.run import file_errors
from smoe_cli.errors import ResourceError, UsageError

FORMATS = ("gguf", "mlx", "safetensors")
AGAIN = "the same command starts over when this is put right"
PART = ".smoe-part"  # a name that nothing else has: what is there may be removed
HEADROOM_BYTES = 16 << 20  # header, tokenizer files
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@file_errors(AGAIN)
def export(
    vault: Path, to: str, out: Path, dtype: str, progress: Progress, notice: Callable[[str], None] = lambda text: None
) -> int:
    """Writes ``out``, which must not exist; the bytes of its tensors. ``dtype`` is safetensors', bf16 if empty. An
    export that is stopped leaves nothing behind; one that is killed leaves ``out`` with PART after it, which the next
    replaces."""
    if to not in FORMATS:
        raise UsageError(f"--to {to} is not a format", f"one of: {', '.join(FORMATS)}")
    if dtype and to != "safetensors":
        raise UsageError(f"--dtype is of safetensors; --to {to} keeps the vault's encodings", "leave --dtype out")
    if out.exists():
        raise UsageError(f"{out} exists", "choose another name with --out")
    part = out.with_name(out.name + PART)
    reader = VaultReader(vault)
    if to == "gguf" and (differs := reader.family.gguf.get("differs")):
        notice(f"llama.cpp will answer otherwise than smoe: {differs}")
    try:
        total, writing = _gguf(reader, part) if to == "gguf" else _folder(reader, to, part, dtype or "bf16")
        with _whole_or_nothing(part, out):
            _require_room(out.parent, total)
            done = 0
            for done in writing:
                progress(min(done, total), total)
        return max(total, done)
    finally:
        reader.reader.close()


@contextmanager
def _whole_or_nothing(part: Path, out: Path) -> Iterator[None]:
    """What is written as ``part`` becomes ``out`` at the end; it begins empty and is gone if anything stops it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove(part)
    try:
        yield
        part.replace(out)
    except BaseException:
        _remove(part)
        raise


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


def _require_room(folder: Path, total: int) -> None:
    free, needed = shutil.disk_usage(folder).free, total + HEADROOM_BYTES
    if free < needed:
        raise ResourceError(
            f"{folder} has {free} bytes free, the export needs {needed}",
            "free some space, or choose another place with --out",
        )


def _gguf(reader: VaultReader, out: Path) -> tuple[int, Iterator[int]]:
    from smoe_cli.convert.export.gguf import GgufExport
    from smoe_cli.convert.gguf.write import write_gguf

    found = GgufExport(reader)
    return sum(each.nbytes for each in found.tensors), write_gguf(out, found.metadata(), found.tensors)


def _folder(reader: VaultReader, to: str, out: Path, dtype: str) -> tuple[int, Iterator[int]]:
    from smoe_cli.convert.export.safetensors import DTYPES, CheckpointExport, write_folder

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not a precision", f"one of: {', '.join(DTYPES)}")
    config, kind = dict(reader.config), "pt"
    if to == "mlx":
        from smoe_cli.convert.export.mlx import MlxExport

        export = MlxExport(reader)
        tensors, config, kind = export.tensors, config | export.settings(), "mlx"
    else:
        tensors = CheckpointExport(reader, dtype).tensors
    total = sum(made.nbytes for made in tensors.values())
    return total, write_folder(out, tensors, config, reader, {"format": kind})
