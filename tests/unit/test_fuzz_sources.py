"""Damaged sources of every format, the same ones each time: a few in the quick suite, more with ``-m slow``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from fuzz_sources import fuzz


def test_damaged_sources_are_refused_or_converted(tmp_path: Path) -> None:
    cases, taken = fuzz(tmp_path, lambda rounds: rounds < 8)
    assert cases > 100 and taken < cases / 2


@pytest.mark.slow
def test_many_damaged_sources(tmp_path: Path) -> None:
    cases, taken = fuzz(tmp_path, lambda rounds: rounds < 400, first=1000)
    assert 0 < taken < cases / 2
