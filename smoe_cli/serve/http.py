"""uvicorn's HTTP parser with a clock: a connection that does not get its request's head across in time is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0


class Http(H11Protocol):
    """The size of a head is bounded by uvicorn itself (h11_max_incomplete_event_size); the time it takes is not."""

    head_s = HEAD_S

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle = self.loop.call_later(self.head_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._head_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():  # for the next request of this connection
            self._head_timer.cancel()
            wait = max(self.head_s, self.timeout_keep_alive)
            self._head_timer = self.loop.call_later(wait + 1, self._too_slow)

    def _too_slow(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
