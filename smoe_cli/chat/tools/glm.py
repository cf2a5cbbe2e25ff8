"""``<tool_call>f<arg_key>x</arg_key><arg_value>text</arg_value></tool_call>`` (GLM 4.5 and later)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, TaggedCalls, Taken
from smoe_cli.chat.tools.lark import CallGrammar, Lark
from smoe_cli.chat.tools.values import bare_arguments, schema_of, value_of, written

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class ArgKeys(TaggedCalls):
    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    @staticmethod
    def claims(template: str) -> bool:
        return KEY in template

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        key, key_end, value, value_end = (re.escape(spell(tag)) for tag in (KEY, KEY_END, VALUE, VALUE_END))
        self._pair = re.compile(rf"\s*{key}(.*?){key_end}\s*{value}(.*?){value_end}\s*", re.DOTALL)

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            pairs = bare_arguments(lark, tool, f"{KEY}{{}}{KEY_END}\n{VALUE}", VALUE_END, self.markers, "\n")
            head = lark.markup(f"{OPEN}{tool.name}\n", OPEN)
            calls.append(f"{head} {pairs} {lark.marker(CLOSE)}")
        return CallGrammar(tuple(calls), separator=lark.literal("\n"), opener=OPEN)

    def take(self, held: str, final: bool) -> Taken | None:
        start = len(self._open)
        if not re.match(r"\s*(?:[\w.:/-]|\Z)", held[start : start + 40]):
            return Taken(start, None)
        close = held.find(self._close, start)
        if close < 0 and not final:
            return None
        call = self._call(held[start : close if close >= 0 else len(held)])
        if call is None:
            return Taken(start, None)
        return Taken(close + len(self._close) if close >= 0 else len(held), (call,))

    def _call(self, body: str) -> Call | None:
        pairs = self._pair.findall(body)
        name = plain(self._pair.sub("", body)).strip()
        if not re.fullmatch(r"[\w.:/-]+", name) or not body.lstrip().startswith(name):
            return None
        properties = schema_of(self.tools, name)
        arguments = {plain(key).strip(): plain(text) for key, text in pairs}
        return Call(name, written({key: value_of(text, properties.get(key)) for key, text in arguments.items()}))
