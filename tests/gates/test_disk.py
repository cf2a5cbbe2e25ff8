"""What the disk does, the text does not show: other file systems, failing reads, a cache too small to hit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from smoe_cli.errors import EngineRefused
from tests.gates.engine_run import random_ids, running

PROMPT = random_ids(60)


@pytest.fixture(scope="module")
def expected(streamed: Path) -> list[int]:
    with running(streamed, ctx=256) as run:
        return run.generate(PROMPT, 24)[0]


@pytest.fixture
def copy(streamed: Path, tmp_path: Path) -> Iterator[Path]:
    """The vault, to be damaged."""
    for part in streamed.parent.iterdir():
        (shutil.copytree if part.is_dir() else shutil.copy)(part, tmp_path / part.name)
    yield tmp_path / streamed.name
    shutil.rmtree(tmp_path)


def test_direct_and_buffered_reads_give_the_same_text(streamed: Path, expected: list[int]) -> None:
    for direct in (None, False):
        with running(streamed, ctx=256, ring=8, direct=direct, verify_reads=True) as run:
            assert run.generate(PROMPT, 24)[0] == expected
            if direct is False:
                assert run.process.info()["direct"] is False


def test_a_vault_on_tmpfs(streamed: Path, expected: list[int]) -> None:
    """R7: direct reads where this kernel's tmpfs takes them, else one notice and reads through the page cache."""
    folder = Path("/dev/shm") / f"smoe-gate-{os.getpid()}"
    if not folder.parent.is_dir() or shutil.disk_usage(folder.parent).free < 1 << 30:
        pytest.skip("there is no tmpfs with a gigabyte free at /dev/shm")
    try:
        shutil.copytree(streamed.parent, folder)
        with running(folder / streamed.name, ctx=256, ring=8) as run:
            assert run.generate(PROMPT, 24)[0] == expected
            assert run.generate(PROMPT[:40], 4)[1]["misses"] > 0
            direct = run.process.info()["direct"]
            assert len(run.said("reading through the page cache")) == (0 if direct else 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_cache_below_one_token_says_so(streamed: Path) -> None:
    """R4: six layers of top-4 ask for 24 records a token. Least recently used never hits; the default does a little."""
    hits: dict[str, float] = {}
    for policy in ("lru", "decayed"):
        with running(streamed, ctx=256, ring=8, cache_policy=policy, spec=0) as run:
            run.generate(PROMPT, 2)
            _, few = run.generate(PROMPT, 24)
            assert run.said("about 0% were hits")
        hits[policy] = few["hits"]
    assert hits["lru"] == 0
    assert hits["decayed"] > 0
    with running(streamed, ctx=256, ring=96, spec=0) as run:
        _, more = run.generate(PROMPT, 24)
        assert not run.said("0%")
    assert more["hits"] > hits["decayed"]
    assert more["bytes"] < few["bytes"]


def test_more_slots_hit_more_with_direct_and_buffered_reads(streamed: Path) -> None:
    """R5: the counter rises with the size; with room for all nothing is read twice."""
    for direct in (None, False):
        hits = []
        for slots in (8, 24, 96, 192, 384):
            with running(streamed, ctx=256, ring=slots, direct=direct, spec=0) as run:
                run.generate(PROMPT, 24)
                run.generate(PROMPT[1:], 24)
                counters = run.generate(PROMPT, 24)[1]
            hits.append(counters["hits"] / (counters["hits"] + counters["misses"]))
        assert hits == sorted(hits) and hits[0] < 0.5 and hits[-1] == 1


def test_a_vault_cut_short_while_running(copy: Path, expected: list[int]) -> None:
    """R8: an error to the request that needs what is gone; no hang, no wrong text, and the engine goes on."""
    whole = copy.stat().st_size
    with running(copy, ctx=256, ring=8) as run:
        assert run.generate(PROMPT, 24)[0] == expected
        tail = copy.read_bytes()[whole // 3 :]
        os.truncate(copy, whole // 3)
        with pytest.raises(EngineRefused) as refused:
            run.generate(PROMPT[::-1], 24)
        assert refused.value.name == "io_error"
        with copy.open("r+b") as file:
            file.seek(whole // 3)
            file.write(tail)
        assert run.generate(PROMPT, 24)[0] == expected
    told = refused.value.hint
    assert "ends inside a record" in told and "layer " in told and "expert " in told and str(copy) in told


def test_a_flipped_bit_in_a_record_is_found_on_the_way_in(copy: Path) -> None:
    with copy.open("r+b") as file:
        for offset in range(16384 + 5000, copy.stat().st_size - (1 << 20), 64 << 10):
            file.seek(offset)
            file.write(b"\xff\x00\xff")
    with running(copy, ctx=256, ring=8, verify_reads=True) as run:
        with pytest.raises(EngineRefused) as refused:
            run.generate(PROMPT, 4)
        assert refused.value.name == "io_error"
    told = refused.value.hint
    assert "does not match its checksum" in told and "layer " in told and "expert " in told
