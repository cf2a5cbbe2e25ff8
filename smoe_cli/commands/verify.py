"""``smoe verify``: every byte of a vault checked. Exit code 4 where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli import console
from smoe_cli.commands.options import Json, VaultDir
from smoe_cli.commands.progress import Meter
from smoe_cli.errors import CorruptError


def verify_or_fail(path: Path) -> dict[str, Any]:
    """Check a vault with a meter. CorruptError (exit 4) after listing what is wrong."""
    result = check(path)
    if not result["ok"]:
        raise fail(path, result)
    return result


def check(path: Path) -> dict[str, Any]:
    from smoe_cli.convert.verify import verify

    with Meter(f"checking {path.name}") as meter:
        return verify(path, meter.update)


def fail(path: Path, result: dict[str, Any]) -> CorruptError:
    """Lists the errors; the exception to raise."""
    for error in result["errors"]:
        console.say(f"  {error}")
    count = len(result["errors"])
    return CorruptError(f"{path} is damaged: {count} error{'s' if count > 1 else ''}", "convert it again")


def command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A vault's id, or a path to a .smoe.")] = None,
    vault_dir: VaultDir = None,
    as_json: Json = False,
) -> None:
    from smoe_cli import registry

    path = registry.locate(model, vault_dir).path  # also one that does not open: that is what verify is for
    result = check(path)
    if as_json:
        print(json.dumps(result))
    if not result["ok"]:
        raise fail(path, result)
    console.say(f"{path}: every byte is right ({result['checked_bytes']} checked)")
