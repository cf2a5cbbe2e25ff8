"""One request's way through queue and engine: events come out of a worker thread into the event loop, in batches.

A ``Run`` belongs to the event loop; only ``_work`` and what it calls happen in its worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any

from smoe_cli.chat.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from smoe_cli.errors import EngineError, SmoeError

PING_S = 10.0
_DELTAS = (TextDelta, ReasoningDelta, ToolCallDelta)


@dataclass(frozen=True)
class Queued:
    """Waiting; ``ahead`` requests come first."""

    ahead: int


@dataclass(frozen=True)
class Starting:
    """It is this request's turn."""


@dataclass(frozen=True)
class Ping:
    """Time has passed: a sign of life is due, whatever the engine does."""


@dataclass(frozen=True)
class Failed:
    error: SmoeError


@dataclass(frozen=True)
class PromptScored:
    """Log-probabilities of a prompt's tokens given those before them, and the likeliest alternatives: one entry for
    each token but the first."""

    logprobs: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]


Item = Queued | Starting | Ping | Failed | tuple[int, Event | PromptScored]  # (choice, its event)
Work = Callable[[], Generator[tuple[int, Event | PromptScored], None, None]]


class Run:
    """``work`` makes the events, in a worker thread. ``interrupt`` asks the engine to stop what it does for it. It runs
    beside others with an equal ``shares``; None: alone."""

    def __init__(
        self, work: Work, interrupt: Callable[[], None], ping_s: float = PING_S, shares: Hashable | None = None
    ) -> None:
        self.shares = shares
        self._make, self._interrupt, self._ping_s = work, interrupt, ping_s
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._woken = False
        self._turn = threading.Lock()  # held while the run begins or ends, so that a cancellation hits no other run
        self._working = False
        self.cancelled = False
        self.ended = False
        self.on_end: Callable[[Run], None] = lambda run: None  # told once, on the loop, when the engine is free of it
        self._timer = self._loop.call_later(ping_s, self._tick)

    # -- the event loop's side --

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[Item]]:
        """What has happened since the last batch; ends when the run has."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._woken = False
            batch = list(self._drain())
            if batch:
                yield batch
            if self.ended and not self._items:
                return

    def _drain(self) -> Generator[Item, None, None]:
        while self._items:
            yield self._items.popleft()

    def begin(self, start: Callable[[Callable[[], None]], Any]) -> None:
        """It is its turn; ``start`` runs a function in the worker thread."""
        self.put(Starting())
        start(self._work)

    def cancel(self) -> None:
        """Nobody wants the rest. The engine stops within a token or a chunk; harmless after the end, or twice."""
        if self.cancelled or self.ended:
            return
        self.cancelled = True
        self._loop.run_in_executor(None, self._stop_working)  # the engine's pipe may be full: nobody else waits for it

    def _stop_working(self) -> None:
        with self._turn:
            if self._working:
                self._interrupt()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._timer.cancel()
            self._wake.set()
            self.on_end(self)

    def _tick(self) -> None:
        self.put(Ping())
        self._timer = self._loop.call_later(self._ping_s, self._tick)

    # -- the worker's side --

    def _work(self) -> None:
        with self._turn:
            self._working = True
        try:
            self._forward()
        except SmoeError as error:
            self._send(Failed(error))
        except Exception as error:  # a fault of ours must not leave the client waiting
            import logging

            logging.getLogger("smoe").exception("a request failed")
            self._send(Failed(EngineError(f"the server failed: {type(error).__name__}", "see its log")))
        finally:
            with self._turn:
                self._working = False
            self._call(self.end)

    def _forward(self) -> None:
        if self.cancelled:
            return
        with contextlib.closing(self._make()) as events:
            for event in events:
                self._send(event)
                if self.cancelled:
                    return  # closing what makes the events ends the generation and waits for the engine

    def _send(self, item: Item) -> None:
        self._items.append(item)
        if isinstance(item, tuple) and isinstance(item[1], _DELTAS):
            return  # what follows wakes the loop, once a token, when this thread has little left to do
        if not self._woken:
            self._woken = True
            self._call(self._wake.set)

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function)
