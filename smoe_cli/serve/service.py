"""What every API stands on: jobs are queued, and run on the engine, as many together as it keeps conversations."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Generator
from dataclasses import replace

from smoe_cli.chat.events import Done, Event, Generated, PromptSize, Restarted, Stats, TextDelta
from smoe_cli.chat.session import turn
from smoe_cli.chat.template import Prompt
from smoe_cli.engine.manager import Lane
from smoe_cli.engine.protocol import Scored
from smoe_cli.errors import EngineError
from smoe_cli.serve.admission import Queue
from smoe_cli.serve.fleet import Fleet, Loaded
from smoe_cli.serve.guard import Verdict
from smoe_cli.serve.memory import Memory
from smoe_cli.serve.metrics import Metrics
from smoe_cli.serve.prepare import Defaults, House, Job, Part, Preparer
from smoe_cli.serve.run import PING_S, Failed, PromptScored, Run
from smoe_cli.serve.sessions import Sessions

log = logging.getLogger("smoe")


class Service:
    """Belongs to the event loop, but for what the worker threads do."""

    def __init__(
        self,
        fleet: Fleet,
        defaults: Defaults,
        queue_limit: int,
        sessions: int = 1,
        ping_s: float = PING_S,
        admin_token: str | None = None,
        house: House = House(),
        memory: Memory | None = None,
    ) -> None:
        self.fleet = fleet
        self.prepare = Preparer(fleet, defaults, house)
        self._memory = memory
        self._warming: Run | None = None
        self.queue = Queue(queue_limit, sessions)
        self.sessions = Sessions(sessions)
        self.metrics = Metrics()
        self.ping_s = ping_s
        self.admin_token = admin_token
        self._engine_pid: int | None = None
        self._pid_lock = threading.Lock()
        self._numbers = itertools.count(1)

    # -- the run --

    def submit(self, job: Job) -> Run:
        """Queue it. Raises QueueFull, and EngineError when the server is stopping."""
        lane = self._lane()
        run = Run(lambda: self._work(job, lane), lane.cancel, self.ping_s, job.loaded.model.vault)
        self._stop_warming()
        try:
            self.queue.enter(run)
        except EngineError:
            self.metrics.refused += 1
            raise
        self.fleet.target = job.loaded
        return run

    def _lane(self) -> Lane:
        """Without a tag where requests run one by one anyway."""
        return Lane(self.fleet.engine, f"r{next(self._numbers)}" if self.queue.parallel > 1 else "")

    def abandon(self, run: Run) -> None:
        if not run.ended:
            self.metrics.abandoned += not run.cancelled
            self.queue.abandon(run)

    def warm(self) -> None:
        """Compute again what was held before the server was started, as long as nobody asks for anything."""
        if self._memory is not None and self._warming is None:
            self._warming = Run(self._recompute, self.fleet.engine.cancel, self.ping_s)
            self.queue.enter(self._warming)

    def _stop_warming(self) -> None:
        if self._memory is not None and self._warming is not None:
            self._memory.stop()
            self.queue.abandon(self._warming)

    async def switch(self, loaded: Loaded) -> None:
        """Load this model when what waits has been answered. Raises what keeps it from starting."""
        run = Run(lambda: self._switch(loaded), self.fleet.engine.cancel, self.ping_s)
        self.queue.enter(run)
        self.fleet.target = loaded
        async for batch in run.batches():
            for item in batch:
                if isinstance(item, Failed):
                    raise item.error

    def _switch(self, loaded: Loaded) -> Generator[tuple[int, Event | PromptScored], None, None]:
        self._activate(loaded)
        yield from ()

    def _activate(self, loaded: Loaded) -> None:
        try:
            self.fleet.activate(loaded)
        except BaseException:
            self.fleet.target = self.fleet.active
            raise

    def stopped(self) -> EngineError:
        """Why a run that its client has not ended was ended."""
        return EngineError("the server is stopping", "try again later")

    async def close(self) -> None:
        """End what runs and waits, each with an error that says why; then the engine."""
        await self.stop_runs()
        await asyncio.to_thread(self.fleet.engine.stop)
        if self._memory is not None:
            self._memory.close()

    async def stop_runs(self) -> None:
        for run in self.queue.close(self.stopped().text):
            self.queue.abandon(run)

    # -- the worker threads --

    def _work(self, job: Job, lane: Lane) -> Generator[tuple[int, Event | PromptScored], None, None]:
        self._activate(job.loaded)
        try:
            yield from self._parts(job, lane)
        finally:
            for line in self.fleet.engine.take_notices():
                log.info("%s", line)

    def _parts(self, job: Job, lane: Lane) -> Generator[tuple[int, Event | PromptScored], None, None]:
        for index, part in enumerate(job.parts):
            self._look_at_engine()
            if part.echo and part.options.logprobs is not None:
                yield index, self._score(part, lane)
            if part.verdict is not None:
                yield from _said(index, part.prompt, part.verdict)
            elif part.options.max_tokens:
                yield from self._generate(job, index, part, lane)
            else:
                yield from _nothing(index, part)

    def _look_at_engine(self) -> None:
        """Another process holds no conversation yet."""
        with self._pid_lock:
            if self.fleet.engine.pid != self._engine_pid:
                self._engine_pid = self.fleet.engine.pid
                self.sessions.clear()

    def _generate(self, job: Job, index: int, part: Part, lane: Lane) -> Generator[tuple[int, Event], None, None]:
        with self.sessions.take(part.prompt.ids, part.echo) as session:
            options = replace(part.options, session=session.name)
            try:
                for event in turn(lane, job.loaded.model, [], options, part.prompt):
                    if isinstance(event, Generated):
                        session.ids.append(event.id)
                    elif isinstance(event, Restarted):
                        self._restarted(event)
                    else:
                        self.metrics.see(event)
                    yield index, event
            finally:
                if self._memory is not None:
                    self._memory.keep(session, job.loaded.model)

    def _recompute(self) -> Generator[tuple[int, Event | PromptScored], None, None]:
        assert self._memory is not None
        self._engine_pid = self.fleet.engine.pid
        for session in self._memory.recompute(self.fleet.engine, self.sessions, self.fleet.active.model):
            log.info("a conversation of %d tokens is there again", len(session.ids))
        yield from ()

    def _restarted(self, event: Restarted) -> None:
        log.warning("%s; started again, the request is retried", event.reason)
        self.metrics.restarts += 1
        self._engine_pid = None

    def _score(self, part: Part, lane: Lane) -> PromptScored:
        ids = part.prompt.ids
        self.sessions.default.ids = list(ids)
        scores = [m for m in lane.score(ids, part.options.logprobs or 0) if isinstance(m, Scored)]
        return PromptScored(tuple(s.logprob for s in scores), tuple(s.top for s in scores))


def _said(index: int, prompt: Prompt, verdict: Verdict) -> Generator[tuple[int, Event], None, None]:
    """What the guard says in the model's place."""
    size = len(prompt.ids)
    yield index, PromptSize(size, 0, slides=False)
    if verdict.reply:
        yield index, TextDelta(verdict.reply)
    yield index, Done("refusal" if verdict.ended else "stop", None, Stats(prompt_tokens=size))


def _nothing(index: int, part: Part) -> Generator[tuple[int, Event], None, None]:
    """A completion of no tokens."""
    size = len(part.prompt.ids)
    yield index, PromptSize(size, 0, slides=False)
    yield index, Done("length", None, Stats(prompt_tokens=size))
