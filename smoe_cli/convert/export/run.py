"""``smoe export``: one vault, one format, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from smoe_cli.convert.export.vault import VaultReader
from smoe_cli.convert.run import file_errors
from smoe_cli.errors import UsageError

FORMATS = ("gguf", "mlx", "safetensors")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@file_errors()
def export(vault: Path, to: str, out: Path, dtype: str, progress: Progress) -> int:
    """Writes ``out``, which must not exist; the bytes of its tensors."""
    if to not in FORMATS:
        raise UsageError(f"--to {to} is not a format", f"one of: {', '.join(FORMATS)}")
    if out.exists():
        raise UsageError(f"{out} exists", "choose another name")
    reader = VaultReader(vault)
    try:
        total, writing = _gguf(reader, out) if to == "gguf" else _folder(reader, to, out, dtype)
        done = 0
        for done in writing:
            progress(min(done, total), total)
        return max(total, done)
    finally:
        reader.reader.close()


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
