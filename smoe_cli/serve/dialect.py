"""What a protocol has to say for itself: how it writes a reply, streamed or whole, and how it words an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from smoe_cli.chat.events import Done, Event, Generated, PromptSize, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.errors import SmoeError
from smoe_cli.serve.run import PromptScored, Queued


class Writer(Protocol):
    """One streamed reply, in one protocol's bytes. An empty answer means that nothing is to be said."""

    def begin(self) -> bytes:
        """Sent with the headers."""
        ...

    def queued(self, queued: Queued) -> bytes:
        """Said again when a place is won; none ahead: it is this request's turn."""
        ...

    def event(self, choice: int, event: Event | PromptScored) -> bytes: ...

    def ping(self) -> bytes:
        """A sign of life that changes nothing."""
        ...

    def fail(self, error: SmoeError) -> bytes:
        """The stream ends here, properly, but with this."""
        ...

    def end(self) -> bytes:
        """All choices are done."""
        ...


class Envelope(Protocol):
    """How a protocol says that something went wrong."""

    def status(self, error: SmoeError) -> int: ...

    def body(self, status: int, error: SmoeError) -> dict[str, Any]: ...


@dataclass
class Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    """One whole reply, put together from its events."""

    calls: list[Call] = field(default_factory=list)
    tokens: list[Generated] = field(default_factory=list)
    size: PromptSize | None = None
    scored: PromptScored | None = None
    done: Done | None = None

    _parts: list[list[str] | Call] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def parts(self) -> list[str | Call]:
        """Texts and calls in their order."""
        return ["".join(part) if isinstance(part, list) else part for part in self._parts]

    @property
    def finish(self) -> str:
        return self.done.finish_reason if self.done else "cancel"

    @property
    def stats(self) -> Stats:
        return self.done.stats if self.done else Stats()

    def see(self, event: Event | PromptScored) -> None:
        if isinstance(event, TextDelta):
            self._say(event.text)
            self.tokens += event.tokens
        elif isinstance(event, ReasoningDelta):
            self._thoughts.append(event.text)
        elif isinstance(event, ToolCallDelta):
            self._call(event)
        elif isinstance(event, PromptSize):
            self.size = event
        elif isinstance(event, PromptScored):
            self.scored = event
        elif isinstance(event, Done):
            self.done = event

    def _say(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, list):
            last.append(text)
        elif text:
            self._parts.append([text])

    def _call(self, delta: ToolCallDelta) -> None:
        while len(self.calls) <= delta.index:
            self.calls.append(Call())
            self._parts.append(self.calls[-1])
        call = self.calls[delta.index]
        call.id += delta.id
        call.name += delta.name
        call.arguments += delta.arguments


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole request: the prompt once, however many choices there are."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


def usage_of(stats: Iterable[Stats], prompts: int = 1) -> Usage:
    """``prompts``: how many different prompts the choices belong to, in order, the same number of choices to each."""
    found = list(stats)
    per_prompt = max(len(found) // prompts, 1)
    first = found[::per_prompt]
    return Usage(
        prompt=sum(s.prompt_tokens for s in first),
        cached=sum(s.cached_tokens for s in first),
        completion=sum(s.completion_tokens for s in found),
        reasoning=sum(s.reasoning_tokens for s in found),
    )
