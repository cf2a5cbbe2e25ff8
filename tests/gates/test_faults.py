"""R8: a disk that fails, is late, is cut short or written to: an error to that request only, and the next one right."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smoe_cli import _core
from smoe_cli.errors import EngineRefused
from tests.gates.engine_run import Run, random_ids, running

PROMPT = random_ids(60)
OTHER = PROMPT[::-1]
IOS = ["pread", "uring"]


def needs(io: str, path: Path) -> None:
    try:
        _core.probe_disk(str(path), 16384, 0.01, io=io)
    except _core.CoreError as error:
        pytest.skip(f"--io {io}: {error}")


@pytest.fixture(scope="module")
def expected(streamed: Path) -> list[int]:
    with running(streamed, ctx=256) as run:
        return run.generate(PROMPT, 16)[0]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the faulty disk with")
    library = tmp_path_factory.mktemp("shim") / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def copy(streamed: Path, tmp_path: Path) -> Iterator[Path]:
    """The vault, to be damaged."""
    for part in streamed.parent.iterdir():
        (shutil.copytree if part.is_dir() else shutil.copy)(part, tmp_path / part.name)
    yield tmp_path / streamed.name
    shutil.rmtree(tmp_path)


def on_disk(shim: Path, fault: str, switch: Path) -> Callable[[list[str]], list[str]]:
    return lambda argv: ["env", f"LD_PRELOAD={shim}", f"FAULTY_DISK={fault}", f"FAULTY_SWITCH={switch}", *argv]


def refused(run: Run) -> str:
    """What a request that must fail says."""
    with pytest.raises(EngineRefused) as error:
        run.generate(OTHER, 16)
    assert error.value.name == "io_error"
    return str(error.value.hint)


def needs_direct(run: Run) -> None:
    if not run.process.info()["direct"]:
        pytest.skip("no direct reads here: the faulty disk knows the engine's reads by O_DIRECT")


@pytest.mark.parametrize("spec", [0, 1])
def test_a_disk_that_fails_fails_the_request(
    streamed: Path, expected: list[int], shim: Path, tmp_path: Path, spec: int
) -> None:
    switch = tmp_path / "on"
    with running(streamed, on_disk(shim, "eio", switch), ctx=256, ring=8, io="pread", spec=spec) as run:
        needs_direct(run)
        assert run.generate(PROMPT, 16)[0] == expected
        for _ in range(2):
            switch.touch()
            told = refused(run)
            assert os.strerror(5) in told and "layer " in told and "expert " in told and str(streamed) in told
            switch.unlink()
            assert run.generate(PROMPT, 16)[0] == expected


@pytest.mark.parametrize("fault", ["eio-once", "short", "slow"])
def test_a_disk_that_recovers_shows_nowhere_in_the_text(
    streamed: Path, expected: list[int], shim: Path, tmp_path: Path, fault: str
) -> None:
    switch = tmp_path / "on"
    with running(streamed, on_disk(shim, fault, switch), ctx=256, ring=8, io="pread") as run:
        needs_direct(run)
        run.generate(OTHER, 4)
        switch.touch()
        ids, counters = run.generate(PROMPT, 16)
        assert ids == expected
        if fault == "slow":  # 5 ms for eight reads side by side, a layer at a time
            assert counters["wait_ms"] > 5 * counters["misses"] / 8


@pytest.mark.parametrize("io", IOS)
def test_a_vault_written_over_while_running(copy: Path, expected: list[int], io: str) -> None:
    """Without --verify-reads: that the file has changed is seen, and from then on what is read of it is checked."""
    needs(io, copy)
    whole = copy.read_bytes()
    with running(copy, ctx=256, ring=8, io=io) as run:
        assert run.generate(PROMPT, 16)[0] == expected
        with copy.open("r+b") as file:
            for offset in range(16384 + 5000, len(whole) - (1 << 20), 64 << 10):
                file.seek(offset)
                file.write(b"\xff\x00\xff")
        told = refused(run)
        assert "does not match its checksum" in told and "layer " in told and "expert " in told
        with copy.open("r+b") as file:
            file.write(whole)
        assert run.generate(PROMPT, 16)[0] == expected


@pytest.mark.parametrize("io", IOS)
def test_a_vault_replaced_while_running(copy: Path, expected: list[int], io: str) -> None:
    """A new file under the old name is another file: the engine goes on with the one it has open."""
    needs(io, copy)
    with running(copy, ctx=256, ring=8, io=io) as run:
        assert run.generate(PROMPT, 16)[0] == expected
        other = copy.with_suffix(".new")
        other.write_bytes(bytes(copy.stat().st_size))
        other.rename(copy)
        run.generate(OTHER, 4)
        assert run.generate(PROMPT, 16)[0] == expected
        copy.unlink()
        run.generate(OTHER, 4)
        assert run.generate(PROMPT, 16)[0] == expected


@pytest.mark.parametrize("io", IOS)
def test_a_vault_cut_short_while_running(copy: Path, expected: list[int], io: str) -> None:
    needs(io, copy)
    whole = copy.read_bytes()
    with running(copy, ctx=256, ring=8, io=io) as run:
        assert run.generate(PROMPT, 16)[0] == expected
        os.truncate(copy, len(whole) // 3)
        told = refused(run)
        assert "ends inside a record" in told and "layer " in told and str(copy) in told
        with copy.open("r+b") as file:
            file.write(whole)
        assert run.generate(PROMPT, 16)[0] == expected


def test_an_embedding_on_disk_written_over_while_running(copy: Path, expected: list[int]) -> None:
    """Its rows are read as tokens come and have no checksum of their own."""
    scout = copy.with_suffix(".scout.safetensors")
    with running(copy, ctx=256, ring=8) as run:
        assert run.generate(PROMPT, 16)[0] == expected
        with scout.open("r+b") as file:
            file.seek(scout.stat().st_size // 2)
            file.write(b"x")
        with pytest.raises(EngineRefused) as error:
            run.generate(OTHER, 4)
        assert str(scout) in str(error.value.hint) and "written to" in str(error.value.hint)
