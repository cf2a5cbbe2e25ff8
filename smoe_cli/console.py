"""Rich on stderr. stdout carries data only; nothing here writes to it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from smoe_cli.errors import SmoeError

if TYPE_CHECKING:
    from rich.console import Console


@cache
def stderr() -> Console:
    """The one console for people. Without a terminal it prints plain lines: no colours, no bars."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    stderr().print(text, markup=False)


def warn(text: str) -> None:
    stderr().print(f"warning: {text}", style="yellow", markup=False)


def error(failure: SmoeError) -> None:
    stderr().print(f"error: {failure.text}", style="bold red", markup=False)
    if failure.hint:
        stderr().print(f"  {failure.hint}", markup=False)
