"""What every API stands on: requests checked and rendered, then queued, then run on the engine, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from random import SystemRandom

from smoe_cli.chat.events import Done, Event, Generated, PromptSize, Restarted
from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.session import TurnOptions, render, too_long, turn
from smoe_cli.chat.template import Prompt
from smoe_cli.chat.token_text import TokenText
from smoe_cli.engine.manager import resolve_sampling
from smoe_cli.engine.protocol import Sampling, Scored
from smoe_cli.errors import EngineError, UnsupportedError, UsageError
from smoe_cli.serve import noise
from smoe_cli.serve.admission import Queue
from smoe_cli.serve.fleet import Fleet, Loaded
from smoe_cli.serve.metrics import Metrics
from smoe_cli.serve.pipeline import Limits, TextRequest, TurnRequest
from smoe_cli.serve.run import PING_S, Failed, PromptScored, Run
from smoe_cli.serve.sessions import Sessions

log = logging.getLogger("smoe")

MAX_CHOICES = 16
MAX_STOPS = 64


@dataclass(frozen=True)
class Defaults:
    """What the server's flags say of requests that do not."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    slide: bool = True


@dataclass(frozen=True)
class Part:
    """One generation: a choice of the reply, or the reply to one of several prompts."""

    prompt: Prompt
    options: TurnOptions
    echo: bool = False


@dataclass(frozen=True)
class Job:
    """A request that has been found good. ``seed`` is what its first choice is drawn with."""

    loaded: Loaded
    parts: tuple[Part, ...]
    seed: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.parts[0].prompt.ids)

    @property
    def window(self) -> int:
        return self.loaded.window

    @property
    def token_text(self) -> TokenText:
        return self.loaded.token_text

    @property
    def fingerprint(self) -> str:
        return self.loaded.fingerprint

    @property
    def slides(self) -> bool:
        return any(len(part.prompt.ids) > self.window for part in self.parts)


