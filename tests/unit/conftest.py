from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fakes import FakeEngineFiles


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngineFiles:
    """The scripted engine in place of the real one; ``fake.write(replies, faults=[...])`` says what it does."""
    files = FakeEngineFiles(tmp_path / "engine")
    files.write([[1]])
    monkeypatch.setenv("SMOE_ENGINE", str(files.path))
    return files
