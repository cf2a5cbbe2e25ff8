"""A run as an HTTP response, streamed or whole; a client that leaves ends the run, in either form."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from smoe_cli.errors import EngineError, SmoeError, UsageError
from smoe_cli.serve.admission import QueueFull
from smoe_cli.serve.dialect import Choice, Envelope, Writer
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import Failed, Ping, Queued, Run, Starting
from smoe_cli.serve.service import Service

T = TypeVar("T")
BRIEF_BYTES = 2048  # of a request: what is made of it takes less than a millisecond
NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def failure(error: SmoeError, envelope: Envelope, headers: dict[str, str] | None = None) -> Response:
    """An error as that protocol words it."""
    status = envelope.status(error)
    headers = dict(headers or {})
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(error.retry_after_s)
    content = json.dumps(envelope.body(status, error)).encode()
    return Response(content, status, headers, "application/json")


async def admit(service: Service, http: Request, label: str, prepare: Callable[[], Job]) -> Job:
    """What can be refused is refused here, before any header is sent: 429 first, which costs nothing, then 400.
    ``label`` is the request's model field."""
    service.queue.check()
    size = http.headers.get("content-length", "")
    brief = size.isdecimal() and int(size) <= BRIEF_BYTES and service.prepare.at_once(label)
    job = await checked(prepare, brief)
    while job.loaded is not service.fleet.target and service.fleet.find(job.label) is None:
        job = await checked(prepare)  # a label that names no model means what is loaded, which another has just changed
    return job


async def checked(work: Callable[[], T], brief: bool = False) -> T:
    """Run it in a thread, since rendering a long conversation would hold up everybody's tokens; what is brief takes
    less time here than on its way to a thread and back."""
    try:
        return work() if brief else await asyncio.to_thread(work)
    except UnicodeEncodeError:
        raise UsageError("the request holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise UsageError("the request is nested too deeply") from None


class RunResponse(Response, ABC):
    """Base: runs a job and watches for the client's leaving meanwhile."""

    background = None

    def __init__(self, service: Service, job: Job, run: Run, envelope: Envelope, headers: dict[str, str]) -> None:
        self._service, self._job, self._run, self._envelope = service, job, run, envelope
        if job.slides:
            window, size = job.window, job.prompt_tokens
            headers = {**headers, "x-smoe-window": f"slides; prompt={size}; window={window}"}
        self._extra = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self.reply(scope, receive, send)
        finally:
            watcher.cancel()
            self._service.abandon(self._run)
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.abandon(self._run)

    @abstractmethod
    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Headers and body, to the end."""


class StreamResponse(RunResponse):
    """Headers at once, then whatever the writer makes of the events."""

    def __init__(
        self,
        service: Service,
        job: Job,
        run: Run,
        envelope: Envelope,
        headers: dict[str, str],
        writer: Writer,
        media: str,
    ) -> None:
        super().__init__(service, job, run, envelope, {**headers, **NO_BUFFERING, "content-type": media})
        self._writer, self._failed = writer, False

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in self._extra.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": self._writer.begin(), "more_body": True})
        async for batch in self._run.batches():
            if data := b"".join(map(self._bytes, batch)):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if self._failed:
            last = b""
        elif self._run.cancelled:  # by the server: a client that left hears none of this
            last = self._writer.fail(self._service.stopped())
        else:
            last = self._writer.end()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _bytes(self, item: Any) -> bytes:
        if isinstance(item, tuple):
            return self._writer.event(*item)
        if isinstance(item, Ping):
            return self._writer.ping()
        if isinstance(item, Queued):
            return self._writer.queued(item)
        if isinstance(item, Starting):
            return self._writer.queued(Queued(0))
        self._failed = True
        return self._writer.fail(item.error)


class WholeResponse(RunResponse):
    """The reply in one piece, when it is all there."""

    def __init__(
        self,
        service: Service,
        job: Job,
        run: Run,
        envelope: Envelope,
        headers: dict[str, str],
        body: Callable[[Sequence[Choice]], dict[str, Any]],
    ) -> None:
        super().__init__(service, job, run, envelope, headers)
        self._body = body

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Choice() for _ in self._job.parts]
        error: SmoeError | None = None
        async for batch in self._run.batches():
            for item in batch:
                if isinstance(item, tuple):
                    choices[item[0]].see(item[1])
                elif isinstance(item, Failed):
                    error = item.error
        if error is None and self._run.cancelled:
            error = self._service.stopped()
        if error is None and any(choice.done is None for choice in choices):
            error = EngineError("the engine ended without an answer", "try again")
        if error is not None:
            response = failure(error, self._envelope, self._extra)
        else:
            content = json.dumps(self._body(choices), ensure_ascii=False).encode()
            response = Response(content, 200, self._extra, "application/json")
        await response(scope, receive, send)
