"""A reply that is nothing but ``{"name": "f", "parameters": {...}}``, or JSON after ``<|python_tag|>`` (Llama 3).

Without a marker any JSON reply looks like a call, so only that of a tool on offer is one. ``;`` separates several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import plain
from smoe_cli.chat.tools.base import Syntax, Taken, call_of, json_end
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark, nested

OPEN = "<|python_tag|>"
_BARE = re.compile(r"\s*([;{])")
_KEYS = ("name", "type", "function", "parameters", "arguments")
_HEADS = tuple('{"' + key + '":' for key in _KEYS)


class BareJson(Syntax):
    markers = (OPEN,)

    @staticmethod
    def claims(template: str) -> bool:
        return OPEN in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    def __init__(self, tools: Sequence[Tool], spell: Callable[[str], str]) -> None:
        super().__init__(tools, spell)
        self._names = [tool.name for tool in tools]
        self._open = spell(OPEN)
        self.openers = (self._open,)
        self.closers = ("}",)

    def find(self, text: str, start: bool, after_call: bool) -> int | None:
        match = _BARE.match(text) if start else None
        if match and (match[1] == "{" or after_call):
            return match.start(1)
        return super().find(text, start, after_call)

    def grammar(self, lark: Lark) -> CallGrammar:
        schemas = []
        for tool in self.tools:
            parameters = nested(tool.parameters or ANY_OBJECT, "#/properties/parameters")
            members = {"name": {"const": tool.name}, "parameters": parameters}
            schemas.append(
                {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
            )
        return CallGrammar(schemas=tuple(schemas), several=False)

    def take(self, held: str, final: bool) -> Taken | None:
        if held.startswith(";"):
            return self._separator(held, final)
        start = len(self._open) if held.startswith(self._open) else 0
        body = held[start:].lstrip()
        squeezed = re.sub(r"\s+", "", body[:200])
        hopeful = any(head.startswith(squeezed) or squeezed.startswith(head) for head in _HEADS)
        end = json_end(body) if hopeful else None
        if end is None:
            return None if hopeful and not final else Taken(max(start, 1), None)
        call = call_of(plain(body[:end]), self._names)
        skipped = len(held) - start - len(body)
        return Taken(start + skipped + end, (call,)) if call else Taken(max(start, 1), None)

    def _separator(self, held: str, final: bool) -> Taken | None:
        after = held[1:].lstrip()
        if not after and not final:
            return None
        return Taken(1, () if after.startswith("{") else None)
