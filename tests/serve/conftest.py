from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve import serving
from tests.serve.serving import Running, ShellVault
from tests.unit.fakes import FakeEngineFiles


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the vault ``tiny``, for tests that change nothing in it."""
    folder = tmp_path_factory.mktemp("shell")
    ShellVault().make(folder)
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngineFiles:
    """The scripted engine in place of the real one."""
    files = FakeEngineFiles(tmp_path / "engine")
    files.write([[1]])
    monkeypatch.setenv("SMOE_ENGINE", str(files.path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return files


@pytest.fixture(scope="module")
def still(shell: Path) -> Iterator[Running]:
    """A server for requests that must not reach an engine: there is none to be started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOE_ENGINE", "/no/such/engine")
        running = serving.run(serving.request(shell))
        yield running
        running.stop()


@pytest.fixture
def start(shell: Path) -> Iterator[Callable[..., Running]]:
    """``start(folder=..., queue=..., ping_s=...)``: a server that answers, stopped at the end."""
    servers: list[Running] = []

    def go(folder: Path | None = None, service: dict[str, object] | None = None, **more: object) -> Running:
        running = serving.run(serving.request(folder or shell, **more), **(service or {}))  # type: ignore[arg-type]
        servers.append(running)
        return running

    yield go
    for running in servers:
        running.stop()
