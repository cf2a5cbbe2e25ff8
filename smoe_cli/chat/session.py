"""One turn of a conversation, the same for the terminal and for every API: messages in, events out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.stream import ReasoningParser, StopStrings
from smoe_cli.chat.template import Message, Prompt
from smoe_cli.engine import protocol
from smoe_cli.engine.manager import Restarted as Restarted
from smoe_cli.engine.protocol import Generate, Sampling
from smoe_cli.errors import EngineRefused, UsageError


@dataclass(frozen=True)
class PromptSize:
    """The prompt is accepted. ``slides``: it is longer than the window, so its oldest tokens fall out. ``miss`` says
    why not all of the conversation before was found in the cache, where somebody knows."""

    prompt_tokens: int
    cached_tokens: int
    slides: bool
    miss: str = ""


@dataclass(frozen=True)
class PrefillProgress:
    done: int
    total: int


@dataclass(frozen=True)
class Generated:
    """One more token is there, whether or not it finishes any text; ``tokens`` counts them."""

    id: int
    tokens: int


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class Stats:
    """What a turn took. Speeds in tokens per second, None where there is nothing to divide."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    hit_rate: float | None = None
    disk_bytes_s: float | None = None


@dataclass(frozen=True)
class Done:
    """``finish_reason`` is stop, length or cancel; ``stop`` is the stop string that was met, if one was."""

    finish_reason: str
    stop: str | None
    stats: Stats


Event = PromptSize | PrefillProgress | Generated | ReasoningDelta | TextDelta | Restarted | Done


class Engine(Protocol):
    """What a turn needs of the engine manager."""

    def generate(self, request: Generate) -> Iterator[protocol.Message | Restarted]: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True)
class TurnOptions:
    """``max_tokens`` None: what is left of the window. ``thinking`` None: as the template has it."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    thinking: bool | None = None
    window: int = 4096
    raw: bool = False
    session: str = ""


def render(model: ChatModel, messages: Sequence[Message], options: TurnOptions) -> Prompt:
    """The conversation's ids. UsageError when the system message and the last one alone are longer than the window."""
    if options.raw:
        text = "".join(str(message["content"]) for message in messages)
        return Prompt(model.tokenizer.encode_document(text), text, False)
    prompt = model.template.render(messages, enable_thinking=options.thinking)
    if len(prompt.ids) > options.window:
        least = [message for message in messages[:-1] if message["role"] == "system"][:1] + list(messages[-1:])
        size = len(model.template.render(least, enable_thinking=options.thinking).ids)
        if size > options.window:
            raise UsageError(
                f"the last message takes {size} tokens with the system message, and the window is {options.window}",
                "shorten it, or start with a larger --ctx",
            )
    return prompt


def turn(
    engine: Engine, model: ChatModel, messages: Sequence[Message], options: TurnOptions, prompt: Prompt | None = None
) -> Iterator[Event]:
    """Run one turn. The texts of the deltas joined are the reply; exactly one ``Done`` comes last, unless it raises."""
    prompt = prompt or render(model, messages, options)
    left = max(options.window - len(prompt.ids), options.window // 4)
    tags = None if options.raw else model.template.reasoning_tags
    request = Generate(
        ids=prompt.ids,
        max_tokens=options.max_tokens or left,
        sampling=options.sampling,
        stop_ids=[] if options.raw else model.template.turn_end_ids,
        session=options.session,
    )
    reply = _Reply(engine, model, tags, prompt.reasoning, options.stop)
    try:
        for message in engine.generate(request):
            if isinstance(message, protocol.Began):
                slides = message.prompt_tokens > options.window
                yield PromptSize(message.prompt_tokens, message.cached_tokens, slides)
            elif isinstance(message, protocol.Prefilled):
                yield PrefillProgress(message.done, message.total)
            elif isinstance(message, protocol.Token):
                yield from reply.token(message)
            elif isinstance(message, protocol.Done):
                yield from reply.done(message, len(prompt.ids))
            elif isinstance(message, Restarted):
                yield message
    except EngineRefused as refusal:
        raise _in_words(refusal, options) from refusal


class _Reply:
    """The state of a reply: detokeniser, parsers, clock."""

    def __init__(
        self, engine: Engine, model: ChatModel, tags: tuple[str, str] | None, reasoning: bool, stop: Sequence[str]
    ) -> None:
        self._engine = engine
        self._detokenizer = model.detokenizer(tags or ())
        self._parser = ReasoningParser(tags, reasoning)
        self._stops = StopStrings(stop)
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._tokens = self._reasoning_tokens = 0

    def token(self, token: protocol.Token) -> Iterator[Event]:
        if self._stops.matched is not None:
            return  # on its way before the engine heard CANCEL
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens += 1
        self._reasoning_tokens += self._parser.reasoning
        yield Generated(token.id, self._tokens)
        yield from self._text(self._detokenizer.feed(token.id))
        if self._stops.matched is not None:
            self._engine.cancel()

    def done(self, done: protocol.Done, prompt_tokens: int) -> Iterator[Event]:
        if self._stops.matched is None:
            yield from self._text(self._detokenizer.end())
            yield from self._deltas(self._parser.end())
            if tail := self._stops.end():
                yield TextDelta(tail)
        finish = "stop" if self._stops.matched is not None else done.finish or "stop"
        yield Done(finish, self._stops.matched, self._stats(done.counters, prompt_tokens))

    def _text(self, text: str) -> Iterator[Event]:
        return self._deltas(self._parser.feed(text)) if text else iter(())

    def _deltas(self, pieces: Any) -> Iterator[Event]:
        for piece in pieces:
            if piece.reasoning:
                yield ReasoningDelta(piece.text)
            elif shown := self._stops.feed(piece.text):
                yield TextDelta(shown)

    def _stats(self, counters: dict[str, float], prompt_tokens: int) -> Stats:
        cached = int(counters.get("cached", 0))
        experts = counters.get("hits", 0) + counters.get("misses", 0)
        prefill_ms = counters.get("prefill_ms", 0)
        decode_s = self._last - self._first if self._first else 0.0
        return Stats(
            prompt_tokens=int(counters.get("prompt", prompt_tokens)),
            cached_tokens=cached,
            completion_tokens=self._tokens,
            reasoning_tokens=self._reasoning_tokens,
            ttft_ms=(self._first - self._began) * 1000 if self._first else None,
            prefill_tok_s=_rate(prompt_tokens - cached, prefill_ms / 1000),
            decode_tok_s=_rate(self._tokens - 1, decode_s),
            hit_rate=counters.get("hits", 0) / experts if experts else None,
            disk_bytes_s=_rate(counters.get("bytes", 0), (prefill_ms + counters.get("decode_ms", 0)) / 1000),
        )


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _in_words(refusal: EngineRefused, options: TurnOptions) -> EngineRefused:
    """An <<ERR name>> as a sentence."""
    prompt, window = refusal.fields.get("prompt", "?"), refusal.fields.get("ctx", str(options.window))
    texts = {
        "ctx_overflow": (f"the prompt is {prompt} tokens and the window {window}", "use a larger --ctx, or /reset"),
        "io_error": ("a read from the vault failed", "check the disk; smoe verify reads every byte"),
        "non_finite": ("the model computed numbers that are not finite", "smoe verify checks the vault"),
        "no_memory": ("the engine could not get the memory for this request", "use a smaller --ctx or --budget"),
    }
    text, hint = texts.get(refusal.name, (refusal.text, refusal.hint))
    return EngineRefused(refusal.name, refusal.fields, text, hint)
