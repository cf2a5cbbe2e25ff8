"""Client noise at the head of a system prompt: taken out, since one changed token there costs the whole prefix.

Claude Code puts a line for its maker's billing in front of its system prompt, in the form of an HTTP header, with a
value that differs in every request. It is addressed to the service, not to the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smoe_cli.chat.template import Message

_NOISE = re.compile(r"\A\s*(?:x-[a-z0-9-]*billing-header:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)


def quiet(messages: Sequence[Message]) -> list[Message]:
    """The messages, without such lines at the beginning of a leading system message."""
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return list(messages)
    content = _quiet(messages[0].get("content"))
    rest = list(messages[1:])
    return rest if content in ("", []) and _spoke(messages[0]) else [{**messages[0], "content": content}, *rest]


def _spoke(message: Message) -> bool:
    return message.get("content") not in ("", [], None)


def _quiet(content: Any) -> Any:
    if isinstance(content, str):
        return _NOISE.sub("", content, count=1)
    if isinstance(content, list) and content:
        first = content[0]
        text = first.get("text") if isinstance(first, dict) else first
        if isinstance(text, str) and _NOISE.match(text):
            left = _NOISE.sub("", text, count=1)
            kept = {**first, "text": left} if isinstance(first, dict) else left
            return [kept, *content[1:]] if left else content[1:]
    return content
