"""Tool calls in a reply's text: what one is, how a syntax describes its own, and the parser that streams them.

A syntax is one file here. It says where a call may begin and, given the text from there on, whether the call is
complete; ``CallStream`` does the rest, the same for all. What turns out to be no call after all is text, to the
character. A call comes out in one piece, when it is complete: until then nobody knows that it is one.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain, tail_that_may_grow
from smoe_cli.chat.tools.lark import CallGrammar, Lark


@dataclass(frozen=True)
class Call:
    """``arguments`` is the text of a JSON object, as the model wrote it where it wrote JSON; ``id`` its own, if any."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Taken:
    """What the beginning of a text was: ``length`` characters that are these calls, or markup around them, or,
    with ``calls`` None, text after all."""

    length: int
    calls: tuple[Call, ...] | None


class Syntax(ABC):
    """How a model writes calls. An instance knows the tools on offer and how its tokenizer spells the markers.

    Subclasses set ``markers``, all the texts they look for, and, as spelled, ``openers``, where a call may begin, and
    ``closers``: ``take`` is asked when one of them has come, and at the end; and while the text is short after every
    piece, so that what is no call is seen at once.
    """

    markers: ClassVar[tuple[str, ...]]
    openers: tuple[str, ...]
    closers: tuple[str, ...]

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        """``spell`` gives a marker as the reply's text will have it."""
        self.tools = tools

    @staticmethod
    @abstractmethod
    def claims(template: str) -> bool:
        """Whether a chat template speaks this syntax."""

    @abstractmethod
    def take(self, held: str, final: bool) -> Taken | None:
        """What a text is that begins with an opener; None: it may go on. ``final``: nothing more comes. What is
        answered for a text must be answered for every longer one, too."""

    @abstractmethod
    def grammar(self, lark: Lark) -> CallGrammar:
        """How the calls of the tools on offer are written, their arguments by the tools' schemas."""

    def find(self, text: str, start: bool, after_call: bool) -> int | None:
        """Where in the text the first call may begin. ``start``: only calls and spaces came before it."""
        match = self._openers.search(text)
        return match.start() if match else None

    @cached_property
    def _openers(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.openers)))


class TaggedCalls(Syntax):
    """Calls between two tags, the first two ``markers``."""

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        self._open, self._close = (spell(marker) for marker in self.markers[:2])
        self.openers, self.closers = (self._open,), (self._close,)


class SectionedCalls(Syntax):
    """Calls, each with an end of its own, in a section of calls. ``markers`` begin with the section's beginning and end
    and a call's beginning; their last is a call's end."""

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        self._section, self._section_end, self._open = (spell(marker) for marker in self.markers[:3])
        self._close = spell(self.markers[-1])
        self.openers = (self._section, self._open, self._section_end)
        self.closers = (self._close, self._section_end)

    @property
    def _head(self) -> str:
        """What a call begins with, as a regular expression."""
        return rf"(?:{re.escape(self._section)}\s*)?{re.escape(self._open)}\s*"

    @abstractmethod
    def read(self, body: str) -> Call | None:
        """The call of a text from its beginning to before its end; None: it is none."""

    def take(self, held: str, final: bool) -> Taken | None:
        if held.startswith(self._section_end):
            return Taken(len(self._section_end), ())
        close = held.find(self._close)
        end = held.find(self._section_end)
        if close < 0 and end < 0 and not final:
            return None
        over = close >= 0 and (end < 0 or close < end)
        body = held[: close if over else end if end >= 0 else len(held)]
        if call := self.read(body):
            return Taken(len(body) + (len(self._close) if over else 0), (call,))
        return Taken(max(len(opener) for opener in self.openers if held.startswith(opener)), None)


_SHORT = 100  # characters behind an opener in which it shows whether a call may follow


