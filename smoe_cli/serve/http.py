"""uvicorn's HTTP parser with a clock and a measure: a head that is too slow or too long ends its connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 30.0
HEAD_BYTES = 64 << 10


class Http(HttpToolsProtocol):
    """uvicorn bounds neither the time nor the size of a request's head."""

    head_s = HEAD_S
    head_bytes = HEAD_BYTES

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_size += len(data)
        super().data_received(data)
        if self._in_head and self._head_size > self.head_bytes:
            self._give_up()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._timer.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        busy = self.cycle is not None and not self.cycle.response_complete  # with a request that came in advance
        if not busy and not self.transport.is_closing():
            self._timer.cancel()
            self._expect_head(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _expect_head(self, idle_s: float = 0) -> None:
        self._in_head, self._head_size = True, 0
        self._timer: asyncio.TimerHandle = self.loop.call_later(self.head_s + idle_s, self._give_up)

    def _give_up(self) -> None:
        if self._in_head:
            self.transport.close()
