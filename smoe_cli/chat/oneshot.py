"""One question, one answer: the reply on stdout and nothing else there."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from smoe_cli import console
from smoe_cli.chat.events import Done, PromptSize, ReasoningDelta, Restarted, TextDelta
from smoe_cli.chat.launch import Chat, ChatRequest, open_chat, start
from smoe_cli.chat.session import turn
from smoe_cli.errors import UnsupportedError

INTERRUPTED = 130


def answer_once(request: ChatRequest, question: str, json_output: bool) -> int:
    """Print the reply as it comes, or one JSON value at the end. Returns the exit code."""
    if request.raw and request.system:
        raise UnsupportedError("--raw sends the bare text, so there is no place for --system")
    chat = open_chat(request)
    with chat.engine:
        start(chat)
        pass_on_notices(chat)
        messages = [{"role": "system", "content": request.system}] if request.system else []
        messages.append({"role": "user", "content": question})
        with interrupt_cancels(chat):
            code = _print_json(chat, messages) if json_output else _print_text(chat, messages)
        pass_on_notices(chat)
        return code


def _print_text(chat: Chat, messages: list[dict[str, Any]]) -> int:
    last = ""
    code = 0
    for event in turn(chat.engine, chat.model, messages, chat.options()):
        if isinstance(event, TextDelta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
            last = event.text
        elif isinstance(event, Done) and event.finish_reason == "cancel":
            code = INTERRUPTED
        else:
            tell(event)
    if not last.endswith("\n"):
        sys.stdout.write("\n")
    return code


def _print_json(chat: Chat, messages: list[dict[str, Any]]) -> int:
    text, reasoning = [], []
    done = None
    for event in turn(chat.engine, chat.model, messages, chat.options()):
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, Done):
            done = event
        else:
            tell(event)
    assert done is not None
    stats = done.stats
    report = {
        "text": "".join(text),
        "reasoning": "".join(reasoning),
        "finish_reason": done.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "ttft_ms": stats.ttft_ms,
        "prefill_tok_s": stats.prefill_tok_s,
        "decode_tok_s": stats.decode_tok_s,
        "model": chat.model.id,
    }
    print(json.dumps(report, ensure_ascii=False))
    return INTERRUPTED if done.finish_reason == "cancel" else 0


def notice(event: object) -> str:
    """What a person should know besides the reply; mostly nothing."""
    if isinstance(event, Restarted):
        return f"{event.reason}; started again, asking once more"
    if isinstance(event, PromptSize) and event.slides:
        return f"the conversation ({event.prompt_tokens} tokens) is longer than the window; the oldest part is lost"
    return ""


def tell(event: object) -> None:
    if text := notice(event):
        console.warn(text)


def pass_on_notices(chat: Chat) -> None:
    """What the engine has said meanwhile: that it reads through the page cache, that numbers were not finite ..."""
    for line in chat.engine.take_notices():
        console.say(line)


@contextlib.contextmanager
def interrupt_cancels(chat: Chat) -> Iterator[None]:
    """Within, Ctrl-C ends the reply and keeps the engine; a second one does not wait for the engine's answer."""
    pressed = 0

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if not chat.engine.busy:
            raise KeyboardInterrupt
        if pressed == 1:
            chat.engine.cancel()
        else:
            chat.engine.abort()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
