"""Who computes in a conversion (smoe_cli/convert/turns.py)."""

from __future__ import annotations

import threading

import pytest

from smoe_cli.convert.turns import Turns


def has_room(turns: Turns) -> bool:
    """Whether another thread gets a turn now."""
    got = threading.Event()

    def other() -> None:
        with turns.take():
            got.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    return got.wait(0.2)


def test_a_turn_is_one_threads() -> None:
    turns = Turns(1)
    with turns.take():
        assert not has_room(turns)
    assert has_room(turns)


def test_a_turn_is_given_up_while_its_thread_waits() -> None:
    turns = Turns(1)
    with turns.take():
        with turns.give_up():
            assert has_room(turns)
        assert not has_room(turns)


def test_who_has_no_turn_gives_none_up() -> None:
    turns = Turns(1)
    with turns.give_up():
        pass
    with turns.take():
        assert not has_room(turns)  # there would be two turns, had one been made


def test_a_failure_leaves_as_many_turns_as_there_were() -> None:
    turns = Turns(1)
    with pytest.raises(OSError, match="gone"), turns.take(), turns.give_up():
        raise OSError("gone")
    with turns.take():
        assert not has_room(turns)
    assert has_room(turns)
