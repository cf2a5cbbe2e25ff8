"""The wire protocol of ``smoe-engine --serve``, both directions, without any input or output.

A request is one line; a reply is whitespace-separated words up to a sentinel::

    -> GEN <max_tokens> [key=value ...] <id0>,<id1>,...
    -> MASK <base64>   with mask=1, before each step
    <- prompt=N cached=N  pre=done/total ...  id [lp=f top=id:lp,...] ...  key=value ... fin=stop <<DONE>>
    <- key=value ... <<ERR name>>
    -> SCORE <id0>,<id1>,...
    <- pre=done/total ...  lp=f [top=id:lp,...] ...  key=value ... <<DONE>>

Requests with a tag (``tag=NAME``) run together; each line of their replies begins with ``@NAME``, see ``Router``.

Words that hold ``=`` and are not known here are kept as counters of the reply, so the engine may add some at any time.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from smoe_cli.errors import EngineError, EngineRefused, UsageError


class ProtocolError(EngineError):
    """The engine wrote something that is not of the protocol: the process can no longer be trusted."""


# -- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; ``None`` leaves the engine's launch default. Temperature 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None


_SAMPLING_KEYS = {
    "temperature": "t",
    "top_p": "p",
    "top_k": "k",
    "min_p": "min_p",
    "repetition_penalty": "r",
    "frequency_penalty": "freq",
    "presence_penalty": "pres",
    "seed": "seed",
}


class Masks(Protocol):
    """Which tokens may come next. Asked by the thread that reads the reply, once before the first token and once after
    each: the engine computes the step meanwhile."""

    def mask(self) -> bytes:
        """ceil(vocabulary / 8) bytes, one bit per id, least significant first, 1 = allowed."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        ...


@dataclass(frozen=True)
class Generate:
    """One generation request. ``ids`` is always the whole conversation; the engine finds the prefix it already has."""

    ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)
    session: str = ""
    logprobs: int | None = None  # alternatives to report beside each token; None: report nothing
    slide: bool = True
    masks: Callable[[], Masks] | None = None  # made anew when the request is sent again
    buckets: bool = False  # report where the time went, as counters *_ms
    tag: str = ""  # with one, it runs beside others

    def line(self) -> str:
        """The ``GEN`` line, newline included. Raises UsageError for numbers that have no meaning."""
        if not self.ids:
            raise UsageError("the prompt is empty", "send at least one token")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}", "ask for at least one token")
        return " ".join(["GEN", str(self.max_tokens), *self._fields(), _joined(self.ids)]) + "\n"

    def _fields(self) -> Iterator[str]:
        for name, key in _SAMPLING_KEYS.items():
            value = getattr(self.sampling, name)
            if value is not None:
                yield f"{key}={_number(name, value)}"
        if self.stop_ids:
            yield f"stop={_joined(self.stop_ids)}"
        if self.bias:
            yield "bias=" + ",".join(f"{token}:{_number('bias', value)}" for token, value in self.bias.items())
        if self.tag:
            yield f"tag={self.tag}"
        if self.session:
            yield f"session={self.session}"
        if self.logprobs is not None:
            yield f"lp={self.logprobs}"
        if not self.slide:
            yield "slide=0"
        if self.buckets:
            yield "buckets=1"
        if self.masks is not None:
            yield "mask=1"


def mask_line(bits: bytes, tag: str = "") -> str:
    """The ``MASK`` line for the next step."""
    return f"MASK {_tagged(tag)}{base64.b64encode(bits).decode('ascii')}\n"


def cancel_line(tag: str = "") -> str:
    return f"CANCEL {_tagged(tag)}".rstrip() + "\n"


def score_line(ids: Sequence[int], top: int = 0, tag: str = "") -> str:
    """The ``SCORE`` line, answered with the log-probability of each of ``ids[1:]`` and, for ``top`` > 0, of so many of
    the likeliest ids in its place. It runs alone, with a tag too."""
    return f"SCORE {_tagged(tag)}{f'lp={top} ' if top else ''}{_joined(ids)}\n"


def _tagged(tag: str) -> str:
    return f"tag={tag} " if tag else ""


def _joined(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))


def _number(name: str, value: float) -> str:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}", "give a finite number")
    return repr(value)


# -- replies ----------------------------------------------------------------------------------------------------------


