"""Between requests: the cache warmed from what earlier processes used, and memory given back when it runs short."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from smoe_cli import settings
from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from tests.gates.engine_run import Run, random_ids, running

PROMPT = random_ids(4)  # too short for whole layers to be read ahead


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        with MemoryCgroup(1 << 30, "smoe-gate") as group:
            yield group
    except CgroupUnavailable as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")


def until(run: Run, holds: Callable[[dict[str, Any]], bool], seconds: float = 20) -> dict[str, Any]:
    """INFO once ``holds`` is true of it."""
    give_up_at = time.monotonic() + seconds
    while not holds(info := run.process.info()):
        assert time.monotonic() < give_up_at, info
        time.sleep(0.05)
    return info


def test_the_second_process_starts_with_what_the_first_used(streamed: Path, tmp_path: Path) -> None:
    history = tmp_path / "streamed.usage"
    cold: list[str] = ["--no-warm"]

    def keeping(*more: str) -> Callable[[list[str]], list[str]]:
        return lambda argv: [*argv, "--history", str(history), *more]

    with running(streamed, keeping(), ctx=256, ring=100, spec=0) as run:
        ids, first = run.generate(PROMPT, 40)
    assert history.is_file()
    assert [file.name for file in tmp_path.iterdir()] == [history.name]
    with running(streamed, keeping(*cold), ctx=256, ring=100, spec=0) as run:
        assert run.generate(PROMPT, 40)[0] == ids
    with running(streamed, keeping(), ctx=256, ring=100, spec=0) as run:
        info = until(run, lambda info: info["resident"] == 100)
        assert info["warmed"] == 100
        again, warm = run.generate(PROMPT, 40)
        assert not run.said("", 0)
    assert again == ids
    assert warm["misses"] < first["misses"]


def test_chat_and_serve_keep_it_beside_the_vault_or_among_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    vault = tmp_path / "a.smoe"
    assert settings.history(vault) == tmp_path / "a.usage"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    elsewhere = settings.history(vault)
    assert elsewhere.parent == tmp_path / "state" / "smoe" / "usage" and elsewhere.parent.is_dir()
    assert settings.history(tmp_path / "other" / "a.smoe") != elsewhere


# Takes 10 MiB more for every line it is sent.
HOG = """
import sys
held = []
for line in sys.stdin:
    held.append(bytearray(b"x") * (10 << 20))
    print(flush=True)
"""


@contextmanager
def hog(group: MemoryCgroup) -> Iterator[Callable[[], None]]:
    """A neighbour in the group that takes another 10 MiB when called."""
    process = subprocess.Popen(
        group.command([sys.executable, "-c", HOG]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None

    def more() -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"\n"

    try:
        yield more
    finally:
        process.kill()
        process.communicate()


def test_r17_the_cache_shrinks_when_memory_falls_and_grows_back(group: MemoryCgroup, streamed: Path) -> None:
    """A neighbour in the group takes most of it: nothing is killed, the text stays the same, and it comes back."""
    group.set_limit(700 << 20)
    with running(streamed, group.command, ctx=512, ring=384, spec=0) as run:
        planned = run.process.info()["slots"]
        expected = run.generate(random_ids(200), 20)[0]
        full = run.memory_bytes("VmRSS")
        with hog(group) as take_more:
            for step in range(48):  # 480 MiB, of which about 300 are free
                take_more()
                time.sleep(0.6 if step > 24 else 0)
            info = run.process.info()
            assert info["open_slots"] < planned * 3 // 4
            assert run.said(" slots now: ", 2)
            assert run.memory_bytes("VmRSS") < full - (80 << 20)
            assert run.generate(random_ids(200), 20)[0] == expected
            assert run.process.info()["open_slots"] < planned
            assert run.memory_bytes("VmSwap") == 0
        until(run, lambda info: info["open_slots"] == planned)
        assert run.generate(random_ids(200), 20)[0] == expected
    assert group.oom_kills() == 0
