"""Sizes as people write them: K M G T are powers of 1024."""

from __future__ import annotations

import re

from smoe_cli.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse(text: str) -> int:
    """Bytes of ``8G``, ``512M``, ``1.5G``, ``4096``. Raises UsageError for anything else, zero and below included."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * 1024 ** _POWER[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a size", "write a number with K, M, G or T, such as 8G")
    return size


def show(size: float) -> str:
    """Bytes for a person: ``812 B``, ``46.4 GB``, in the same powers of 1024."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
