"""From a request to a job that is known to be good: everything that can be refused is refused here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any

from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.request import ResponseFormat, ToolChoice
from smoe_cli.chat.session import TurnOptions, render, too_long
from smoe_cli.chat.template import ChatTemplate, Message, Prompt
from smoe_cli.chat.token_text import TokenText
from smoe_cli.chat.tools.equip import equip
from smoe_cli.engine.manager import resolve_sampling
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import UnsupportedError, UsageError
from smoe_cli.serve import noise
from smoe_cli.serve.fleet import Fleet, Loaded
from smoe_cli.serve.guard import Guard, Verdict
from smoe_cli.serve.pipeline import Limits, TextRequest, TurnRequest
from smoe_cli.serve.policy import Policy

MAX_CHOICES = 16
MAX_STOPS = 64
# Variables that a template is rendered with anyway: no business of a client's.
_OURS = {
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt", "enable_thinking",
    "begun",
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What the server's flags say of requests that do not."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    slide: bool = True


@dataclass(frozen=True)
class House:
    """The operator's own rules: on what leaves, and on what comes in."""

    policy: Policy | None = None
    guard: Guard | None = None


@dataclass(frozen=True)
class Part:
    """One generation: a choice of the reply, or the reply to one of several prompts. With ``verdict.reply`` nothing is
    generated: the guard has answered."""

    prompt: Prompt
    options: TurnOptions
    echo: bool = False
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Job:
    """A request that has been found good. ``seed`` is what its first choice is drawn with."""

    loaded: Loaded
    parts: tuple[Part, ...]
    seed: int
    label: str = ""  # the request's word for the model

    @property
    def prompt_tokens(self) -> int:
        return len(self.parts[0].prompt.ids)

    @property
    def window(self) -> int:
        return self.loaded.window

    @property
    def token_text(self) -> TokenText:
        return self.loaded.token_text

    @property
    def fingerprint(self) -> str:
        return self.loaded.fingerprint

    @property
    def slides(self) -> bool:
        return any(len(part.prompt.ids) > self.window for part in self.parts)


class Preparer:
    """May be called from any thread. Raises UsageError and UnsupportedError, and what is wrong with a damaged vault."""

    def __init__(self, fleet: Fleet, defaults: Defaults, house: House = House()) -> None:
        self.fleet = fleet
        self.defaults = defaults
        self.house = house

    def at_once(self, label: str) -> bool:
        """Whether a short request with this model field waits for nothing: its model is there, no guard is asked."""
        return self.house.guard is None and label in ("", self.fleet.target.name)

    def turn(self, request: TurnRequest) -> Job:
        loaded = self.fleet.open(request.limits.model)
        options = self._options(request.limits, loaded)
        messages, options = self._dressed(request, loaded, options)
        verdict = None
        if self.house.guard is not None:
            tools = [tool.for_template() for tool in request.tools]
            verdict = self.house.guard.ask(loaded.name, request.messages, tools)
            messages = noise.quiet(verdict.messages)
        prompt = render(loaded.model, messages, options)
        return self._job(loaded, [prompt], request.limits, options, verdict=verdict)

    def texts(self, requests: list[TextRequest]) -> Job:
        """Several bare prompts that share their limits."""
        limits = requests[0].limits
        loaded = self.fleet.open(limits.model)
        options = replace(self._options(limits, loaded), raw=True)
        prompts = [_text_prompt(request, loaded, options) for request in requests]
        return self._job(loaded, prompts, limits, options, requests[0].echo)

    def count(self, request: TurnRequest) -> int:
        """Tokens of the prompt, which may be longer than any window."""
        loaded = self.fleet.open(request.limits.model)
        options = replace(self._options(request.limits, loaded), window=2**31, slide=True)
        # Only what the prompt is made of: no grammar has to be compiled to count.
        tools = tuple(replace(tool, strict=False) for tool in request.tools)
        choice = ToolChoice("none" if request.tool_choice.mode == "none" else "auto")
        bare = replace(request, tools=tools, tool_choice=choice, response_format=ResponseFormat())
        messages, options = self._dressed(bare, loaded, options)
        return len(render(loaded.model, messages, options).ids)

    def _dressed(self, request: TurnRequest, loaded: Loaded, options: TurnOptions) -> tuple[list[Message], TurnOptions]:
        """The messages, and the options with what concerns a conversation only."""
        template = template_of(loaded)
        thinking, switches = thinking_of(request, template, loaded)
        options = replace(options, thinking=thinking, switches=switches, begun=request.begun)
        options = equip(loaded.model, options, request.tools, request.tool_choice, request.response_format)
        return noise.quiet(request.messages), options

    def _options(self, limits: Limits, loaded: Loaded) -> TurnOptions:
        _check(limits, loaded)
        sampling = resolve_sampling(limits.sampling, self.defaults.sampling, loaded.model.generation)
        if limits.sampling.seed is None and self.defaults.sampling.seed is None:
            sampling = replace(sampling, seed=SystemRandom().getrandbits(53))  # a whole number in every JSON reader
        asked = self.defaults.max_tokens if limits.max_tokens is None else limits.max_tokens
        return TurnOptions(
            sampling=sampling,
            max_tokens=min(asked, loaded.window),
            stop=limits.stop,
            window=loaded.window,
            slide=self.defaults.slide,
            bias=limits.bias,
            logprobs=limits.logprobs,
            hooks=Hooks(output_filter=self.house.policy.filter if self.house.policy else None),
        )

    def _job(
        self,
        loaded: Loaded,
        prompts: list[Prompt],
        limits: Limits,
        options: TurnOptions,
        echo: bool = False,
        verdict: Verdict | None = None,
    ) -> Job:
        seed = options.sampling.seed or 0
        parts = []
        for prompt in prompts:
            room = options.max_tokens or 0
            if not options.slide:
                room = min(room, options.window - len(prompt.ids) + 1)
            for choice in range(limits.n):
                sampling = replace(options.sampling, seed=(seed + choice) % 2**64)
                chosen = replace(options, sampling=sampling, max_tokens=room)
                parts.append(Part(prompt, chosen, echo, verdict if verdict and verdict.reply is not None else None))
        return Job(loaded, tuple(parts), seed, limits.model)


