"""Who computes in a conversion: as many threads at once as there are jobs, while the others wait for the disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """``jobs`` threads have a turn at any time. One that has none may read as it likes."""

    def __init__(self, jobs: int) -> None:
        self._free = threading.Semaphore(jobs)
        self._mine = threading.local()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Waits for a turn, and has it inside."""
        with self._free:
            self._mine.held = True
            try:
                yield
            finally:
                self._mine.held = False

    @contextlib.contextmanager
    def give_up(self) -> Iterator[None]:
        """Around what waits: another thread may have this one's turn, if it has one, and gives it back."""
        if not getattr(self._mine, "held", False):
            yield
            return
        self._free.release()
        try:
            yield
        finally:
            self._free.acquire()