class Router:
    """Sorts the bytes of the engine's stdout, however they are cut: a whole line ``@tag words`` at a time to the tag,
    all else, as it comes, to the request without one (tag ``""``)."""

    def __init__(self) -> None:
        self._line: bytes | None = None  # the part of a tagged line that has come
        self._fresh = True  # at the beginning of a line

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        if self._line is None and data and b"@" not in data:  # nothing is tagged, as ever where one request runs
            self._fresh = data.endswith(b"\n")
            yield "", data
            return
        while data:
            if self._fresh and data.startswith(b"@"):
                self._line = b""
            piece, newline, data = data.partition(b"\n")
            piece += newline
            self._fresh = bool(newline)
            if self._line is None:
                yield "", piece
                continue
            self._line += piece
            if newline:
                tag, _, words = self._line[1:].partition(b" ")
                self._line = None
                yield tag.decode("ascii", errors="replace"), words


@dataclass(frozen=True)
class Began:
    """The prompt is accepted: its size and how much of it the engine already holds, in tokens."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Prefilled:
    done: int
    total: int


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scored:
    """SCORE: the natural log-probability of the next of the given ids, and the likeliest there if asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a reply: why (``stop``, ``length``, ``cancel``, or ``""`` when the engine gave none) and counters."""

    finish: str
    counters: dict[str, float]


Message = Began | Prefilled | Token | Scored | Done


class ReplyParser:
    """Turns the bytes of one reply into messages, however they are cut. Raises EngineRefused and ProtocolError.

    With ``logprobs`` a token is held until its ``lp=`` and ``top=`` words have come; without, it is out at once. So is
    a score with ``score_top``.
    """

    def __init__(self, logprobs: int | None = None, score_top: bool = False) -> None:
        self._logprobs = logprobs
        self._score_top = score_top
        self._score: float | None = None
        self._rest = ""
        self._fields: dict[str, str] = {}
        self._token: Token | None = None
        self._error_name = False
        self.finished = False

    def feed(self, data: bytes) -> Iterator[Message]:
        text = self._rest + data.decode("ascii", errors="replace")
        words = text.split()
        # The last word may go on in the next read, unless white space follows it or it is a closing sentinel.
        complete = not text or text[-1].isspace() or text.endswith(">>")
        self._rest = "" if complete else words.pop()
        for word in words:
            if self.finished:
                raise ProtocolError(f"the engine went on after the end of its reply: {word[:80]!r}")
            yield from self._word(word)

    def _word(self, word: str) -> Iterator[Message]:
        if self._error_name:
            self.finished = True
            raise EngineRefused(word.removesuffix(">>"), dict(self._fields))
        if word.isdecimal():
            if self._logprobs is None:
                yield Token(int(word))
            else:
                yield from self._release()
                self._token = Token(int(word))
        elif word == "<<ERR":
            self._error_name = True
        elif word == "<<DONE>>":
            yield from self._release()
            self.finished = True
            yield Done(self._fields.pop("fin", ""), _numbers(self._fields))
        elif "=" in word and not word.startswith("="):
            yield from self._field(*word.split("=", 1))
        else:
            raise ProtocolError(f"the engine wrote something that is not of its protocol: {word[:80]!r}")

    def _field(self, key: str, value: str) -> Iterator[Message]:
        if key == "lp" and self._token is not None:
            self._token = Token(self._token.id, _float(value))
            if not self._logprobs:
                yield from self._release()
        elif key == "lp" and self._score_top:
            self._score = _float(value)
        elif key == "lp":
            yield Scored(_float(value))
        elif key == "top" and self._score is not None:
            score, self._score = self._score, None
            yield Scored(score, _pairs(value))
        elif key == "top" and self._token is not None:
            self._token = Token(self._token.id, self._token.logprob, _pairs(value))
            yield from self._release()
        elif key == "pre":
            done, _, total = value.partition("/")
            yield Prefilled(int(_float(done)), int(_float(total)))
        else:
            yield from self._release()
            self._fields[key] = value
            if key == "cached":
                yield Began(int(_float(self._fields.get("prompt", "0"))), int(_float(value)))

    def _release(self) -> Iterator[Message]:
        if self._token is not None:
            yield self._token
            self._token = None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ProtocolError(f"the engine wrote {text[:80]!r} where a number belongs") from None


def _pairs(text: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(_float(token)), _float(value)) for token, _, value in (p.partition(":") for p in text.split(",")))


def _numbers(fields: dict[str, str]) -> dict[str, float]:
    """The fields that are numbers; a future engine may add words, which are not counters."""
    numbers = {}
    for key, value in fields.items():
        try:
            numbers[key] = float(value)
        except ValueError:
            continue
    return numbers
