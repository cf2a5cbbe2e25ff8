"""``[TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}]``, or ``[TOOL_CALLS]f[ARGS]{...}`` for each call.

Nothing closes a call but the end of its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, Syntax, Taken, calls_of, is_object, json_end
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark

OPEN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class BracketCalls(Syntax):
    markers = (OPEN, ARGUMENTS, ID)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        self._open = spell(OPEN)
        self.openers = (self._open,)
        self.closers = ("}", "]", self._open)
        arguments, call_id = re.escape(spell(ARGUMENTS)), re.escape(spell(ID))
        self._head = re.compile(rf"\s*([\w.:/-]+)(?:{call_id}(\w+))?\s*(?:{arguments})?\s*(?=\{{)")

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            head = lark.literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)} {lark.literal('}')}")
        prefix, suffix = lark.markup(OPEN + " [", OPEN), lark.literal("]")
        return CallGrammar(tuple(calls), prefix, lark.literal(", "), suffix, OPEN)

    def take(self, held: str, final: bool) -> Taken | None:
        start = len(self._open)
        again = held.find(self._open, start)
        body = held[start:] if again < 0 else held[start:again]
        over = final or again >= 0
        found = self._list(body) if body.lstrip().startswith("[") else self._named(body)
        if found is not None:
            return Taken(start + found.length, found.calls)
        return Taken(start, None) if over else None

    def _list(self, body: str) -> Taken | None:
        end = json_end(body)
        calls = calls_of(plain(body[:end])) if end else None
        return Taken(end, calls) if end and calls else None

    def _named(self, body: str) -> Taken | None:
        head = self._head.match(body)
        end = json_end(body, head.end()) if head else None
        if head is None or end is None or not is_object(body[head.end() : end]):
            return None
        return Taken(end, (Call(head[1], plain(body[head.end() : end]), head[2] or ""),))


class NamedBracketCalls(BracketCalls):
    """The later form: the name stands before the arguments, each call has a marker of its own."""

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template and ARGUMENTS in template

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            head = lark.markup(f"{OPEN}{tool.name}{ARGUMENTS}", OPEN, ARGUMENTS)
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)}")
        return CallGrammar(tuple(calls), opener=OPEN)
