"""POST /v1/responses, as OpenAI describes it, without anything kept on the server between two requests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from smoe_cli.chat.events import Done, Event, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.chat.request import ResponseFormat
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError, UnsupportedError, UsageError
from smoe_cli.serve.dialect import Call, Choice
from smoe_cli.serve.dialects import openai
from smoe_cli.serve.dialects.openai import ENVELOPE, new_id
from smoe_cli.serve.dialects.openai_chat import choice_of, format_of, tools_of
from smoe_cli.serve.fields import Body
from smoe_cli.serve.pipeline import Limits, TurnRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import PromptScored, Queued

_TEXTS = ("input_text", "output_text", "text")


class ResponsesBody(Body):
    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: openai.Count = None
    temperature: openai.Temperature = None
    top_p: openai.Probability = None
    seed: openai.Seed = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "store": (False,),
        "truncation": ("auto", "disabled"),
        "include": ([], ["reasoning.encrypted_content"]),
        "prompt": (),
        "top_logprobs": (0,),
        "max_tool_calls": (),
    }

    def request(self) -> TurnRequest:
        self.check_fields()
        text, reasoning = self.text or {}, self.reasoning or {}
        if text.get("verbosity") not in (None, "medium"):
            raise UnsupportedError("text.verbosity is not supported", param="text.verbosity", code="unsupported_field")
        form = text.get("format")
        tools = [{"type": tool.get("type"), "function": tool} for tool in self.tools or []]
        return TurnRequest(
            messages=self.messages(),
            limits=Limits(
                model=self.model,
                sampling=Sampling(temperature=self.temperature, top_p=self.top_p, seed=self._seed()),
                max_tokens=self.max_output_tokens,
            ),
            tools=tools_of(tools),
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls is not False),
            response_format=format_of(form) if form else ResponseFormat(),
            effort=reasoning.get("effort"),
        )

    def _seed(self) -> int | None:
        return None if self.seed is None else self.seed % 2**64

    def messages(self) -> list[dict[str, Any]]:
        """Items as messages: reasoning and calls that follow each other are one turn of the assistant."""
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        if not self.input:
            raise UsageError("input is empty", param="input")
        for index, item in enumerate(self.input):
            _add(found, item, f"input.{index}")
        return found


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, text = item.get("role"), _text(item.get("content"), where)
        if role == "assistant":
            _assistant(messages)["content"] += text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        named = {"name": str(item.get("name", "")), "arguments": item.get("arguments", "")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": named}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.get("output"), where)
        messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
    elif kind == "reasoning":
        parts = [*(item.get("content") or []), *(item.get("summary") or [])]
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            _assistant(messages)["reasoning_content"] = text
    else:
        raise UnsupportedError(f"{where}: an item of type {kind!r} is not supported", param=where)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn in progress."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where}: content is text or a list of text parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        elif kind in _TEXTS:
            if not isinstance(part.get("text"), str):
                raise UsageError(f"{where}: the text of a part is a {type(part.get('text')).__name__}", param=where)
            texts.append(part["text"])
        else:
            raise UnsupportedError(f"{where}: a part of type {kind!r}; this model takes text only", param=where)
    return "\n".join(texts)


# -- replies --


def usage_json(stats: Stats) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }


class Frame:
    """The response object, at any moment of its life."""

    def __init__(self, request: ResponsesBody, job: Job) -> None:
        sampling = job.parts[0].options.sampling
        self._fields = {
            "id": new_id("resp").replace("-", "_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": job.loaded.name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": job.seed,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "auto" if job.parts[0].options.slide else "disabled",
        }

    def json(
        self,
        status: str,
        output: Sequence[dict[str, Any]] = (),
        done: Done | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        reasons = {"length": "max_output_tokens", "refusal": "content_filter"}
        reason = reasons.get(done.finish_reason) if done else None
        return {
            **self._fields,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": list(output),
            "usage": usage_json(done.stats) if done else None,
        }


def status_of(done: Done) -> str:
    return "incomplete" if done.finish_reason in ("length", "refusal") else "completed"


def reasoning_item(item_id: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content}


def message_item(item_id: str, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [text_part(text)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, status: str, call: Call) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": item_id, "type": "function_call", "status": status, **about}


def body(job: Job, choices: Sequence[Choice], request: ResponsesBody) -> dict[str, Any]:
    choice = choices[0]
    assert choice.done is not None
    status = status_of(choice.done)
    output = [reasoning_item(new_id("rs"), choice.reasoning)] if choice.reasoning else []
    for part in choice.parts:
        if isinstance(part, str):
            output.append(message_item(new_id("msg"), status, part))
        else:
            output.append(call_item(new_id("fc"), "completed", part))
    return Frame(request, job).json(status, output, choice.done)


class ResponsesWriter:
    """Typed events with sequence numbers; an item is opened, filled and closed before the next."""

    def __init__(self, request: ResponsesBody, job: Job) -> None:
        self._frame = Frame(request, job)
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._kind, self._id, self._text = "", "", ""
        self._call = Call()

    def begin(self) -> bytes:
        shown = self._frame.json("in_progress")
        return self._event("response.created", response=shown) + self._event("response.in_progress", response=shown)

    def queued(self, queued: Queued) -> bytes:
        return b""

    def ping(self) -> bytes:
        return b": ping\n\n"

    def event(self, choice: int, event: Event | PromptScored) -> bytes:
        if isinstance(event, TextDelta) and event.text:
            return self._open("message") + self._add("output_text", event.text, logprobs=[])
        if isinstance(event, ReasoningDelta):
            return self._open("reasoning") + self._add("reasoning_text", event.text)
        if isinstance(event, ToolCallDelta):
            return self._call_delta(event)
        return self._done(event) if isinstance(event, Done) else b""

    def end(self) -> bytes:
        return b""

    def fail(self, error: SmoeError) -> bytes:
        found = ENVELOPE.body(ENVELOPE.status(error), error)["error"]
        short = {"code": found["code"] or found["type"], "message": found["message"]}
        failed = self._event("response.failed", response=self._frame.json("failed", self._output, None, short))
        return self._event("error", **short, param=found["param"]) + failed

    def _open(self, kind: str) -> bytes:
        if kind == self._kind:
            return b""
        data = self._close()
        self._kind, self._text = kind, ""
        if kind == "message":
            self._id = new_id("msg")
            data += self._added(message_item(self._id, "in_progress", None))
            return data + self._part("added", text_part(""))
        if kind == "reasoning":
            self._id = new_id("rs")
            data += self._added(reasoning_item(self._id, None))
            return data + self._part("added", {"type": "reasoning_text", "text": ""})
        self._id = new_id("fc")
        return data + self._added(call_item(self._id, "in_progress", self._call))

    def _close(self) -> bytes:
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        if kind == "message":
            item = message_item(self._id, "completed", self._text)
            data = self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
            data += self._part("done", text_part(self._text))
        elif kind == "reasoning":
            item = reasoning_item(self._id, self._text)
            data = self._event("response.reasoning_text.done", **self._place(), text=self._text)
            data += self._part("done", {"type": "reasoning_text", "text": self._text})
        else:
            item = call_item(self._id, "completed", self._call)
            about = {"arguments": self._call.arguments, "name": self._call.name}
            data = self._event("response.function_call_arguments.done", **self._item(), **about)
        data += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return data

    def _call_delta(self, delta: ToolCallDelta) -> bytes:
        data = b""
        if self._kind != f"call {delta.index}":
            data = self._close()
            self._call = Call(delta.id, delta.name)
            data += self._open(f"call {delta.index}")
        self._call.arguments += delta.arguments
        if delta.arguments:
            data += self._event("response.function_call_arguments.delta", **self._item(), delta=delta.arguments)
        return data

    def _add(self, kind: str, text: str, **more: Any) -> bytes:
        self._text += text
        return self._event(f"response.{kind}.delta", **self._place(), delta=text, **more)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _part(self, what: str, part: dict[str, Any]) -> bytes:
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _item(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._output)}

    def _place(self) -> dict[str, Any]:
        return {**self._item(), "content_index": 0}

    def _done(self, done: Done) -> bytes:
        data = self._close()
        status = status_of(done)
        if status == "incomplete" and self._output and self._output[-1]["type"] == "message":
            self._output[-1]["status"] = status
        return data + self._event(f"response.{status}", response=self._frame.json(status, self._output, done))

    def _event(self, kind: str, **content: Any) -> bytes:
        about = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        data = json.dumps(about, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()
