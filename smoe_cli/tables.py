"""Rows of text as aligned columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def aligned(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> list[str]:
    """One line for each row, its columns two spaces apart and as wide as their widest text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(justify(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
