"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic describes them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from smoe_cli.chat.events import Done, Event, PromptSize, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError, UnsupportedError, UsageError
from smoe_cli.serve.admission import QueueFull
from smoe_cli.serve.dialect import Choice
from smoe_cli.serve.fields import Body
from smoe_cli.serve.pipeline import Limits, TurnRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import PromptScored, Queued

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "refusal": "refusal"}


class AnthropicEnvelope:
    """{"type": "error", "error": {type, message}}"""

    def status(self, error: SmoeError) -> int:
        return 529 if isinstance(error, QueueFull) else error.http_status

    def body(self, status: int, error: SmoeError) -> dict[str, Any]:
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        text = f"{error.text}: {error.hint}" if error.hint else error.text
        return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


ENVELOPE = AnthropicEnvelope()


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | list[dict[str, Any]]


class CountBody(Body):
    """What a prompt is made of; all that count_tokens takes."""

    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "container": (), "previous_response_id": ()}

    def request(self, limits: Limits | None = None) -> TurnRequest:
        self.check_fields()
        config = self.output_config or {}
        messages = [*system_of(self.system), *(one for message in self.messages for one in messages_of(message))]
        return TurnRequest(
            messages=messages,
            begun=_begun(messages.pop()) if self.messages[-1].role == "assistant" else "",
            limits=limits or Limits(model=self.model),
            tools=tuple(_tool(tool, index) for index, tool in enumerate(self.tools or [])),
            tool_choice=_choice(self.tool_choice),
            response_format=_format(config.get("format") or self.output_format),
            thinking=_thinking(self.thinking),
            effort=config.get("effort"),
            effort_is_hint=True,
        )


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None

    def request(self, limits: Limits | None = None) -> TurnRequest:
        return super().request(
            Limits(
                model=self.model,
                sampling=Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k),
                max_tokens=self.max_tokens,
                stop=tuple(text for text in self.stop_sequences or [] if text),
            )
        )


def _begun(message: dict[str, Any]) -> str:
    """A last message of the assistant's is one to go on with."""
    text = str(message["content"])
    if message.get("tool_calls"):
        raise UsageError("the last message is a tool_use without its tool_result", param="messages")
    if text != text.rstrip():
        raise UsageError("the assistant's last message, to be gone on with, ends in white space", param="messages")
    return text


def system_of(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    content = [_text(block, "system") for block in system] if isinstance(system, list) else system
    return [{"role": "system", "content": content}] if content else []


def messages_of(message: Message) -> list[dict[str, Any]]:
    """One message of theirs is, with the results of tools in it, several of a template's."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content)]
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in message.content:
        if block.get("type") == "tool_result":
            found.append(_result(block))
        else:
            texts.append(_text(block, f"a {message.role} message"))
    if texts or not found:
        found.append({"role": message.role, "content": texts})
    return found


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue  # sealed by another service: nobody here can read it
        elif kind == "tool_use":
            function = {"name": str(block.get("name", "")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        else:
            texts.append(_text(block, "an assistant message"))
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(part, "a tool result") for part in content)
    if content is not None and not isinstance(content, str):
        raise UsageError("the content of a tool_result is text or a list of text blocks", param="messages")
    return {"role": "tool", "content": content or "", "tool_call_id": str(block.get("tool_use_id", ""))}


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind != "text" or not isinstance(block.get("text"), str):
        what = "this model takes text only" if kind in ("image", "document") else "no such block is known there"
        raise UnsupportedError(f"{where} holds a block of type {kind!r}; {what}", param="messages")
    return str(block["text"])


def _tool(tool: dict[str, Any], index: int) -> Tool:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedError(f"tools.{index}: {kind!r} runs on its maker's servers", param=f"tools.{index}")
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise UsageError(f"tools.{index}: the tool has no name", param=f"tools.{index}")
    if schema is not None and not isinstance(schema, dict):
        raise UsageError(f"tools.{index}: input_schema is not a JSON schema", param=f"tools.{index}")
    return Tool(name, str(tool.get("description") or ""), schema, tool.get("strict") is True)


def _choice(choice: dict[str, Any] | None) -> ToolChoice:
    given = choice or {"type": "auto"}
    kind, parallel = given.get("type"), given.get("disable_parallel_tool_use") is not True
    if kind == "auto":
        return ToolChoice("auto", None, parallel)
    if kind == "any":
        return ToolChoice("required", None, parallel)
    if kind == "none":
        return ToolChoice("none", None, parallel)
    if kind == "tool" and isinstance(given.get("name"), str):
        return ToolChoice("required", given["name"], parallel)
    raise UsageError("tool_choice is auto, any, none, or a tool with its name", param="tool_choice")


def _format(given: dict[str, Any] | None) -> ResponseFormat:
    if given is None or given.get("type") == "text":
        return ResponseFormat()
    if given.get("type") == "json_schema" and isinstance(given.get("schema"), dict):
        return ResponseFormat("json_schema", given["schema"])
    raise UsageError("the output format is a json_schema with its schema", param="output_config")


def _thinking(given: dict[str, Any] | None) -> bool | None:
    """``adaptive`` leaves it to the model, as no word at all does."""
    kind = (given or {"type": "adaptive"}).get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UsageError("thinking is enabled, disabled or adaptive", param="thinking")
    return None if kind == "adaptive" else kind == "enabled"


# -- replies --


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def usage_json(stats: Stats) -> dict[str, Any]:
    return {**input_usage(stats.prompt_tokens, stats.cached_tokens), "output_tokens": stats.completion_tokens}


def input_usage(prompt: int, cached: int) -> dict[str, Any]:
    """Their ``input_tokens`` are those that were not found in a cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "service_tier": "standard",
    }


