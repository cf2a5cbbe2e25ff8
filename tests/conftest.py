"""Fixtures that several rooms share."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the folder of a tiny random checkpoint saved by transformers, made once
    per session for the same options (those of scripts/make_tiny_model.py). Skips, saying so, without torch."""
    pytest.importorskip("torch", reason="the reference needs torch")
    pytest.importorskip("transformers", reason="the reference implementation needs transformers")
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "scripts" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in made:
            made[key] = module.make_tiny_model(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_vault(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """``tiny_vault(family, quant, roles=(), **options)``: (checkpoint folder, .smoe), converted once per session."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str, quant: str = "source", roles: tuple[str, ...] = (), **options: Any) -> tuple[Path, Path]:
        from smoe_cli.convert.run import Options, convert, prepare
        from smoe_cli.convert.ui import Quiet

        key = json.dumps([family, quant, roles, options], sort_keys=True)
        if key not in made:
            source = tiny_checkpoint(family, **options)
            out = tmp_path_factory.mktemp(f"{family}-{quant}")
            job = prepare(Options(source, out, name=family, quant=quant, roles=roles), Quiet())
            convert(job, Quiet())
            made[key] = source, job.vault
        return made[key]

    return make
