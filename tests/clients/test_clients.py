"""Each client installed from its registry, and used. ``python -m tests.clients.NAME FOLDER`` runs one by hand and keeps
what it installs. Slow: half a gigabyte is downloaded."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.clients import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIENTS = ["claude_code", "llm_cli", "aider_cli", "litellm_client", "lm_eval_cli", "qwen_code", "ollama_client"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vaults = tmp_path_factory.mktemp("demo") / "vaults"
    harness.make_demo(vaults)
    return vaults


@pytest.mark.parametrize("name", CLIENTS)
def test_client(name: str, tmp_path: Path, demo: Path) -> None:
    shutil.copytree(demo, tmp_path / "vaults", copy_function=os.link)
    program = importlib.import_module(f"tests.clients.{name}").check(tmp_path)
    print(f"{program.name} {program.version}")
