"""First in, first out, and no more than so many: who has the engine, who waits for it, and who is sent away."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smoe_cli.errors import EngineError
from smoe_cli.serve import slices
from smoe_cli.serve.run import Queued, Run


class QueueFull(EngineError):
    """Sent away before anything was done. ``retry_after_s`` is a guess from how long requests have been taking."""

    http_status = 429

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting already", f"try again in {retry_after_s} s", code="rate_limit_exceeded"
        )
        self.retry_after_s = retry_after_s


class Queue:
    """Up to ``parallel`` runs have the engine together, as long as they share it (see ``Run.shares``); up to ``limit``
    others wait in the order they came. On the event loop only."""

    def __init__(self, limit: int, parallel: int = 1) -> None:
        self.limit, self.parallel = limit, parallel
        self._waiting: deque[Run] = deque()
        self._began: dict[Run, float] = {}  # those that have the engine, and since when
        self._workers = ThreadPoolExecutor(parallel, "engine", slices.shorten)
        self._usual_s = 5.0  # how long a request takes, averaged
        self._closed: EngineError | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._began)

    def check(self) -> None:
        """Raises what ``enter`` would. For before the work of preparing a request."""
        if self._closed is not None:
            raise self._closed
        full = len(self._began) >= self.parallel or self._waiting
        if full and len(self._waiting) >= self.limit:
            wait = math.ceil(self._usual_s * (len(self._waiting) + 1) / self.parallel)
            raise QueueFull(len(self._waiting), min(max(wait, 1), 120))

    def enter(self, run: Run) -> None:
        """Raises QueueFull, and EngineError when the server is stopping."""
        try:
            self.check()
        except EngineError:
            run.end()
            raise
        run.on_end = self._ended
        self._waiting.append(run)
        self._begin_those_whose_turn_it_is()
        if run in self._waiting:
            run.put(Queued(len(self._waiting)))

    def abandon(self, run: Run) -> None:
        """The run's client has left, waiting or running."""
        run.cancel()
        if run in self._waiting:
            self._waiting.remove(run)
            run.end()
            self._begin_those_whose_turn_it_is()
            self._tell()

    def close(self, reason: str) -> list[Run]:
        """Send everybody away from now on; the runs that are left, which their owner ends."""
        self._closed = EngineError(reason)
        return [*self._began, *self._waiting]

    def _begin_those_whose_turn_it_is(self) -> None:
        """Nobody is overtaken: who needs the engine alone, or another model, gets it when it is free."""
        while self._waiting and self._fits(self._waiting[0]):
            run = self._waiting.popleft()
            self._began[run] = time.monotonic()
            run.begin(self._submit)

    def _fits(self, run: Run) -> bool:
        if len(self._began) >= self.parallel:
            return False
        return all(run.shares is not None and run.shares == other.shares for other in self._began)

    def _submit(self, work: Callable[[], Any]) -> None:
        self._workers.submit(work)

    def _ended(self, run: Run) -> None:
        began = self._began.pop(run, None)
        if began is None:
            return
        self._usual_s += 0.2 * (time.monotonic() - began - self._usual_s)
        if self._waiting:
            self._begin_those_whose_turn_it_is()
            self._tell()

    def _tell(self) -> None:
        for ahead, run in enumerate(self._waiting, 1):
            run.put(Queued(ahead))
