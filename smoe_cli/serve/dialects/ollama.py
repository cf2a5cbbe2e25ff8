"""POST /api/chat and /api/generate, as Ollama describes them: one JSON object a line, streamed unless told
otherwise."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from smoe_cli.chat.events import Done, Event, ReasoningDelta, Stats, TextDelta, ToolCallDelta
from smoe_cli.chat.request import ResponseFormat, Tool
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError, UnsupportedError, UsageError
from smoe_cli.serve.dialect import Call, Choice
from smoe_cli.serve.dialects.openai_chat import tools_of
from smoe_cli.serve.fields import Body
from smoe_cli.serve.pipeline import Limits, TextRequest, TurnRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import PromptScored, Queued

API_VERSION = "0.12.6"  # of the protocol spoken here, which clients compare with what they need
MEDIA = "application/x-ndjson"
_DONE = {"stop": "stop", "length": "length", "tool_calls": "stop", "refusal": "stop"}


class OllamaEnvelope:
    """{"error": message}"""

    def status(self, error: SmoeError) -> int:
        return error.http_status

    def body(self, status: int, error: SmoeError) -> dict[str, Any]:
        return {"error": f"{error.text}: {error.hint}" if error.hint else error.text}


ENVELOPE = OllamaEnvelope()


class Options(Body):
    """What is not here is about the machine, and chosen when the server starts."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    num_predict: Annotated[int | None, Field(ge=-2, lt=2**31)] = None
    num_ctx: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop: str | list[str] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "mirostat_tau": (5, 5.0),
        "mirostat_eta": (0.1,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "repeat_last_n": (256,),
        "penalize_newline": (False,),
        "num_keep": (),
    }

    def limits(self, model: str) -> Limits:
        self.check_fields()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Limits(
            model=model,
            sampling=Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repeat_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                seed=None if self.seed is None else self.seed % 2**64,
            ),
            max_tokens=self._count(),
            stop=tuple(text for text in stop if text),
            window=self.num_ctx or 0,
        )

    def _count(self) -> int | None:
        """Theirs: below 0 is as long as it likes."""
        if self.num_predict is not None and self.num_predict < 0:
            return 2**31 - 1
        return None if self.num_predict == 0 else self.num_predict


class Common(Body):
    model: str = ""
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None

    def limits(self) -> Limits:
        self.check_fields()
        return (self.options or Options()).limits(self.model)

    def response_format(self) -> ResponseFormat:
        if not self.format:
            return ResponseFormat()
        if isinstance(self.format, dict):
            return ResponseFormat("json_schema", self.format)
        if self.format == "json":
            return ResponseFormat("json_object")
        raise UsageError('format is "json" or a JSON schema', param="format")

    def thinking(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"effort": self.think}
        return {"thinking": self.think}


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(Common):
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "template": ("",),
        "truncate": (True,),
        "shift": (True,),
    }

    def request(self) -> TurnRequest:
        tools: tuple[Tool, ...] = tools_of(self.tools or [])
        messages = [message_of(message) for message in self.messages or []]
        form = self.response_format()
        return TurnRequest(messages, self.limits(), tools=tools, response_format=form, **self.thinking())


class GenerateBody(Common):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "width": (0,),
        "height": (0,),
        "steps": (0,),
        "truncate": (True,),
        "shift": (True,),
    }

    def request(self) -> TurnRequest | TextRequest:
        if self.images:
            raise UnsupportedError("images: this model takes text only", param="images")
        if self.raw:
            if self.system or self.response_format().kind != "text":
                raise UnsupportedError("raw sends the bare prompt: no system, no format", param="raw")
            return TextRequest(self.prompt or "", self.limits())
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt or ""}]
        return TurnRequest(messages, self.limits(), response_format=self.response_format(), **self.thinking())


def message_of(message: Message) -> dict[str, Any]:
    if message.images:
        raise UnsupportedError("a message holds images; this model takes text only", param="messages")
    found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_name:
        found["name"] = message.tool_name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [_call(call, index) for index, call in enumerate(message.tool_calls)]
    return found


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError("a tool call of an assistant's message has no function name", param="messages")
    named = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return {"id": str(call.get("id") or f"call_{index}"), "type": "function", "function": named}


