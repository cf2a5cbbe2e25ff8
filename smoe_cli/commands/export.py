"""``smoe export``: a vault becomes a file or folder of another format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from smoe_cli import console, settings
from smoe_cli.commands.options import Json, VaultDir
from smoe_cli.commands.progress import Meter
from smoe_cli.sizes import show


def command(
    model: Annotated[str, typer.Argument(metavar="VAULT", help="A vault's id, or the path of a .smoe.")],
    to: Annotated[str, typer.Option("--to", help="gguf, mlx or safetensors.")],
    out: Annotated[Path | None, typer.Option("--out", help="File or folder to write; named after the vault.")] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of safetensors: bf16 (default) f16 f32, for what is quantised in the vault.")
    ] = "",
    vault_dir: VaultDir = None,
    as_json: Json = False,
) -> None:
    from smoe_cli import registry
    from smoe_cli.convert.export.run import export

    vault = registry.resolve(model, vault_dir or settings.vault_dir())
    target = out or Path(f"{vault.id}.gguf" if to == "gguf" else f"{vault.id}-{to}")
    meter = Meter("exporting")
    with meter:
        written = export(vault.path, to, target, dtype, meter.update, lambda text: console.say(f"note: {text}"))
    if as_json:
        print(json.dumps({"path": str(target), "format": to, "bytes": written}))
    console.say(f"{target}: {show(written)} of weights")
