"""Vaults for the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_smoe(*arguments: str, check: bool = True, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """`smoe ARGUMENTS` as a user would run it; stdout and stderr captured."""
    done = subprocess.run(  # type: ignore[call-overload]
        [sys.executable, "-m", "smoe_cli", *arguments], capture_output=True, text=True, check=False, **kwargs
    )
    if check and done.returncode != 0:
        raise AssertionError(f"smoe {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done  # type: ignore[no-any-return]


def convert(checkpoint: Path, out: Path, quant: str, *flags: str, name: str = "m") -> Path:
    """The path of the `.smoe` that `smoe convert` makes of a checkpoint folder."""
    run_smoe("convert", str(checkpoint), "--out", str(out), "--name", name, "--quant", quant, *flags)
    return out / f"{name}.smoe"
