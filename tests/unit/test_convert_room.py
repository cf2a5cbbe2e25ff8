"""Room on the disk: the writer reserves its part files, and what they hold is not asked for twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vault import TinyVault

from smoe_cli.convert.run import HEADROOM_BYTES, _require_room
from smoe_cli.errors import ResourceError


def test_reserved_room_is_not_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyVault()
    output = sum(count * size for _, count, size in tiny.layers) + sum(size for *_, size in tiny.trunk)
    options = SimpleNamespace(out_dir=tmp_path)
    job: Any = SimpleNamespace(options=options, vault=tmp_path / "tiny.smoe", stem="tiny", output_bytes=output)

    def free(size: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))

    free(output + HEADROOM_BYTES)
    _require_room(job)
    free(output + HEADROOM_BYTES - 1)
    with pytest.raises(ResourceError, match="free, the vault needs"):
        _require_room(job)
    writer = tiny.open(tmp_path)
    free(HEADROOM_BYTES)
    _require_room(job)
    free(HEADROOM_BYTES - 1)
    with pytest.raises(ResourceError, match="free, the vault needs"):
        _require_room(job)
    writer.abort()
