"""The conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Any

from smoe_cli import console
from smoe_cli.chat.launch import ChatRequest, open_chat, start
from smoe_cli.chat.oneshot import interrupt_cancels, tell
from smoe_cli.chat.session import TextDelta, turn


def converse(request: ChatRequest) -> int:
    """Read a line, stream a reply, until the end of input."""
    chat = open_chat(request)
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    with chat.engine:
        start(chat)
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.rstrip("\n")})
            text = ""
            with interrupt_cancels(chat):
                for event in turn(chat.engine, chat.model, messages, chat.options()):
                    if isinstance(event, TextDelta):
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                        text += event.text
                    else:
                        tell(event)
            console.say("")
            messages.append({"role": "assistant", "content": text})
    return 0
