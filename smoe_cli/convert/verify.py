"""Checking every byte of a vault's three parts, without the source weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smoe_cli import _core
from smoe_cli.errors import from_core


def verify(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """``{ok, checked_bytes, errors}`` of a vault. A file that cannot be opened at all is an error in the list."""
    try:
        return dict(_core.verify(str(path), progress))
    except _core.CoreError as error:
        raise from_core(error) from error
