"""POST /v1/completions: bare text or ids, no template. ``echo`` with ``logprobs`` scores the prompt itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from smoe_cli.chat.events import Done, Event, Generated, Stats, TextDelta
from smoe_cli.errors import SmoeError, UsageError
from smoe_cli.serve.dialect import Choice, usage_of
from smoe_cli.serve.dialects.openai import SamplingBody, new_id, sse, sse_error, usage_json
from smoe_cli.serve.dialects.openai_chat import FINISH, figures
from smoe_cli.serve.pipeline import Limits, TextRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.run import PromptScored, Queued

MAX_PROMPTS = 256
Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


class CompletionBody(SamplingBody):
    prompt: str | list[str] | Ids | list[Ids]
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "suffix": ("",),
        "best_of": (1,),
        "response_format": ({"type": "text"},),
        "previous_response_id": (),
    }

    def requests(self) -> list[TextRequest]:
        """One for each prompt; together they have one answer."""
        self.check_fields()
        limits = Limits(
            model=self.model,
            sampling=self.sampling(),
            max_tokens=self.max_tokens,
            stop=self.stops(),
            bias=self.bias(),
            logprobs=self.logprobs,
            n=self.n or 1,
        )
        prompts = self.prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise UsageError(f"{len(prompts)} prompts: 1 to {MAX_PROMPTS}", param="prompt")
        return [TextRequest(prompt, limits, bool(self.echo)) for prompt in prompts]

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


def echoed(job: Job, index: int) -> str:
    """The prompt as text, where it is to stand in front of the reply."""
    part = job.parts[index]
    return job.loaded.model.tokenizer.backend.decode(part.prompt.ids, skip_special_tokens=False) if part.echo else ""


class Tokens:
    """The four parallel lists of the older log-probability form, of a prompt and of what follows it."""

    def __init__(self, job: Job, index: int) -> None:
        self._text_of = job.token_text.text_of
        self._part = job.parts[index]
        self._at = 0

    def of_prompt(self, scored: PromptScored | None) -> dict[str, list[Any]]:
        """Nothing precedes the first token, so it has no probability."""
        ids = self._part.prompt.ids
        scores = [None, *(scored.logprobs if scored else ())]
        tops = [None, *(scored.tops if scored else ())]
        return self._lists([(token, scores[i], tops[i] or ()) for i, token in enumerate(ids)])

    def of_reply(self, tokens: Sequence[Generated]) -> dict[str, list[Any]]:
        return self._lists([(token.id, token.logprob, token.top) for token in tokens])

    def _lists(self, rows: list[tuple[int, float | None, Sequence[tuple[int, float]]]]) -> dict[str, list[Any]]:
        texts = [self._text_of(token) for token, _, _ in rows]
        offsets = []
        for text in texts:
            offsets.append(self._at)
            self._at += len(text)
        tops = [
            None if logprob is None else self._top(text, logprob, top)
            for text, (_, logprob, top) in zip(texts, rows, strict=True)
        ]
        logprobs = [logprob for _, logprob, _ in rows]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, text: str, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By text, so two tokens that read alike share an entry: the likelier, which comes first, keeps it."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._text_of(token), value)
        return found or {text: logprob}


def joined(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: a[key] + b[key] for key in a}


def body(job: Job, choices: Sequence[Choice], prompts: int) -> dict[str, Any]:
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": job.loaded.name,
        "system_fingerprint": job.fingerprint,
        "seed": job.seed,
        "choices": [_choice(index, choice, job) for index, choice in enumerate(choices)],
        "usage": usage_json(usage_of([choice.stats for choice in choices], prompts)),
        "smoe": {**figures(choices[0].stats), "window": job.window, "slides": job.slides},
    }


def _choice(index: int, choice: Choice, job: Job) -> dict[str, Any]:
    part = job.parts[index]
    logprobs = None
    if part.options.logprobs is not None:
        lists = Tokens(job, index)
        before = lists.of_prompt(choice.scored) if part.echo else lists.of_reply([])
        logprobs = joined(before, lists.of_reply(choice.tokens))
    text = echoed(job, index) + choice.text
    finish = FINISH.get(choice.finish, choice.finish)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class CompletionWriter:
    def __init__(self, request: CompletionBody, job: Job, prompts: int) -> None:
        self._job, self._prompts = job, prompts
        self._usage = request.option("include_usage")
        self._stats: dict[int, Stats] = {}
        self._asked = job.parts[0].options.logprobs is not None
        self._tokens = [Tokens(job, index) for index in range(len(job.parts))]
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.loaded.name,
            "system_fingerprint": job.fingerprint,
            "seed": job.seed,
        }
        self._tail = {"usage": None} if self._usage else {}

    def begin(self) -> bytes:
        """An echo without log-probabilities is known at once; with them it comes when it has been scored."""
        echoes = [index for index, part in enumerate(self._job.parts) if part.echo and not self._asked]
        return b"".join(self._chunk(index, echoed(self._job, index)) for index in echoes) or b": ping\n\n"

    def queued(self, queued: Queued) -> bytes:
        return b""

    def ping(self) -> bytes:
        return b": ping\n\n"

    def event(self, choice: int, event: Event | PromptScored) -> bytes:
        if isinstance(event, TextDelta):
            lists = self._tokens[choice].of_reply(event.tokens) if self._asked else None
            return self._chunk(choice, event.text, lists)
        if isinstance(event, PromptScored):
            return self._chunk(choice, echoed(self._job, choice), self._tokens[choice].of_prompt(event))
        if isinstance(event, Done):
            self._stats[choice] = event.stats
            return self._chunk(choice, "", None, FINISH.get(event.finish_reason, event.finish_reason))
        return b""

    def end(self) -> bytes:
        data = b""
        if self._usage:
            usage = usage_json(usage_of([self._stats[index] for index in sorted(self._stats)], self._prompts))
            data = sse({**self._head, "choices": [], "usage": usage})
        return data + b"data: [DONE]\n\n"

    def fail(self, error: SmoeError) -> bytes:
        return sse_error(error)

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, list[Any]] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return sse({**self._head, "choices": [choice], **self._tail})
