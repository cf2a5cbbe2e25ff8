"""The state of one reply: ids go in, events come out. Detokeniser, reasoning, tool and stop parsers, filter, clock."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from smoe_cli.chat.events import Delta, Done, Event, Generated, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.parse import ReplyParser
from smoe_cli.chat.stream import Piece, StopStrings
from smoe_cli.chat.template import Prompt
from smoe_cli.chat.tools.base import Call
from smoe_cli.engine import protocol


class Reply:
    """``parser`` and the ``markers`` it looks for belong together. ``cancel`` is called once, when a stop string, the
    filter or the only call that was asked for ends the reply before the engine does."""

    def __init__(
        self,
        model: ChatModel,
        prompt: Prompt,
        parser: ReplyParser,
        markers: tuple[str, ...],
        stop: Sequence[str],
        hooks: Hooks,
        cancel: Callable[[], None],
    ) -> None:
        self._filter = hooks.output_filter() if hooks.output_filter else None
        self._detokenizer = model.detokenizer(markers)
        self._parser = parser
        self._prompt = prompt
        self._single_call = hooks.single_call
        self._stops = StopStrings(stop)
        self._cancel = cancel
        self._spans = TokenSpans()
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._tokens = self._reasoning_tokens = 0
        self._calls = 0

    @property
    def _over(self) -> bool:
        refused = self._filter is not None and self._filter.refused
        return refused or self._stops.matched is not None or (self._single_call and self._calls > 0)

    def token(self, token: protocol.Token) -> Iterator[Event]:
        if self._over:
            return  # on its way before the engine heard CANCEL
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens += 1
        self._reasoning_tokens += self._parser.reasoning
        made = Generated(token.id, self._tokens, token.logprob, token.top)
        if token.logprob is not None and not self._parser.reasoning:
            self._spans.begin(made)
        if text := self._detokenizer.feed(token.id):
            yield from self._out(self._pieces(self._parser.feed(text)))
        yield made
        if self._over:
            self._cancel()

    def done(self, done: protocol.Done, prompt_tokens: int) -> Iterator[Event]:
        """``prompt_tokens`` where the engine did not say it."""
        if not self._over:
            yield from self._out(self._rest())
        if self._filter is not None and not self._filter.refused:
            yield from self._filter.end()
        yield Done(self._finish(done.finish), self._stops.matched, self._stats(done.counters, prompt_tokens))

    def _finish(self, finish: str) -> str:
        if self._filter is not None and self._filter.refused:
            return "refusal"
        if self._stops.matched is not None:
            return "stop"
        ended = self._single_call or finish not in ("cancel", "length")
        return "tool_calls" if self._calls and ended else finish or "stop"

    def _out(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if self._filter is None:
                yield delta
            elif not self._filter.refused:
                yield from self._filter.feed(delta)

    def _rest(self) -> Iterator[Delta]:
        """What the stages still hold at the end of the reply, in their order."""
        if text := self._detokenizer.end():
            yield from self._pieces(self._parser.feed(text))
        yield from self._pieces(self._parser.end())
        if self._stops.matched is None:
            tail, tokens = self._stops.end(), self._spans.rest()
            if tail or tokens:
                yield TextDelta(tail, tokens)

    def _pieces(self, pieces: Iterable[Piece | Call]) -> Iterator[Delta]:
        for piece in pieces:
            if self._single_call and self._calls:
                return
            if isinstance(piece, Call):
                if self._stops.matched is None:
                    yield from self._call(piece)
            elif piece.reasoning:
                yield ReasoningDelta(piece.text)
            else:
                yield from self._text(piece.text)

    def _call(self, call: Call) -> Iterator[Delta]:
        """A stop string that the text before it began can no longer complete: that text comes first."""
        if held := self._stops.end():
            yield TextDelta(held, self._spans.shown(held))
        yield ToolCallDelta(self._calls, call.id or self._call_id(), call.name, call.arguments)
        self._calls += 1

    def _call_id(self) -> str:
        """One that no other call of the conversation has, and the same for the same conversation."""
        ids = hashlib.sha256(f"{self._calls} {self._prompt.ids}".encode()).hexdigest()
        return f"call_{ids[:24]}"

    def _text(self, text: str) -> Iterator[TextDelta]:
        self._spans.fed(text)
        if shown := self._stops.feed(text):
            yield TextDelta(shown, self._spans.shown(shown))

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


class TokenSpans:
    """Which tokens begin in which piece of the text, though some finish no text and a stop holds some back."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Generated]] = []  # (characters of text before it, token)
        self._fed = self._shown = 0

    def begin(self, token: Generated) -> None:
        self._waiting.append((self._fed, token))

    def fed(self, text: str) -> None:
        self._fed += len(text)

    def shown(self, text: str) -> tuple[Generated, ...]:
        """The tokens that begin before the end of this piece, each once."""
        self._shown += len(text)
        out = tuple(token for at, token in self._waiting if at < self._shown)
        self._waiting = self._waiting[len(out) :]
        return out

    def rest(self) -> tuple[Generated, ...]:
        out, self._waiting = tuple(token for _, token in self._waiting), []
        return out


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
