"""First in, first out, and no more than so many: who waits for the engine, and who is sent away."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smoe_cli.errors import EngineError
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
    """One run at a time has the engine; up to ``limit`` others wait in the order they came. On the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: deque[Run] = deque()
        self._running: Run | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._began = 0.0
        self._usual_s = 5.0  # how long a request takes, averaged
        self._closed: EngineError | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> bool:
        return self._running is not None

    def check(self) -> None:
        """Raises what ``enter`` would. For before the work of preparing a request."""
        if self._closed is not None:
            raise self._closed
        if self._running is not None and len(self._waiting) >= self.limit:
            wait = math.ceil(self._usual_s * (len(self._waiting) + 1))
            raise QueueFull(len(self._waiting), min(max(wait, 1), 120))

    def enter(self, run: Run) -> None:
        """Raises QueueFull, and EngineError when the server is stopping."""
        try:
            self.check()
        except EngineError:
            run.end()
            raise
        run.on_end = self._ended
        if self._running is None:
            self._begin(run)
        else:
            run.put(Queued(len(self._waiting) + 1))
            self._waiting.append(run)

    def abandon(self, run: Run) -> None:
        """The run's client has left, waiting or running."""
        run.cancel()
        if run in self._waiting:
            self._waiting.remove(run)
            run.end()
            self._tell()

    def close(self, reason: str) -> list[Run]:
        """Send everybody away from now on; the runs that are left, which their owner ends."""
        self._closed = EngineError(reason)
        left = [*([self._running] if self._running else []), *self._waiting]
        return left

    def _begin(self, run: Run) -> None:
        self._running, self._began = run, time.monotonic()
        run.begin(self._submit)

    def _submit(self, work: Callable[[], Any]) -> None:
        self._worker.submit(work)

    def _ended(self, run: Run) -> None:
        if run is not self._running:
            return
        self._usual_s += 0.2 * (time.monotonic() - self._began - self._usual_s)
        self._running = None
        if self._waiting:
            self._begin(self._waiting.popleft())
            self._tell()

    def _tell(self) -> None:
        for ahead, run in enumerate(self._waiting, 1):
            run.put(Queued(ahead))
