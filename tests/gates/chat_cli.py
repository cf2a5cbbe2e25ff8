"""``smoe chat`` as a command line, with the scripted engine and the stand-in vault in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit import fakes, tokenizers_made

DRIVER = Path(__file__).with_name("chat_driver.py")


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "SMOE_MODEL", "SMOE_VAULT_DIR")}
    return {
        **kept,
        "SMOE_ENGINE": str(folder / "engine" / "fake-engine"),
        "PYTHONPATH": str(fakes.ROOT),
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(folder / "state"),
    }


def command(folder: Path, *argv: str) -> list[str]:
    return [sys.executable, str(DRIVER), str(folder), "chat", *argv]


def engine_pids(folder: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"smoe_cli.engine.fake --script {folder}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def made_text(prompt: list[int]) -> str:
    return str(tokenizers_made.byte_level().decode(prompt))


def made_text_with_specials(prompt: list[int]) -> str:
    return str(tokenizers_made.byte_level().decode(prompt, skip_special_tokens=False))
