"""Recurrent layers: their state belongs to the conversation and can be rolled back only to the copies taken at a
turn's start. Whatever happens, a warm reply has the bits of a cold one, and what can be kept is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import _core
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.manager import EngineManager, EngineSpec
from smoe_cli.families.spec import load_families

FAMILIES = [family.name for family in load_families() if family.recurrent]
ISAS = [name for name in ("scalar", "avx2", "avx512") if name in _core.isas()]


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, count)]


def engine(path: Path, **options: Any) -> Any:
    return _core.Engine(str(path), **{"ctx": 256, "threads": 2, "chunk": 32, **options})


@pytest.fixture(scope="module", params=FAMILIES)
def vault(request: pytest.FixtureRequest, tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault(request.param, "q8_0", seed=3)[1]


class Talk:
    """One engine that is kept, and for every request a new one to compare with."""

    def __init__(self, vault: Path, **options: Any) -> None:
        self.vault, self.options = vault, options
        self.warm = engine(vault, **options)

    def ask(self, ids: list[int], cached: int, count: int = 7, **more: Any) -> list[int]:
        """The reply as far as it was computed, which the last id of one that is cut by its length is not."""
        out, outcome = self.warm.generate(ids, count, temperature=0.0, logprobs=3, **more)
        cold, fresh = engine(self.vault, **self.options).generate(ids, count, temperature=0.0, logprobs=3)
        assert list(out) == list(cold)
        assert outcome["logprobs"] == fresh["logprobs"]
        assert outcome["cached_tokens"] == cached
        return list(out)[: -1 if outcome["finish"] == "length" else None]


def test_append_regenerate_and_edit(vault: Path) -> None:
    talk = Talk(vault)
    first = ids_of(70)
    held = first + talk.ask(first, cached=0)
    talk.ask(first, cached=len(first) - 1)  # regenerated: from before the prompt's last id
    second = held + ids_of(20, seed=2)
    talk.ask(second, cached=len(held))
    talk.ask(second, cached=len(second) - 1)
    edited = held + ids_of(33, seed=3)  # another question after the same reply: from the turn's start
    talk.ask(edited, cached=len(held))
    talk.ask(held + ids_of(10, seed=4), cached=len(held))
    talk.ask(first[:60] + ids_of(20, seed=5), cached=0)  # an older turn: nothing of it is held


def test_a_reply_told_again_without_its_thoughts(vault: Path) -> None:
    talk = Talk(vault)
    first = ids_of(40)
    reply = talk.ask(first, cached=0, count=20)
    retold = first + ids_of(3, seed=2) + reply[-4:] + ids_of(10, seed=3)
    talk.ask(retold, cached=len(first) - 1)
    talk.ask(retold, cached=len(retold) - 1)


def test_a_prompt_that_is_the_beginning_of_another(vault: Path) -> None:
    talk = Talk(vault)
    long = ids_of(90)
    talk.ask(long, cached=0)
    talk.ask(long[:50], cached=0)
    talk.ask(long[:50] + ids_of(4, seed=2), cached=49)
    talk.ask(long[:1], cached=0)
    talk.ask(long[:2], cached=0)


def test_cancelled_turns(vault: Path) -> None:
    talk, ids = Talk(vault), ids_of(80)
    out, outcome = talk.warm.generate(ids, 30, temperature=0.0, cancel_after=4)
    assert outcome["finish"] == "cancel"
    out = list(out)
    talk.ask(ids + out + ids_of(8, seed=9), cached=len(ids) + len(out) - 1)
    talk.ask(ids + out + ids_of(9, seed=10), cached=len(ids) + len(out) - 1)


def test_conversations_do_not_share_a_state(vault: Path) -> None:
    talk = Talk(vault, sessions=2)
    one, other = ids_of(45, seed=1), ids_of(52, seed=2)
    one += talk.ask(one, cached=0, session="a")
    other += talk.ask(other, cached=0, session="b")
    talk.ask(one + ids_of(4, seed=3), cached=len(one), session="a")
    talk.ask(other + ids_of(4, seed=4), cached=len(other), session="b")


def test_longer_than_the_window(vault: Path) -> None:
    talk = Talk(vault, ctx=96)
    long = ids_of(250, seed=4)
    long += talk.ask(long, cached=0)
    talk.ask(long + ids_of(5, seed=5), cached=len(long))


@pytest.mark.parametrize("isa", ISAS)
def test_chunks_and_threads_change_no_bit_on_any_isa(vault: Path, isa: str) -> None:
    ids = ids_of(100)
    whole = np.asarray(engine(vault, isa=isa, threads=1, chunk=128).logits(ids))
    for chunk, prefill, threads in ((32, 100, 2), (64, 47, 3), (128, 0, 1)):
        got = engine(vault, isa=isa, chunk=chunk, threads=threads).logits(ids, prefill=prefill)
        assert (np.asarray(got) == whole).all()
    exact = np.asarray(engine(vault, isa=isa, activations="float").logits(ids_of(40)))
    scalar = np.asarray(engine(vault, isa="scalar", activations="float").logits(ids_of(40)))
    assert np.abs(exact - scalar).max() / np.abs(scalar).max() < 1e-4


def test_guessed_tokens_are_not_computed_where_they_could_not_be_taken_back(vault: Path) -> None:
    ids = ids_of(6) * 12
    plain, drafting = engine(vault), engine(vault, draft="ngram:8")
    want = plain.generate(ids, 30, temperature=0.0)[0]
    got, outcome = drafting.generate(ids, 30, temperature=0.0)
    assert list(got) == list(want)
    assert outcome["drafted_tokens"] == 0


def test_that_nothing_is_guessed_is_said(vault: Path) -> None:
    with EngineManager(EngineSpec(vault, EngineFlags(ctx=256, threads=1, draft="ngram:8"))) as manager:
        manager.start()
        said: list[str] = []
        until = time.monotonic() + 5  # stderr comes by a pipe of its own
        while not said and time.monotonic() < until:
            said += [line for line in manager.take_notices() if "--draft guesses nothing" in line]
        assert len(said) == 1
