"""``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section (Kimi K2).

``functions.f:0`` is the call's id, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Call, SectionedCalls, is_object
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class NumberedCalls(SectionedCalls):
    markers = (SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template and ARGUMENTS in template

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        arguments = re.escape(spell(ARGUMENTS))
        self._form = re.compile(
            rf"{self._head}((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*{arguments}\s*(.*?)\s*", re.DOTALL
        )

    def grammar(self, lark: Lark) -> CallGrammar:
        number = lark.terminal("/[0-9]{1,4}/")
        calls = []
        for tool in self.tools:
            head = f"{lark.markup(f'{OPEN}functions.{tool.name}:', OPEN)} {number} {lark.marker(ARGUMENTS)}"
            calls.append(f"{head} {lark.json(tool.parameters or ANY_OBJECT)} {lark.marker(CLOSE)}")
        return CallGrammar(tuple(calls), lark.marker(SECTION), "", lark.marker(SECTION_END), SECTION)

    def read(self, body: str) -> Call | None:
        match = self._form.fullmatch(body)
        if match and is_object(arguments := plain(match[3])):
            return Call(match[2], arguments, match[1])
        return None
