"""What OpenAI's three APIs share: errors, usage, sampling fields, log-probabilities, tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError, UsageError
from smoe_cli.serve.dialect import Usage
from smoe_cli.serve.fields import Body

Temperature = Annotated[float | None, Field(ge=0, le=2)]
Probability = Annotated[float | None, Field(ge=0, le=1)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**64)]
Count = Annotated[int | None, Field(ge=1, lt=2**31)]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class OpenAIEnvelope:
    """{"error": {message, type, param, code}}"""

    def status(self, error: SmoeError) -> int:
        return error.http_status

    def body(self, status: int, error: SmoeError) -> dict[str, Any]:
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        text = f"{error.text}: {error.hint}" if error.hint else error.text
        return {"error": {"message": text, "type": kind, "param": error.param or None, "code": error.code or None}}


ENVELOPE = OpenAIEnvelope()


class SamplingBody(Body):
    """Fields that chat and plain completions have in common; ``top_k`` and those below it are extensions."""

    model: str = ""
    temperature: Temperature = None
    top_p: Probability = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    seed: Seed = None
    stop: str | list[str] | None = None
    n: Annotated[int | None, Field(ge=1, le=16)] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    min_p: Probability = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=None if self.seed is None else self.seed % 2**64,
        )

    def stops(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    def bias(self) -> dict[int, float]:
        try:
            return {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise UsageError("the keys of logit_bias are token ids", param="logit_bias") from None

    def option(self, name: str) -> bool:
        """A switch of ``stream_options``: ``include_usage``, and our own ``include_progress``."""
        return bool((self.stream_options or {}).get(name))


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(content: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODE(content).encode() + b"\n\n"


class TextFrame:
    """An event that is the same for every token, but for a text: only that is encoded anew. ``make`` writes the event
    around a text."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._before, _, self._after = make(_SPOT).rpartition(_ENCODE(_SPOT).encode())

    def around(self, text: str) -> bytes:
        return self._before + _ENCODE(text).encode() + self._after


_SPOT = "\uffff"


def sse_error(error: SmoeError) -> bytes:
    return b"data: " + json.dumps(ENVELOPE.body(ENVELOPE.status(error), error)).encode() + b"\n\ndata: [DONE]\n\n"
