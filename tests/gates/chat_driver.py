"""Runs ``smoe chat`` as the command line does, with the stand-in vault of tests/unit/fakes.py for a model."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import smoe_cli
from tests.unit import fakes

FOLDER = Path(sys.argv[1])


def resolve(name: str | None, vault_dir: Path | None) -> types.SimpleNamespace:
    path = FOLDER / f"{name or 'tiny'}.smoe"
    tokenizer = path.with_suffix(".tokenizer")
    return types.SimpleNamespace(path=path, id=path.stem, tokenizer_dir=tokenizer, manifest=fakes.read_manifest(path))


registry = types.ModuleType("smoe_cli.registry")
registry.resolve = resolve  # type: ignore[attr-defined]
sys.modules["smoe_cli.registry"] = smoe_cli.registry = registry  # type: ignore[attr-defined]

from smoe_cli.main import main  # noqa: E402

main(sys.argv[2:])
