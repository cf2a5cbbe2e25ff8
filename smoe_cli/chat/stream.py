"""What a reply's text is cut into as it streams: reasoning, then text, ended by stop strings.

The parsers are pure and indifferent to how the text is split: feeding it in any pieces gives the same joined result.

A control token of the tokenizer comes with ``CONTROL`` before its text. That is half a surrogate pair, which no UTF-8
text holds, so a marker that the model or a person only quotes is never taken for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTROL = "\ud800"


def plain(text: str) -> str:
    """The text as people see it."""
    return text.replace(CONTROL, "") if CONTROL in text else text


class StopStrings:
    """Ends a text before the first stop string that completes in it; what comes from there on is dropped.

    Only a tail that may yet grow into a stop string is held back. Two that complete at the same character: the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text that may be shown now."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = tail_that_may_grow(self._held, self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """What was held back at the end of the reply: it grew into no stop string."""
        shown, self._held = self._held, ""
        return shown


@dataclass(frozen=True)
class Piece:
    text: str
    reasoning: bool


class ReasoningParser:
    """Separates reasoning from text. ``open_at_start``: the prompt has already opened the model's reasoning.

    Reasoning opens at the start of the reply or not at all: a tag further on is a quoted one. The line breaks that
    templates put around the tags belong to neither side.
    """

    def __init__(self, tags: tuple[str, str] | None, open_at_start: bool = False) -> None:
        self._open, self._close = tags or ("", "")
        self._state = ("reasoning" if open_at_start else "start") if tags else "text"
        self._held = ""
        self._fresh = open_at_start  # a side just opened: its leading line breaks are dropped

    @property
    def reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as can be told."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            pieces += self._reason()
        if self._state == "text":
            pieces += self._out(self._held, False)
            self._held = ""
        return pieces

    def end(self) -> list[Piece]:
        """What was held back at the end of the reply."""
        held, self._held = self._held, ""
        return self._out(held, self._state == "reasoning")

    def _start(self) -> None:
        body = self._held.lstrip()
        if body.startswith(self._open):
            self._state, self._held, self._fresh = "reasoning", body[len(self._open) :], True
        elif body and not self._open.startswith(body):
            self._state = "text"

    def _reason(self) -> list[Piece]:
        before, closed, after = self._held.partition(self._close)
        if closed:
            pieces = self._out(before.rstrip("\n"), True)
            self._state, self._held, self._fresh = "text", after, True
            return pieces
        keep = tail_that_may_grow(self._held, [self._close])
        solid = self._held[: len(self._held) - keep].rstrip("\n")  # line breaks before the closing tag go with it
        self._held = self._held[len(solid) :]
        return self._out(solid, True)

    def _out(self, text: str, reasoning: bool) -> list[Piece]:
        if self._fresh:
            text = text.lstrip("\n")
        if not text:
            return []
        self._fresh = False
        return [Piece(text, reasoning)]


def tail_that_may_grow(text: str, targets: Sequence[str]) -> int:
    """Length of the longest tail of ``text`` that is the beginning, but not the whole, of a target."""
    longest = max((len(target) for target in targets), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(len(target) > length and target.startswith(text[-length:]) for target in targets):
            return length
    return 0