def template_of(loaded: Loaded) -> ChatTemplate:
    try:
        return loaded.model.template
    except UsageError as error:
        raise UnsupportedError(error.text, error.hint, code="unsupported_chat_format") from error


def thinking_of(request: TurnRequest, template: ChatTemplate, loaded: Loaded) -> tuple[bool | None, dict[str, Any]]:
    """What a wish about reasoning, in whatever form, is to the template: its switch, and further variables. A wish that
    would leave the prompt as it is and that the model does not fulfil anyway is refused."""
    switches = dict(request.switches)
    for name in switches:
        if name in _OURS or name not in template.source:
            raise UnsupportedError(f"the chat template has no variable {name!r}", param="chat_template_kwargs")
    thinking, param = request.thinking, "thinking"
    if request.effort is not None:
        if "reasoning_effort" in template.source and request.effort != "none":
            switches["reasoning_effort"] = request.effort
        elif not request.effort_is_hint:
            thinking, param = request.effort != "none", "reasoning_effort"
    reasons = template.reasons
    if thinking is None or loaded.thinking_switch:
        return thinking, switches
    if thinking and not reasons:
        raise UnsupportedError(
            f"{loaded.name} does not reason before it answers", param=param, code="unsupported_field"
        )
    if not thinking and reasons:
        raise UnsupportedError(f"{loaded.name} always reasons before it answers", param=param, code="unsupported_field")
    return None, switches


def _text_prompt(request: TextRequest, loaded: Loaded, options: TurnOptions) -> Prompt:
    tokenizer = loaded.model.tokenizer
    if isinstance(request.prompt, str):
        ids = tokenizer.encode_document(request.prompt)
    else:
        ids = request.prompt
        vocab = loaded.vocab
        if any(token >= vocab for token in ids):
            raise UsageError(f"the prompt holds an id outside the vocabulary of {vocab}", param="prompt")
    if not ids:
        raise UsageError("the prompt is empty", "send at least one token", param="prompt")
    if len(ids) > options.window and (request.echo or not options.slide):
        raise too_long(f"the prompt takes {len(ids)} tokens", options.window)
    return Prompt(ids, "", False)


def _check(limits: Limits, loaded: Loaded) -> None:
    if not 1 <= limits.n <= MAX_CHOICES:
        raise UsageError(f"n is {limits.n}: 1 to {MAX_CHOICES}", param="n")
    if len(limits.stop) > MAX_STOPS:
        raise UsageError(f"{len(limits.stop)} stop strings: at most {MAX_STOPS}", param="stop")
    wrong = next((token for token in limits.bias if not 0 <= token < loaded.vocab), None)
    if wrong is not None:
        raise UsageError(f"logit_bias: {wrong} is outside the vocabulary of {loaded.vocab}", param="logit_bias")
    if limits.window > loaded.window:
        raise UnsupportedError(
            f"num_ctx is {limits.window} and the window {loaded.window}", "start with a larger --ctx", param="num_ctx"
        )
