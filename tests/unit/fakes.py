"""A scripted engine and a stand-in vault, for tests of the manager, the session and ``smoe chat``."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.tokenizer import TextTokenizer
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.manager import EngineManager, EngineSpec
from tests.unit import tokenizers_made as made

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class FakeEngineFiles:
    """``path`` is an executable to put in SMOE_ENGINE; ``script`` can be rewritten until the engine starts."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "fake-engine"

    @property
    def script(self) -> Path:
        return self.folder / "script.json"

    def write(self, replies: list[list[int]], **more: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.script.write_text(json.dumps({"replies": replies, **more}))
        command = f'cd {ROOT} && exec {sys.executable} -m smoe_cli.engine.fake --script {self.script} "$@"'
        self.path.write_text(f"#!/bin/sh\n{command}\n")
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def requests(self) -> list[dict[str, Any]]:
        """Every GEN line the engine has had, across its restarts, with the command line it was started with."""
        log = self.script.with_name("script.json.log")
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def prompts(self) -> list[list[int]]:
        return [[int(token) for token in entry["request"].split()[-1].split(",")] for entry in self.requests()]


def vault(folder: Path, template: str = made.CHATML, **manifest: Any) -> Path:
    """A stand-in: the tokenizer is real, the rest is the manifest alone, beside the name that the .smoe would have."""
    made.save_chatml(folder / "tiny.tokenizer", template)
    path = folder / "tiny.smoe"
    path.write_bytes(b"")
    content = {"id": "tiny", "eos_ids": [0, 2], "generation": {}, "tokenizer": {"files": {}}, **manifest}
    path.with_suffix(".manifest.json").write_text(json.dumps(content))
    return path


def read_manifest(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.with_suffix(".manifest.json").read_text())
    return content


def model(folder: Path, template: str = made.CHATML, **manifest: Any) -> ChatModel:
    path = vault(folder, template, **manifest)
    return ChatModel("tiny", path, read_manifest(path), TextTokenizer(path.with_suffix(".tokenizer")))


def manager(path: Path = Path("tiny.smoe"), **flags: Any) -> EngineManager:
    return EngineManager(EngineSpec(path, EngineFlags(**flags)))


def ids(text: str) -> list[int]:
    return list(made.byte_level().encode(text, add_special_tokens=False).ids)
