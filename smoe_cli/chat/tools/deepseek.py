"""``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` in a section of calls (DeepSeek V3.1).

V3 and R1 write ``function<｜tool▁sep｜>f`` and the JSON in a fence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, SectionedCalls, is_object
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class SeparatedCalls(SectionedCalls):
    markers = (SECTION, SECTION_END, OPEN, SEPARATOR, CLOSE)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        separator, head = re.escape(spell(SEPARATOR)), self._head
        fenced = rf"\w+{separator}\s*(\S+?)\s*```(?:json)?\s*(.*?)\s*(?:```)?\s*"
        self._forms = [
            re.compile(head + fenced, re.DOTALL),
            re.compile(rf"{head}(\S+?)\s*{separator}\s*(.*?)\s*", re.DOTALL),
        ]

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            head = lark.markup(f"{OPEN}{tool.name}{SEPARATOR}", OPEN, SEPARATOR)
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)} {lark.marker(CLOSE)}")
        return CallGrammar(tuple(calls), lark.marker(SECTION), "", lark.marker(SECTION_END), SECTION)

    def read(self, body: str) -> Call | None:
        for form in self._forms:
            match = form.fullmatch(body)
            if match and is_object(arguments := plain(match[2])):
                return Call(plain(match[1]), arguments)
        return None


class FencedCalls(SeparatedCalls):
    """The earlier form: a call names its type first, and its JSON stands in a fence."""

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template and "```json" in template

    def grammar(self, lark: Lark) -> CallGrammar:
        calls = []
        for tool in self.tools:
            head = lark.markup(f"{OPEN}function{SEPARATOR}{tool.name}\n```json\n", OPEN, SEPARATOR)
            tail = lark.markup(f"\n```{CLOSE}", CLOSE)
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)} {tail}")
        return CallGrammar(tuple(calls), lark.marker(SECTION), lark.literal("\n"), lark.marker(SECTION_END), SECTION)
