from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gates.streamed_vault import Shape, make_vault
from tests.unit import fakes
from tests.unit.fakes import FakeEngineFiles, ids


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A vault of 320 MB of experts and 6 MB of trunk; removed at the end, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        yield make_vault(Path(folder), Shape())


@pytest.fixture
def fake(tmp_path: Path) -> FakeEngineFiles:
    files = FakeEngineFiles(tmp_path / "engine")
    files.write([ids("one"), ids("two")])
    fakes.vault(tmp_path)
    return files
