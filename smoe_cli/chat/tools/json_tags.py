"""``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, one element a call (Hermes, Qwen)."""

from __future__ import annotations

import json

from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import TaggedCalls, Taken, calls_of, in_string
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class JsonTags(TaggedCalls):
    markers = (OPEN, CLOSE)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            head = lark.markup(f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": ', OPEN)
            tail = lark.markup("}\n" + CLOSE, CLOSE)
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)} {tail}")
        return CallGrammar(tuple(calls), separator=lark.literal("\n"), opener=OPEN)

    def take(self, held: str, final: bool) -> Taken | None:
        start = len(self._open)
        if not _may_be_json(held[start : start + 40]):
            return Taken(start, None)
        close = held.find(self._close, start)
        while close >= 0:
            body = plain(held[start:close])
            if calls := calls_of(body):
                return Taken(close + len(self._close), calls)
            if not in_string(body):
                return Taken(start, None)
            close = held.find(self._close, close + 1)  # this one may stand inside an argument
        if not final:
            return None
        calls = calls_of(plain(held[start:]))  # a model may end its turn without the closing tag
        return Taken(len(held), calls) if calls else Taken(start, None)


def _may_be_json(text: str) -> bool:
    body = text.lstrip()
    return not body or body[0] in "{["