class Service:
    """``prepare`` and ``prepare_texts`` may run in any thread; everything else belongs to the event loop, but for what
    the worker thread does."""

    def __init__(
        self,
        fleet: Fleet,
        defaults: Defaults,
        queue_limit: int,
        sessions: int = 1,
        ping_s: float = PING_S,
        admin_token: str | None = None,
    ) -> None:
        self.fleet = fleet
        self.defaults = defaults
        self.queue = Queue(queue_limit)
        self.sessions = Sessions(sessions)
        self.metrics = Metrics()
        self.ping_s = ping_s
        self.admin_token = admin_token
        self._runs: set[Run] = set()
        self._engine_pid: int | None = None

    # -- before the headers --

    def prepare(self, request: TurnRequest) -> Job:
        """Everything that can be wrong with a conversation is found here: UsageError, UnsupportedError."""
        loaded = self.fleet.open(request.limits.model)
        options = self._options(request.limits, loaded)
        messages = noise.quiet(request.messages)
        options = replace(options, thinking=request.thinking, switches=request.switches, hooks=Hooks())
        if request.tools or request.response_format.kind != "text":
            raise UnsupportedError("tools and response_format are not there yet", param="tools")
        prompt = render(loaded.model, messages, options)
        return self._job(loaded, [prompt], request.limits, options)

    def count(self, request: TurnRequest) -> int:
        """Tokens of the prompt, which may be longer than the window."""
        return self.prepare(request).prompt_tokens

    def prepare_texts(self, requests: list[TextRequest]) -> Job:
        """Several bare prompts that share their limits."""
        limits = requests[0].limits
        loaded = self.fleet.open(limits.model)
        options = replace(self._options(limits, loaded), raw=True)
        prompts = [self._text_prompt(request, loaded, options) for request in requests]
        return self._job(loaded, prompts, limits, options, requests[0].echo)

    def _text_prompt(self, request: TextRequest, loaded: Loaded, options: TurnOptions) -> Prompt:
        tokenizer = loaded.model.tokenizer
        if isinstance(request.prompt, str):
            ids = tokenizer.encode_document(request.prompt)
        else:
            ids = request.prompt
            vocab = tokenizer.backend.get_vocab_size()
            if any(token >= vocab or token < 0 for token in ids):
                raise UsageError(f"the prompt holds an id outside the vocabulary of {vocab}", param="prompt")
        if not ids:
            raise UsageError("the prompt is empty", "send at least one token", param="prompt")
        if len(ids) > options.window and (request.echo or not options.slide):
            raise too_long(f"the prompt takes {len(ids)} tokens", options.window)
        return Prompt(ids, "", False)

    def _options(self, limits: Limits, loaded: Loaded) -> TurnOptions:
        _check(limits)
        sampling = resolve_sampling(limits.sampling, self.defaults.sampling, loaded.model.generation)
        if limits.sampling.seed is None and self.defaults.sampling.seed is None:
            sampling = replace(sampling, seed=SystemRandom().getrandbits(53))  # a JSON number everywhere
        asked = self.defaults.max_tokens if limits.max_tokens is None else limits.max_tokens
        return TurnOptions(
            sampling=sampling,
            max_tokens=min(asked, loaded.window),
            stop=limits.stop,
            window=loaded.window,
            slide=self.defaults.slide,
            bias=limits.bias,
            logprobs=limits.logprobs,
        )

    def _job(
        self, loaded: Loaded, prompts: list[Prompt], limits: Limits, options: TurnOptions, echo: bool = False
    ) -> Job:
        seed = options.sampling.seed or 0
        parts = []
        for prompt in prompts:
            room = options.max_tokens or 0
            if not options.slide:
                room = min(room, options.window - len(prompt.ids) + 1)
            for choice in range(limits.n):
                sampling = replace(options.sampling, seed=(seed + choice) % 2**64)
                parts.append(Part(prompt, replace(options, sampling=sampling, max_tokens=room), echo))
        return Job(loaded, tuple(parts), seed)

    # -- the run --

    def submit(self, job: Job) -> Run:
        """Queue it. Raises QueueFull, and EngineError when the server is stopping."""
        run = Run(lambda: self._work(job), self.fleet.engine.cancel, self.ping_s)
        self._runs.add(run)
        try:
            self.queue.enter(run)
        except EngineError:
            self._runs.discard(run)
            self.metrics.refused += 1
            raise
        self.fleet.target = job.loaded
        ended = run.on_end

        def on_end(run: Run) -> None:
            self._runs.discard(run)
            ended(run)

        run.on_end = on_end
        return run

    def abandon(self, run: Run) -> None:
        if not run.ended:
            self.metrics.abandoned += not run.cancelled
            self.queue.abandon(run)

    def capabilities(self, loaded: Loaded) -> list[str]:
        """In Ollama's words."""
        return ["completion"]

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

    async def stop_runs(self) -> None:
        for run in self.queue.close(self.stopped().text):
            self.queue.abandon(run)

    # -- the worker thread --

    def _work(self, job: Job) -> Generator[tuple[int, Event | PromptScored], None, None]:
        self._activate(job.loaded)
        engine = self.fleet.engine
        for index, part in enumerate(job.parts):
            if engine.pid != self._engine_pid:
                self._engine_pid = engine.pid
                self.sessions.clear()
            if part.echo and part.options.logprobs is not None:
                yield index, self._score(part)
            if part.options.max_tokens:
                yield from self._generate(job, index, part)
            else:
                yield from _nothing(index, part)

    def _generate(self, job: Job, index: int, part: Part) -> Generator[tuple[int, Event], None, None]:
        ids = part.prompt.ids
        session = self.sessions.default if part.echo else self.sessions.choose(ids)
        session.ids = list(ids)
        options = replace(part.options, session=session.name)
        for event in turn(self.fleet.engine, job.loaded.model, [], options, part.prompt):
            if isinstance(event, Generated):
                session.ids.append(event.id)
            elif isinstance(event, Restarted):
                self._restarted(event)
            else:
                self.metrics.see(event)
            yield index, event

    def _restarted(self, event: Restarted) -> None:
        log.warning("%s; started again, the request is retried", event.reason)
        self.metrics.restarts += 1
        self._engine_pid = None

    def _score(self, part: Part) -> PromptScored:
        ids = part.prompt.ids
        self.sessions.default.ids = list(ids)
        scores = [m for m in self.fleet.engine.score(ids, part.options.logprobs or 0) if isinstance(m, Scored)]
        return PromptScored(tuple(s.logprob for s in scores), tuple(s.top for s in scores))


def _nothing(index: int, part: Part) -> Generator[tuple[int, Event], None, None]:
    """A completion of no tokens."""
    from smoe_cli.chat.events import Stats

    size = len(part.prompt.ids)
    yield index, PromptSize(size, 0, slides=False)
    yield index, Done("length", None, Stats(prompt_tokens=size))


def _check(limits: Limits) -> None:
    if not 1 <= limits.n <= MAX_CHOICES:
        raise UsageError(f"n is {limits.n}: 1 to {MAX_CHOICES}", param="n")
    if len(limits.stop) > MAX_STOPS:
        raise UsageError(f"{len(limits.stop)} stop strings: at most {MAX_STOPS}", param="stop")
