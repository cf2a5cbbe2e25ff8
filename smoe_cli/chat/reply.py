"""The state of one reply: ids go in, events come out. Detokeniser, reasoning, tool and stop parsers, filter, clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from smoe_cli.chat.events import Delta, Done, Event, Generated, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.stream import Piece, ReasoningParser, StopStrings
from smoe_cli.engine import protocol


class Reply:
    """``tags``: what encloses reasoning; ``reasoning``: the prompt has opened it already. ``cancel`` is called once,
    when a stop string or the filter ends the reply before the engine does."""

    def __init__(
        self,
        model: ChatModel,
        tags: tuple[str, str] | None,
        reasoning: bool,
        stop: Sequence[str],
        hooks: Hooks,
        cancel: Callable[[], None],
    ) -> None:
        self._tools = hooks.tool_parser() if hooks.tool_parser else None
        self._filter = hooks.output_filter() if hooks.output_filter else None
        keep = (*(tags or ()), *(self._tools.markers if self._tools else ()))
        self._detokenizer = model.detokenizer(keep)
        self._parser = ReasoningParser(tags, reasoning)
        self._stops = StopStrings(stop)
        self._cancel = cancel
        self._spans = TokenSpans()
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._tokens = self._reasoning_tokens = 0
        self._called = False

    @property
    def _over(self) -> bool:
        return self._stops.matched is not None or (self._filter is not None and self._filter.refused)

    def token(self, token: protocol.Token) -> Iterator[Event]:
        if self._over:
            return  # on its way before the engine heard CANCEL
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens += 1
        self._reasoning_tokens += self._parser.reasoning
        made = Generated(token.id, self._tokens, token.logprob, token.top)
        yield made
        if token.logprob is not None and not self._parser.reasoning:
            self._spans.begin(made)
        if text := self._detokenizer.feed(token.id):
            yield from self._out(self._pieces(self._parser.feed(text)))
        if self._over:
            self._cancel()

    def done(self, done: protocol.Done, prompt_tokens: int) -> Iterator[Event]:
        """``prompt_tokens`` where the engine did not say it."""
        if not self._over:
            yield from self._out(self._rest())
            if self._filter is not None:
                yield from self._filter.end()
        yield Done(self._finish(done.finish), self._stops.matched, self._stats(done.counters, prompt_tokens))

    def _finish(self, finish: str) -> str:
        if self._filter is not None and self._filter.refused:
            return "refusal"
        if self._stops.matched is not None:
            return "stop"
        return "tool_calls" if self._called and finish != "cancel" and finish != "length" else finish or "stop"

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
        if self._tools is not None:
            yield from self._called_or_text(self._tools.end())
        if self._stops.matched is None:
            tail, tokens = self._stops.end(), self._spans.rest()
            if tail or tokens:
                yield TextDelta(tail, tokens)

    def _pieces(self, pieces: Iterable[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if piece.reasoning:
                yield ReasoningDelta(piece.text)
            elif self._tools is None:
                yield from self._text(piece.text)
            else:
                yield from self._called_or_text(self._tools.feed(piece.text))

    def _called_or_text(self, deltas: Iterable[TextDelta | ToolCallDelta]) -> Iterator[Delta]:
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._called = True
                yield delta
            else:
                yield from self._text(delta.text)

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