def stop_reason(finish: str, stop: str | None) -> str:
    return "stop_sequence" if stop is not None else _STOP.get(finish, finish)


def body(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    choice = choices[0]
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    for part in choice.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)})
    stop = choice.done.stop if choice.done else None
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": job.loaded.name,
        "content": content,
        "stop_reason": stop_reason(choice.finish, stop),
        "stop_sequence": stop,
        "usage": usage_json(choice.stats),
    }


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


class MessagesWriter:
    """Named events: message_start once the engine has the prompt, a block at a time, message_delta, message_stop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._started = False
        self._index = -1
        self._block = ""  # the kind of the open one: text, thinking, or tool_use and its call's index

    def begin(self) -> bytes:
        return b": waiting\n\n"

    def queued(self, queued: Queued) -> bytes:
        return b""

    def ping(self) -> bytes:
        # Before message_start only a comment is safe: helpers take the first event for it.
        return _event("ping") if self._started else b": waiting\n\n"

    def event(self, choice: int, event: Event | PromptScored) -> bytes:
        if isinstance(event, TextDelta):
            delta = {"type": "text_delta", "text": event.text}
            return self._open("text", {"type": "text", "text": ""}) + self._delta(delta) if event.text else b""
        if isinstance(event, ReasoningDelta):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            return self._open("thinking", empty) + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, ToolCallDelta):
            return self._call(event)
        if isinstance(event, PromptSize):
            return self._start(event)
        return self._done(event) if isinstance(event, Done) else b""

    def end(self) -> bytes:
        return _event("message_stop")

    def fail(self, error: SmoeError) -> bytes:
        return _event("error", error=ENVELOPE.body(ENVELOPE.status(error), error)["error"])

    def _start(self, size: PromptSize) -> bytes:
        if self._started:  # the engine was started again
            return b""
        self._started = True
        message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self._job.loaded.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**input_usage(size.prompt_tokens, size.cached_tokens), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def _call(self, delta: ToolCallDelta) -> bytes:
        empty = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        data = self._open(f"tool_use {delta.index}", empty)
        if delta.arguments:
            data += self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
        return data

    def _open(self, block: str, empty: dict[str, Any]) -> bytes:
        if block == self._block:
            return b""
        data = self._close()
        self._index, self._block = self._index + 1, block
        return data + _event("content_block_start", index=self._index, content_block=empty)

    def _close(self) -> bytes:
        if not self._block:
            return b""
        data = b""
        if self._block == "thinking":
            data = self._delta({"type": "signature_delta", "signature": ""})
        self._block = ""
        return data + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _done(self, done: Done) -> bytes:
        reason = {"stop_reason": stop_reason(done.finish_reason, done.stop), "stop_sequence": done.stop}
        return self._close() + _event("message_delta", delta=reason, usage=usage_json(done.stats))


def _event(kind: str, **content: Any) -> bytes:
    data = json.dumps({"type": kind, **content}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
