"""The one way from a request to a reply, for every API: what a dialect hands in, and what it gets back.

A dialect turns its protocol's JSON into a ``TurnRequest`` or a ``TextRequest``, and the events of
``smoe_cli.chat.events`` into its protocol's JSON; it knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.chat.template import Message
from smoe_cli.engine.protocol import Sampling


@dataclass(frozen=True)
class Limits:
    """What every kind of request may ask. ``None`` leaves the choice to the server's flags, then to the vault."""

    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # alternatives beside each token; None: no report
    n: int = 1
    window: int = 0  # the least that the window must be; 0: whatever it is


@dataclass(frozen=True)
class TurnRequest:
    """A conversation to be continued.

    Messages are in the form that chat templates take: ``role`` (system developer user assistant tool), ``content``
    (text, or a list of text parts), on an assistant's also ``reasoning_content`` and ``tool_calls`` ([{"id", "type":
    "function", "function": {"name", "arguments": object}}]), on a tool's ``tool_call_id`` and ``name``.
    """

    messages: list[Message]
    limits: Limits = field(default_factory=Limits)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    thinking: bool | None = None
    effort: str | None = None  # how hard to think, in the client's word
    effort_is_hint: bool = False  # it may go unheard where the model knows no such thing
    switches: dict[str, Any] = field(default_factory=dict)  # further variables for the template
    begun: str = ""  # the beginning of the reply, which is to go on with it


@dataclass(frozen=True)
class TextRequest:
    """A bare text, or its ids, to be continued without a template. ``echo``: the prompt comes back in front, with the
    log-probabilities of its tokens where ``limits.logprobs`` asks for them."""

    prompt: str | list[int]
    limits: Limits = field(default_factory=Limits)
    echo: bool = False
