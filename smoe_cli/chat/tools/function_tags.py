"""``<tool_call><function=f><parameter=x>text</parameter></function></tool_call>`` (Qwen3-Coder)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, Syntax, Taken
from smoe_cli.chat.tools.lark import CallGrammar, Lark
from smoe_cli.chat.tools.values import bare_arguments, schema_of, value_of, written

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class FunctionTags(Syntax):
    markers = (OPEN, CLOSE)

    @staticmethod
    def claims(template: str) -> bool:
        return FUNCTION in template and "<parameter=" in template

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        self._open, self._close = spell(OPEN), spell(CLOSE)
        self.openers = (
            self._open,
            FUNCTION,
        )  # some leave the outer tag out
        self.closers = (self._close, FUNCTION_END)

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            pairs = bare_arguments(lark, tool, "<parameter={}>\n", "\n</parameter>\n")
            head = lark.markup(f"{OPEN}\n<function={tool.name}>\n", OPEN)
            tail = lark.markup(f"{FUNCTION_END}\n{CLOSE}", CLOSE)
            calls.append(f"{head} {pairs} {tail}")
        return CallGrammar(tuple(calls), separator=lark.literal("\n"), opener=OPEN)

    def take(self, held: str, final: bool) -> Taken | None:
        wrapped = held.startswith(self._open)
        start, closer = (len(self._open), self._close) if wrapped else (0, FUNCTION_END)
        head = held[start : start + 40].lstrip()
        if not (FUNCTION.startswith(head) or head.startswith(FUNCTION)):
            return Taken(start or len(FUNCTION), None)
        close = held.find(closer, start)
        if close < 0 and not final:
            return None
        end = len(held) if close < 0 else close
        call = self._call(plain(held[start:end]))
        if call is None:
            return Taken(start or len(FUNCTION), None)
        return Taken(end if close < 0 else close + len(closer), (call,))

    def _call(self, body: str) -> Call | None:
        match = _FUNCTION.fullmatch(body.rstrip())
        if match is None or _PARAMETER.sub("", match[2]).strip():
            return None
        properties = schema_of(self.tools, match[1])
        arguments = {key: value_of(value, properties.get(key)) for key, value in _PARAMETER.findall(match[2])}
        return Call(match[1], written(arguments))
