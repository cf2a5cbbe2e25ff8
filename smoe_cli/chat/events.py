"""What a turn tells whoever asked for it, from the prompt's size to the last word, in the terminal and on every API."""

from __future__ import annotations

from dataclasses import dataclass

from smoe_cli.engine.manager import Restarted as Restarted


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
    """One more token is there, whether or not it finishes any text; what text it finishes comes before. ``tokens``
    counts them. ``logprob`` and ``top`` (id, logprob; best first) only when they were asked for."""

    id: int
    tokens: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of the reply's text. ``tokens`` are those that begin in it, where log-probabilities were asked for."""

    text: str
    tokens: tuple[Generated, ...] = ()


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call. ``index`` counts the calls of a reply from 0. ``id`` and ``name`` stand in a call's first
    delta and are empty afterwards; the ``arguments`` of all its deltas joined are one JSON object as text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


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
    """``finish_reason`` is stop, length, tool_calls, refusal (the operator's policy ended it) or cancel; ``stop`` is
    the stop string that was met, if one was."""

    finish_reason: str
    stop: str | None
    stats: Stats


Delta = TextDelta | ReasoningDelta | ToolCallDelta  # each is followed by the Generated of its token, or by Done
Event = PromptSize | PrefillProgress | Generated | Delta | Restarted | Done