class CallStream:
    """Separates calls from text. White space beside a call is markup; what stands between and after calls is text."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._held = ""  # not yet given out: white space, then perhaps the beginning of an opener or a call
        self._at: int | None = None  # where in it a call begins
        self._seen = 0  # how much of it has been searched for a closer
        self._fresh = True  # only calls and white space so far
        self._after_call = False  # leading white space is dropped

    def feed(self, text: str) -> list[str | Call]:
        self._held += text
        return self._run(False)

    def end(self) -> list[str | Call]:
        """What was held back at the end of the reply."""
        return self._run(True)

    def _run(self, final: bool) -> list[str | Call]:
        out: list[str | Call] = []
        while self._held:
            if self._at is None and not self._look_for_call(out, final):
                break
            if not self._try_call(out, final):
                break
        return out

    def _look_for_call(self, out: list[str | Call], final: bool) -> bool:
        found = self._syntax.find(self._held, self._fresh, self._after_call)
        if found is not None:
            space = len(self._held[:found]) - len(self._held[:found].rstrip())
            self._text(out, found - space)
            self._at, self._seen = space, space
            return True
        keep = 0 if final else tail_that_may_grow(self._held, self._syntax.openers)
        body = self._held[: len(self._held) - keep]
        if final and self._after_call and not body.strip():
            self._held = ""
        self._text(out, len(body) if final else len(body.rstrip()))
        return False

    def _try_call(self, out: list[str | Call], final: bool) -> bool:
        """Whether something came of the call at hand; if not, more text is needed."""
        assert self._at is not None
        short = len(self._held) - self._at <= _SHORT
        if not (self._closer_came() or short or final):
            return False
        taken = self._syntax.take(self._held[self._at :], final)
        if taken is None and not final:
            return False
        if taken is None or taken.calls is None:  # text after all
            length = taken.length if taken else max(len(self._opener()), 1)
            self._text(out, self._at + length)
            self._at = None
            self._fresh = False
        else:
            out.extend(taken.calls)
            self._held = self._held[self._at + taken.length :]
            self._at, self._after_call = None, True
        return True

    def _closer_came(self) -> bool:
        longest = max(map(len, self._syntax.closers))
        start, self._seen = max(self._seen - longest + 1, 0), len(self._held)
        return any(self._held.find(closer, start) >= 0 for closer in self._syntax.closers)

    def _opener(self) -> str:
        held = self._held[self._at or 0 :]
        return next((opener for opener in self._syntax.openers if held.startswith(opener)), "")

    def _text(self, out: list[str | Call], length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            text = text.lstrip()
        if text:
            out.append(plain(text))
            self._after_call = self._fresh = False


# -- JSON -------------------------------------------------------------------------------------------------------------

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def json_end(text: str, at: int = 0) -> int | None:
    """Where the JSON value that begins at ``at`` ends; None if it is not complete, or not JSON."""
    try:
        return int(_DECODER.raw_decode(text, _skip(text, at))[1])
    except (ValueError, RecursionError):
        return None


def members(text: str) -> dict[str, str] | None:
    """A JSON object's members as they are written: ``{"a": [1,  2]}`` gives ``{"a": "[1,  2]"}``. None: not one."""
    found: dict[str, str] = {}
    at = _skip(text, 0)
    if not text.startswith("{", at) or json_end(text, at) is None:
        return None
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # the colon
        end = json_end(text, at) or len(text)
        found[key] = text[at:end]
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def is_object(text: str) -> bool:
    end = json_end(text)
    return end is not None and text.lstrip().startswith("{") and not text[end:].strip()


def in_string(text: str) -> bool:
    """Whether a JSON text ends inside a string."""
    return '"' in _STRING.sub("", text)


def call_of(written: str, names: Sequence[str] = ()) -> Call | None:
    """``{"name": ..., "arguments": {...}}`` as a call, if that is what it is. ``names``: of no other function."""
    found = members(written)
    if found is None:
        return None
    if "function" in found and (inner := members(found["function"])) is not None:
        found = {**found, **inner}
    name = _string(found.get("name", found.get("function", "")))
    arguments = found.get("arguments", found.get("parameters", "{}"))
    if arguments.startswith('"'):  # an object written into a string
        arguments = _string(arguments)
    if arguments in ("", "null"):
        arguments = "{}"
    if not name or not is_object(arguments) or (names and name not in names):
        return None
    return Call(name, arguments.strip(), _string(found.get("id", "")))


def calls_of(written: str) -> tuple[Call, ...] | None:
    """One call or a list of them."""
    body = written.strip()
    if not body.startswith("["):
        one = call_of(body) if not body[json_end(body) or 0 :].strip() else None
        return (one,) if one else None
    end = json_end(body)
    if end is None or body[end:].strip():
        return None
    calls = [call_of(item) for item in elements(body)]
    return tuple(call for call in calls if call) if calls and all(calls) else None


def elements(text: str) -> list[str]:
    """A complete JSON array's elements as they are written."""
    found = []
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "]":
        end = json_end(text, at) or len(text)
        found.append(text[at:end])
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _string(written: str) -> str:
    try:
        value = json.loads(written)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
