"""How a template wants earlier tool calls, results and reasoning written: found out by rendering, not by its name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smoe_cli.errors import UsageError

Message = dict[str, Any]
Render = Callable[[list[Message], Any], str]  # messages and tools to text; UsageError when the template refuses

_NEEDLE = "smoe-needle"
_KEY = "smoe-key"
_ARGUMENTS = {_KEY: _NEEDLE}
_WRITTEN = json.dumps(_ARGUMENTS)
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_USER = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NEEDLE,
        "description": "?",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "?"}}},
    },
}


@dataclass(frozen=True)
class HistoryStyle:
    """``takes_tools``: tools change the prompt. ``takes_calls``: an earlier call is written at all."""

    takes_tools: bool = False
    takes_calls: bool = False
    arguments_as_text: bool = False  # else as an object
    no_content_beside_calls: bool = False  # calls are only written where the content is null
    short_ids: bool = False  # ids of nine letters and digits
    one_call_a_message: bool = False
    reasoning_key: str = "reasoning_content"
    reasoning_or_text: bool = False  # beside calls, only one of them

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with string contents, as this template takes them."""
        out: list[Message] = []
        for message in self._in_single_file(messages):
            if message["role"] == "assistant":
                message = self._reasoning(message)
            if message.get("tool_calls"):
                message = self._calls(message)
            if message["role"] == "tool" and self.short_ids and "tool_call_id" in message:
                message = {**message, "tool_call_id": short_id(str(message["tool_call_id"]))}
            out.append(message)
        return out

    def _reasoning(self, message: Message) -> Message:
        text = next((message[key] for key in _REASONING_KEYS if message.get(key)), "")
        rest = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
        if not text:
            return rest
        if self.reasoning_or_text and rest.get("tool_calls"):
            text, rest["content"] = "\n\n".join(part for part in (text, rest["content"]) if part), ""
        return {**rest, self.reasoning_key: text}

    def _calls(self, message: Message) -> Message:
        calls = [self._call(call) for call in message["tool_calls"]]
        content = None if self.no_content_beside_calls else message["content"]
        return {**message, "content": content, "tool_calls": calls}

    def _call(self, call: Any) -> Message:
        try:
            name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
            loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UsageError(f"a tool call in the conversation is not one: {error}", param="messages") from error
        if not isinstance(loaded, dict):
            text = f"the arguments of the call of {name!r} in the conversation are not a JSON object"
            raise UsageError(text, param="messages")
        if self.arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call_id = str(call.get("id") or "")
        return {
            "id": short_id(call_id) if self.short_ids else call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments if self.arguments_as_text else loaded},
        }

    def _in_single_file(self, messages: Sequence[Message]) -> list[Message]:
        """Where a message may hold one call only: call, result, call, result."""
        if not self.one_call_a_message:
            return list(messages)
        out: list[Message] = []
        queue = list(messages)
        while queue:
            message = queue.pop(0)
            calls = message.get("tool_calls") or []
            if len(calls) < 2:
                out.append(message)
                continue
            results = []
            while queue and queue[0]["role"] == "tool":
                results.append(queue.pop(0))
            for index, call in enumerate(calls):
                single = {"role": "assistant", "content": "", "tool_calls": [call]}
                out.append({**message, "tool_calls": [call]} if index == 0 else single)
                out += [result for result in results if result.get("tool_call_id") == call.get("id")]
            known = [call.get("id") for call in calls]
            out += [result for result in results if result.get("tool_call_id") not in known]
        return out


def probe(render: Render) -> HistoryStyle:
    """What a template makes of calls, results and reasoning; a template that knows none of them gives the default."""
    takes_tools = _NEEDLE in _try(render, [_USER], [_TOOL])
    found = HistoryStyle(takes_tools=takes_tools)
    for short in (False, True):
        for bare in (False, True):
            as_object = HistoryStyle(takes_tools, True, False, bare, short)
            as_text = _replace(as_object, arguments_as_text=True)
            style = _better(_written_call(render, as_object), _written_call(render, as_text), as_object, as_text)
            if style is not None:
                return _with_reasoning(render, _single(render, style))
    return _with_reasoning(render, found)


def short_id(call_id: str) -> str:
    """Nine letters and digits that stand for an id, always the same."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _turns(calls: list[Message], **assistant: Any) -> list[Message]:
    results = [{"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "?"}
               for call in calls]  # fmt: skip
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls, **assistant}, *results]


def _call(index: int, arguments: Any = _WRITTEN) -> Message:
    return {"id": f"smoe-call-{index}", "type": "function", "function": {"name": f"f{index}", "arguments": arguments}}


def _better(of_object: str, of_text: str, as_object: HistoryStyle, as_text: HistoryStyle) -> HistoryStyle | None:
    """Text where it makes no difference: then a call goes back as the model wrote it. Some templates take a text for
    one argument, or write it as a string inside JSON."""
    if of_object:
        return as_text if of_text == of_object else as_object
    return as_text if of_text else None


def _written_call(render: Render, style: HistoryStyle) -> str:
    """The rendered conversation from an earlier call on; empty if the call is not in it, or not as JSON or values."""
    text = _try(render, style.apply(_turns([_call(1)])), [_TOOL])
    text = text[text.find("f1") :]
    written = _WRITTEN in text if style.arguments_as_text else _NEEDLE in text and _KEY in text
    return text if written and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text else ""


def _single(render: Render, style: HistoryStyle) -> HistoryStyle:
    """Some write the first call of a message only."""
    text = _try(render, style.apply(_turns([_call(1), _call(2, '{"second": "smoe-2nd"}')])), [_TOOL])
    return style if "smoe-2nd" in text else _replace(style, one_call_a_message=True)


def _with_reasoning(render: Render, style: HistoryStyle) -> HistoryStyle:
    calls = [_call(1, "{}")] if style.takes_calls else []
    for key in _REASONING_KEYS:
        keyed = _replace(style, reasoning_key=key)
        turns = _turns(calls) if calls else [_USER, {"role": "assistant", "content": "?"}]
        turns[1][key] = "smoe-why"
        if "smoe-why" not in _try(render, keyed.apply(turns), [_TOOL]):
            continue
        turns[1]["content"] = "smoe-text"
        both = _try(render, keyed.apply(turns), [_TOOL])
        return keyed if "smoe-why" in both and "smoe-text" in both else _replace(keyed, reasoning_or_text=True)
    return style


def _replace(style: HistoryStyle, **changes: Any) -> HistoryStyle:
    return HistoryStyle(**{**vars(style), **changes})


def _try(render: Render, messages: list[Message], tools: Any) -> str:
    try:
        return render(messages, tools)
    except UsageError:
        return ""