# -- replies --


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded_body(model: str, chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks for the model to be loaded and for nothing else."""
    said = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": now(), **said, "done": True, "done_reason": "load"}


class Timer:
    """The figures that close a reply, in nanoseconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()

    def figures(self, stats: Stats) -> dict[str, Any]:
        total = time.perf_counter_ns() - self._began
        prompt = int((stats.ttft_ms or 0) * 1e6)
        evaluated = stats.completion_tokens
        speed = stats.decode_tok_s
        return {
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": evaluated,
            "eval_duration": int(evaluated / speed * 1e9) if speed else max(total - prompt, 0),
        }


def body(job: Job, choices: Sequence[Choice], timer: Timer, chat: bool) -> dict[str, Any]:
    choice = choices[0]
    said = _said(chat, choice.text, choice.reasoning, choice.calls)
    return {"model": job.loaded.name, "created_at": now(), **said, **_closing(choice.finish, choice.stats, timer)}


def _closing(finish: str, stats: Stats, timer: Timer) -> dict[str, Any]:
    return {"done": True, "done_reason": _DONE.get(finish, finish), **timer.figures(stats)}


def _said(chat: bool, text: str, thinking: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
    if not chat:
        return {"response": text} | ({"thinking": thinking} if thinking else {})
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_call_json(call) for call in calls]
    return {"message": message}


def _call_json(call: Call) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = {}
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}


class OllamaWriter:
    """A line for each thing that happens. A tool call is written when it is whole: their arguments are an object."""

    def __init__(self, job: Job, chat: bool) -> None:
        self._job, self._chat = job, chat
        self._timer = Timer()
        self._choice = Choice()
        self._told = 0

    def begin(self) -> bytes:
        return b""

    def queued(self, queued: Queued) -> bytes:
        return b""

    def ping(self) -> bytes:
        return self._line(_said(self._chat, ""))  # lines have no comments; one that says nothing changes nothing

    def event(self, choice: int, event: Event | PromptScored) -> bytes:
        self._choice.see(event)
        if isinstance(event, TextDelta):
            return self._calls(len(self._choice.calls)) + self._line(_said(self._chat, event.text))
        if isinstance(event, ReasoningDelta):
            return self._line(_said(self._chat, "", event.text))
        if isinstance(event, ToolCallDelta):
            return self._calls(event.index)
        if isinstance(event, Done):
            data = self._calls(len(self._choice.calls))
            return data + self._line(_said(self._chat, ""), **_closing(event.finish_reason, event.stats, self._timer))
        return b""

    def end(self) -> bytes:
        return b""

    def fail(self, error: SmoeError) -> bytes:
        return json.dumps(ENVELOPE.body(ENVELOPE.status(error), error)).encode() + b"\n"

    def _calls(self, before: int) -> bytes:
        """Those that are whole: all ``before`` this one."""
        ready, self._told = self._choice.calls[self._told : before], max(before, self._told)
        return self._line(_said(self._chat, "", "", ready)) if ready else b""

    def _line(self, said: dict[str, Any], **more: Any) -> bytes:
        content = {"model": self._job.loaded.name, "created_at": now(), **said, **(more or {"done": False})}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def tag_json(about: dict[str, Any]) -> dict[str, Any]:
    """A model in /api/tags, of what /v1/models says of it."""
    digest = str((about.get("lineage") or {}).get("source") or "").removeprefix("sha256:")
    return {
        "name": about["id"],
        "model": about["id"],
        "modified_at": datetime.fromtimestamp(about["created"], UTC).isoformat().replace("+00:00", "Z"),
        "size": about["bytes"],
        "digest": digest,
        "details": details_json(about),
    }


def details_json(about: dict[str, Any]) -> dict[str, Any]:
    family = str(about["model_type"] or "")
    return {
        "parent_model": "",
        "format": "smoe",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": str(about["quant"] or ""),
    }


def show_json(
    about: dict[str, Any], capabilities: list[str], template: str, manifest: dict[str, Any]
) -> dict[str, Any]:
    """A model in /api/show."""
    family = str(about["model_type"] or "")
    generation = manifest.get("generation") or {}
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in sorted(generation.items())),
        "template": template,
        "details": details_json(about),
        "model_info": {
            "general.architecture": family,
            f"{family}.block_count": about["layers"],
            f"{family}.expert_count": about["experts"],
            f"{family}.expert_used_count": about["top_k"],
            f"{family}.context_length": about["max_model_len"],
        },
        "capabilities": capabilities,
        "modified_at": datetime.fromtimestamp(about["created"], UTC).isoformat().replace("+00:00", "Z"),
    }
