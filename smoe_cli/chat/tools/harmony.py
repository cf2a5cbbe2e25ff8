"""Channels: ``<|channel|>analysis<|message|>...<|end|>`` is reasoning, ``final`` text, and a message with a recipient,
``commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>``, a call (gpt-oss).

The syntax covers the whole reply, so this is the reply's only parser, with tools or without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import Piece, plain, tail_that_may_grow
from smoe_cli.chat.tools.base import Call, is_object
from smoe_cli.chat.tools.lark import ANY_OBJECT, Lark

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
STOPS = (RETURN, CALL)  # the tokens that end a reply; END only ends a message of it
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_LONGEST_HEADER = 400


def claims(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def reply_grammar(lark: Lark, tools: Sequence[Tool], schema: dict[str, Any] | None, required: bool) -> str:
    """The whole reply, reasoning included. With ``schema`` the final message is JSON of it; ``required``: a call ends
    the reply."""
    again = lark.markup(f"{END}{START}assistant", END, START)
    text = lark.text()
    reasoning = lark.rule(f"{lark.markup(f'{CHANNEL}analysis{MESSAGE}', CHANNEL, MESSAGE)} {text} {again}")
    ends = []
    for tool in tools:
        head = lark.markup(f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}", *MARKERS)
        ends.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)}")
    if not required or not ends:
        preamble = lark.rule(f"{lark.markup(f'{CHANNEL}commentary{MESSAGE}', CHANNEL, MESSAGE)} {text} {again}")
        reasoning = f"({reasoning} | {preamble})"
        head = lark.markup(f"{CHANNEL}final{MESSAGE}", CHANNEL, MESSAGE)
        ends.append(f"{head} {text if schema is None else lark.json(schema, tight=False)}")
    return f"{reasoning}* ({' | '.join(ends)})"


class HarmonyReply:
    """The reply's parser, from right behind the prompt's ``<|start|>assistant``. ``calls`` False: no tool is on offer,
    so a message to one is text."""

    def __init__(self, spell: Callable[[str], str] = str, calls: bool = True) -> None:
        self._channel, self._message, self._start = spell(CHANNEL), spell(MESSAGE), spell(START)
        self._ends = tuple(spell(marker) for marker in (END, CALL, RETURN, START, CHANNEL))
        self._calls = calls
        self._state = "header"
        self._held = ""
        self._call = ""  # the function whose arguments are being written
        self._given = {True: False, False: False}  # whether reasoning, and text, have come
        self._gap = False  # a message began: the next text of its side is a paragraph of its own

    @property
    def reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as can be told."""
        return self._state == "analysis" or (self._state == "header" and not self._given[False])

    @property
    def in_text(self) -> bool:
        return self._state == "text"

    def feed(self, text: str) -> list[Piece | Call]:
        self._held += text
        out: list[Piece | Call] = []
        while self._held and (self._header(out) if self._state == "header" else self._body(out)):
            pass
        return out

    def end(self) -> list[Piece | Call]:
        """What was held back at the end of the reply."""
        out: list[Piece | Call] = []
        if self._state == "call":
            self._finish_call(self._held, out)
        elif self._state != "header":
            self._out(self._held, out)
        self._held = ""  # a header without a message says nothing
        return out

    def _header(self, out: list[Piece | Call]) -> bool:
        """Whether the header at hand is complete. A reply that does not begin with one is text."""
        before, found, after = self._held.partition(self._message)
        if not found and (self._may_be_header(self._held)):
            return False
        if not found:
            self._enter("text")
            return True
        channel = re.search(re.escape(self._channel) + r"\s*(\w+)", before)
        recipient = _RECIPIENT.search(before)
        self._held = after
        if recipient and self._calls:
            self._call = recipient[1]
            self._enter("call")
        else:
            self._enter("analysis" if channel and channel[1] == "analysis" else "text")
        return True

    def _may_be_header(self, text: str) -> bool:
        body = text.lstrip()
        heads = (self._channel, self._start, "assistant", "to=")
        begins = any(head.startswith(body) or body.startswith(head) for head in heads)
        return begins and len(text) < _LONGEST_HEADER

    def _body(self, out: list[Piece | Call]) -> bool:
        """Give out the message at hand. Whether it has ended."""
        places = [(at, end) for end in self._ends if (at := self._held.find(end)) >= 0]
        if not places:
            if self._state != "call":
                keep = tail_that_may_grow(self._held, self._ends)
                body, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                self._out(body, out)
            return False
        at, end = min(places)
        if self._state == "call":
            self._finish_call(self._held[:at], out)
        else:
            self._out(self._held[:at], out)
        self._held = self._held[at if end in (self._start, self._channel) else at + len(end) :]
        self._state = "header"
        return True

    def _finish_call(self, body: str, out: list[Piece | Call]) -> None:
        arguments = plain(body).strip()
        if is_object(arguments):
            out.append(Call(self._call, arguments))
        else:
            self._state = "text"
            self._out(body, out)

    def _enter(self, state: str) -> None:
        self._state = state
        self._gap = True

    def _out(self, text: str, out: list[Piece | Call]) -> None:
        reasoning = self._state == "analysis"
        text = plain(text)
        if text:
            gap = "\n\n" if self._gap and self._given[reasoning] else ""
            self._gap, self._given[reasoning] = False, True
            out.append(Piece(gap + text, reasoning))
