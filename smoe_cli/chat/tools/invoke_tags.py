"""``<minimax:tool_call><invoke name="f"><parameter name="x">text</parameter></invoke></minimax:tool_call>``."""

from __future__ import annotations

import re

from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, TaggedCalls, Taken
from smoe_cli.chat.tools.lark import CallGrammar, Lark
from smoe_cli.chat.tools.values import bare_arguments, schema_of, value_of, written

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = "<invoke"
_INVOKE = re.compile(r'\s*<invoke name="([^"]+)">(.*?)</invoke>\s*', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="([^"]+)">\n?(.*?)\n?</parameter>', re.DOTALL)


class InvokeTags(TaggedCalls):
    markers = (OPEN, CLOSE)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            pairs = bare_arguments(lark, tool, '<parameter name="{}">', "</parameter>\n")
            head = lark.literal(f'<invoke name="{tool.name}">\n')
            tail = lark.literal("</invoke>\n")
            calls.append(f"{head} {pairs} {tail}")
        return CallGrammar(tuple(calls), lark.markup(OPEN + "\n", OPEN), "", lark.marker(CLOSE), OPEN)

    def take(self, held: str, final: bool) -> Taken | None:
        start = len(self._open)
        head = held[start : start + 40].lstrip()
        if not (INVOKE.startswith(head) or head.startswith(INVOKE)):
            return Taken(start, None)
        close = held.find(self._close, start)
        if close < 0 and not final:
            return None
        body = plain(held[start : close if close >= 0 else len(held)])
        calls = tuple(self._call(name, inner) for name, inner in _INVOKE.findall(body))
        if not calls or _INVOKE.sub("", body).strip():
            return Taken(start, None)
        return Taken(close + len(self._close) if close >= 0 else len(held), calls)

    def _call(self, name: str, body: str) -> Call:
        properties = schema_of(self.tools, name)
        return Call(name, written({key: value_of(text, properties.get(key)) for key, text in _PARAMETER.findall(body)}))
