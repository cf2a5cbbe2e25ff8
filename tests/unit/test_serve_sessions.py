"""Which resident conversation a prompt continues."""

from __future__ import annotations

import random

import pytest

from smoe_cli.serve.sessions import Sessions, common_prefix

A = list(range(100))
B = list(range(1000, 1100))
C = list(range(2000, 2100))


def ask(sessions: Sessions, ids: list[int]) -> str:
    with sessions.take(ids) as session:
        return session.name


def test_each_conversation_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(2)
    first, second = ask(sessions, A), ask(sessions, B)
    assert first != second
    for turn in range(1, 6):
        assert ask(sessions, A + [7] * turn) == first
        assert ask(sessions, B + [8] * turn) == second
    assert sessions.resident == 2


def test_the_first_has_the_engines_default_name() -> None:
    assert ask(Sessions(3), A) == ""


def test_a_third_takes_the_place_of_the_one_not_used_for_longest() -> None:
    sessions = Sessions(2)
    ask(sessions, A)
    kept = ask(sessions, B)
    assert ask(sessions, C) != kept
    assert ask(sessions, [*B, 1]) == kept


def test_an_edit_of_the_last_turn_stays_in_its_session() -> None:
    sessions = Sessions(2)
    first = ask(sessions, A)
    assert ask(sessions, [*A[:90], 5, 5]) == first


def test_a_shared_system_prompt_does_not_cost_another_conversation_its_tail() -> None:
    sessions = Sessions(2)
    system = list(range(500, 550))
    long = ask(sessions, system + A * 20)
    assert ask(sessions, [*system, 1, 2, 3]) != long
    assert ask(sessions, [*system, *(A * 20), 9]) == long


def test_a_conversation_that_nobody_comes_back_to_gives_way() -> None:
    sessions = Sessions(2)
    old = ask(sessions, A * 50)
    names = [ask(sessions, [number] * 100) for number in range(5000, 5200)]
    assert old in names


def test_cleared_when_the_engine_is_another() -> None:
    sessions = Sessions(2)
    ask(sessions, A)
    sessions.clear()
    assert sessions.resident == 0


def test_common_prefix_is_what_it_says() -> None:
    chance = random.Random(5)
    for _ in range(500):
        a = [chance.randrange(3) for _ in range(chance.randrange(12))]
        b = [*a[: chance.randrange(len(a) + 1)], *(chance.randrange(3) for _ in range(chance.randrange(5)))]
        naive = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == naive


def test_a_session_is_one_requests_at_a_time() -> None:
    sessions = Sessions(3)
    with sessions.take(A) as first, sessions.take([*A, 1]) as second, sessions.take(B, default=True) as third:
        assert len({first.name, second.name, third.name}) == 3
    with sessions.take(C, default=True) as again:
        assert again.name == ""
