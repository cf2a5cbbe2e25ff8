"""The slices of threads that pass tokens on: the calling thread's only, never those of what it starts."""

from __future__ import annotations

import ctypes
import os
import platform
from threading import Thread

import pytest

from smoe_cli.serve import slices


def slice_ns() -> int:
    """Of the calling thread, as the kernel has it; 0 where it knows none."""
    attributes = slices._Attributes()
    size = ctypes.sizeof(attributes)
    ctypes.CDLL(None).syscall(slices._NUMBER[platform.machine()] + 1, 0, ctypes.byref(attributes), size, 0)
    return int(attributes.runtime)


def in_a_thread(found: list[int]) -> None:
    thread = Thread(target=lambda: found.append(slice_ns()))
    thread.start()
    thread.join()


def test_only_the_thread_that_asks_has_them() -> None:
    usual, found = slice_ns(), []  # type: ignore[var-annotated]

    def ask() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        taken = slices.shorten()
        assert os.getpriority(os.PRIO_PROCESS, 0) == nice
        found.extend([taken, slice_ns()])
        in_a_thread(found)

    thread = Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [True, slices.SLICE_NS if usual else 0, usual]


def test_a_machine_whose_number_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "unheard-of")
    assert not slices.shorten()
