"""POST /v1/chat/completions, as OpenAI describes it, with the extensions that others have made common.

Extensions: ``top_k min_p repetition_penalty chat_template_kwargs`` in a request, ``reasoning_content`` beside
``content``, ``seed`` and ``smoe`` (figures) in a reply. ``stream_options.include_progress`` adds chunks without
choices whose ``smoe`` says where the request stands: {"phase": "queued", "ahead"}, {"phase": "starting"},
{"phase": "restarted", "reason"}, {"phase": "prefill", "prompt_tokens", "cached_tokens", "window", "slides", "done",
"total"}, a few times a second {"phase": "decode", "tokens", "decode_tok_s"}, and at the end {"phase": "done",
"ttft_ms", "prefill_tok_s", "decode_tok_s", "hit_rate", "disk_bytes_s"}."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from smoe_cli.chat.events import (
    Done,
    Event,
    Generated,
    PrefillProgress,
    PromptSize,
    ReasoningDelta,
    Restarted,
    Stats,
    TextDelta,
    ToolCallDelta,
)
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.errors import SmoeError, UsageError
from smoe_cli.serve.dialect import Choice, usage_of
from smoe_cli.serve.dialects import openai
from smoe_cli.serve.dialects.openai import SamplingBody, TextFrame, new_id, sse, sse_error, usage_json
from smoe_cli.serve.pipeline import Limits, TurnRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import PromptScored, Queued

DECODE_REPORT_S = 0.25
FINISH = {"refusal": "content_filter"}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | list[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: openai.Count = None
    max_completion_tokens: openai.Count = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": (),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "verbosity": ("medium",),
        "store": (False,),
        "previous_response_id": (),
    }

    def request(self) -> TurnRequest:
        self.check_fields()
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs", param="top_logprobs")
        limits = Limits(
            model=self.model,
            sampling=self.sampling(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stops(),
            bias=self.bias(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            n=self.n or 1,
        )
        switches = dict(self.chat_template_kwargs or {})
        thinking = switches.pop("enable_thinking", switches.pop("thinking", None))
        return TurnRequest(
            messages=[message_of(message) for message in self.messages],
            limits=limits,
            tools=tools_of(self.tools or []),
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls is not False),
            response_format=format_of(self.response_format),
            thinking=None if thinking is None else bool(thinking),
            effort=self.reasoning_effort,
            switches=switches,
        )


def message_of(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
        del plain["reasoning"]
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise UsageError("a tool call of an assistant's message is not a function call", param="messages")
    if not isinstance(function.get("name"), str):
        raise UsageError("a tool call of an assistant's message has no function name", param="messages")
    arguments = function.get("arguments", "")
    named = {"name": function["name"], "arguments": arguments}  # as the model wrote them, where they come from it
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def tools_of(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
    return tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(tools))


def _tool(tool: dict[str, Any], where: str) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise UsageError(f"{where}: a tool of type {tool.get('type')!r}; only functions are supported", param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(f"{where}: the function has no name", param=where)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise UsageError(f"{where}: parameters is not a JSON schema", param=where)
    strict = function.get("strict") is True
    return Tool(function["name"], str(function.get("description") or ""), parameters, strict)


def choice_of(choice: str | dict[str, Any] | None, parallel: bool) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice("auto", None, parallel)
    if choice == "none":
        return ToolChoice("none", None, parallel)
    if choice == "required":
        return ToolChoice("required", None, parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = (choice.get("function") or choice).get("name")
        if isinstance(name, str) and name:
            return ToolChoice("required", name, parallel)
    raise UsageError("tool_choice is auto, none, required or a named function", param="tool_choice")


def format_of(given: dict[str, Any] | None) -> ResponseFormat:
    kind = "text" if given is None else given.get("type")
    if kind == "text":
        return ResponseFormat()
    if kind == "json_object":
        return ResponseFormat("json_object")
    if given is not None and kind == "json_schema":
        # Chat has {"json_schema": {"name", "schema"}}, responses {"name", "schema"}.
        schema = (given.get("json_schema") or given).get("schema")
        if not isinstance(schema, dict):
            raise UsageError("response_format has no schema", param="response_format")
        return ResponseFormat("json_schema", schema)
    raise UsageError(f"response_format {kind!r} is not supported", param="response_format", code="unsupported_field")


def figures(stats: Stats) -> dict[str, Any]:
    names = ("ttft_ms", "prefill_tok_s", "decode_tok_s", "hit_rate", "disk_bytes_s")
    return {name: round(value, 3) for name in names if (value := getattr(stats, name)) is not None}


def logprobs_json(tokens: Sequence[Generated], job: Job) -> dict[str, Any]:
    return {"content": [_logprob(token, job) for token in tokens], "refusal": None}


def _logprob(token: Generated, job: Job) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = job.token_text.bytes_of(token)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

    own = entry(token.id, token.logprob if token.logprob is not None else 0.0)
    return {**own, "top_logprobs": [entry(*pair) for pair in token.top]}


def body(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.loaded.name,
        "system_fingerprint": job.fingerprint,
        "seed": job.seed,
        "choices": [_choice(index, choice, job) for index, choice in enumerate(choices)],
        "usage": usage_json(usage_of(choice.stats for choice in choices)),
        "smoe": {**figures(choices[0].stats), "window": job.window, "slides": job.slides},
    }


def _choice(index: int, choice: Choice, job: Job) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    asked = job.parts[index].options.logprobs is not None
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_json(choice.tokens, job) if asked else None,
        "finish_reason": FINISH.get(choice.finish, choice.finish),
    }


class ChatWriter:
    """Server-sent events, a chunk for each thing that happens."""

    def __init__(self, request: ChatBody, job: Job) -> None:
        self._job = job
        self._usage, self._progress = request.option("include_usage"), request.option("include_progress")
        self._stats: dict[int, Stats] = {}
        self._first = self._told = 0.0
        self._logprobs = job.parts[0].options.logprobs is not None
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": job.loaded.name,
            "system_fingerprint": job.fingerprint,
            "seed": job.seed,
        }
        self._tail = {"usage": None} if self._usage else {}
        self._text = [
            TextFrame(lambda text, index=index: self._chunk(index, {"content": text}))  # type: ignore[misc]
            for index in range(len(job.parts))
        ]

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first) for index in range(len(self._job.parts)))

    def queued(self, queued: Queued) -> bytes:
        return self._report(phase="queued", ahead=queued.ahead) if queued.ahead else self._report(phase="starting")

    def ping(self) -> bytes:
        return b": ping\n\n"

    def event(self, choice: int, event: Event | PromptScored) -> bytes:
        if isinstance(event, TextDelta):
            if not self._logprobs:
                return self._text[choice].around(event.text)
            return self._chunk(choice, {"content": event.text}, logprobs_json(event.tokens, self._job))
        if isinstance(event, ReasoningDelta):
            return self._chunk(choice, {"reasoning_content": event.text})
        if isinstance(event, ToolCallDelta):
            return self._chunk(choice, {"tool_calls": [_call_delta(event)]})
        if isinstance(event, Done):
            return self._done(choice, event)
        return self._where(event) if self._progress else b""

    def end(self) -> bytes:
        data = b""
        if self._usage:
            usage = usage_json(usage_of(self._stats[index] for index in sorted(self._stats)))
            data = sse({**self._head, "choices": [], "usage": usage})
        return data + b"data: [DONE]\n\n"

    def fail(self, error: SmoeError) -> bytes:
        return sse_error(error)

    def _done(self, choice: int, done: Done) -> bytes:
        self._stats[choice] = done.stats
        finish = FINISH.get(done.finish_reason, done.finish_reason)
        return self._chunk(choice, {}, None, finish) + self._report(phase="done", **figures(done.stats))

    def _where(self, event: Event | PromptScored) -> bytes:
        if isinstance(event, PromptSize):
            size = {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
            return self._report(phase="prefill", **size, window=self._job.window, slides=event.slides)
        if isinstance(event, PrefillProgress):
            return self._report(phase="prefill", done=event.done, total=event.total)
        if isinstance(event, Restarted):
            return self._report(phase="restarted", reason=event.reason)
        return self._decoding(event) if isinstance(event, Generated) else b""

    def _decoding(self, event: Generated) -> bytes:
        now = time.monotonic()
        self._first = self._first or now
        if now - self._told < DECODE_REPORT_S:
            return b""
        self._told = now
        speed = {"decode_tok_s": round((event.tokens - 1) / (now - self._first), 3)} if now > self._first else {}
        return self._report(phase="decode", tokens=event.tokens, **speed)

    def _report(self, **about: Any) -> bytes:
        return sse({**self._head, "choices": [], **self._tail, "smoe": about}) if self._progress else b""

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse({**self._head, "choices": [choice], **self._tail})


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    call: dict[str, Any] = {"index": delta.index}
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.id or delta.name:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, "arguments": delta.arguments}
    return {**call, "function": function}
