"""Which of the engine's resident conversations a prompt continues: the longest common prefix of ids, at least cost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Session:
    """``ids`` is what the engine holds of it, as far as we know: the last prompt and what followed."""

    name: str
    ids: list[int] = field(default_factory=list)
    used: int = 0
    busy: bool = False  # a request is being answered in it


class Sessions:
    """Called from any thread. There are as many as requests may run at once."""

    def __init__(self, count: int) -> None:
        # The first has the engine's default name, which SCORE uses too: it takes no other one's place.
        self._all = [Session("" if index == 0 else f"s{index}") for index in range(count)]
        self._clock = 0
        self._lock = threading.Lock()

    @property
    def default(self) -> Session:
        return self._all[0]

    def named(self, name: str) -> Session | None:
        return next((session for session in self._all if session.name == name), None)

    @property
    def resident(self) -> int:
        return sum(bool(session.ids) for session in self._all)

    @contextlib.contextmanager
    def take(self, ids: Sequence[int], default: bool = False) -> Iterator[Session]:
        """The session in which these ids cost least, or the default one if it is to be that and is free; nobody else's
        until it is given back."""
        with self._lock:
            free = self.default if default and not self.default.busy else self._cheapest(ids)
            self._clock += 1
            free.used, free.busy, free.ids = self._clock, True, list(ids)
        try:
            yield free
        finally:
            free.busy = False

    def _cheapest(self, ids: Sequence[int]) -> Session:
        """Tokens to compute now, plus tokens of another conversation that are thrown away. Those count less the longer
        it has not been asked for, since it may never be again."""
        free = [session for session in self._all if not session.busy]
        return min(free, key=lambda session: (self._cost(session, ids), session.used))

    def clear(self) -> None:
        """The engine holds nothing any more: it was started again, or runs another model."""
        with self._lock:
            for session in self._all:
                session.ids = []

    def _cost(self, session: Session, ids: Sequence[int]) -> float:
        common = common_prefix(session.ids, ids)
        age = (self._clock + 1 - session.used) / len(self._all)
        return len(ids) - common + (len(session.ids) - common) / (1 + age)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids at the start are the same in both."""
    least = min(len(a), len(b))
    if a[:least] == b[:least]:
        return least
    low, high = 0, least  # a[:low] agrees, a[:high] does not; slices compare at the speed of memory
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
