"""One turn of a conversation, the same for the terminal and for every API: messages in, events out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from smoe_cli.chat.events import Event, PrefillProgress, PromptSize, Restarted
from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.parse import markers_of, reply_parser
from smoe_cli.chat.reply import Reply
from smoe_cli.chat.request import Tool
from smoe_cli.chat.template import ChatTemplate, Message, Prompt
from smoe_cli.engine import protocol
from smoe_cli.engine.protocol import Generate, Sampling
from smoe_cli.errors import EngineRefused, UsageError


class Engine(Protocol):
    """What a turn needs of the engine manager."""

    def generate(self, request: Generate) -> Iterator[protocol.Message | Restarted]: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True)
class TurnOptions:
    """``max_tokens`` None: what is left of the window. ``thinking`` None: as the template has it; ``switches`` are
    further variables for the template; ``begun`` is the beginning of the reply, which it goes on with. ``tools`` are
    on offer, and calls of them are looked for; what may be asked of the calls is in ``hooks`` (see
    chat/tools/equip.py). ``slide`` false: a prompt over the window is refused. ``logprobs``: alternatives to report
    beside each token, None for no report at all."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    thinking: bool | None = None
    window: int = 4096
    raw: bool = False
    session: str = ""
    slide: bool = True
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    tools: Sequence[Tool] = ()
    switches: dict[str, Any] = field(default_factory=dict)
    begun: str = ""
    hooks: Hooks = field(default_factory=Hooks)


def render(model: ChatModel, messages: Sequence[Message], options: TurnOptions) -> Prompt:
    """The conversation's ids. UsageError, with both sizes, when it is longer than the window and may not slide, or when
    the system message and the last one alone are longer."""
    if options.raw:
        text = "".join(str(message["content"]) for message in messages)
        return Prompt(model.tokenizer.encode_document(text), text, False)

    def rendered(some: Sequence[Message]) -> Prompt:
        switches = {"enable_thinking": options.thinking, **options.switches}
        tools = [tool.for_template() for tool in options.tools] or None
        return model.template.render(some, tools, options.begun, **switches)

    prompt = rendered(messages)
    if len(prompt.ids) > options.window:
        if not options.slide:
            raise too_long(f"the conversation takes {len(prompt.ids)} tokens", options.window)
        last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
        least = [message for message in messages[:last] if message["role"] == "system"][:1] + list(messages[last:])
        size = len(rendered(least).ids)
        if size > options.window:
            raise too_long(f"the last message takes {size} tokens with the system message", options.window)
    return prompt


def too_long(text: str, window: int) -> UsageError:
    hint = "shorten it, or start with a larger --ctx"
    return UsageError(f"{text}, and the window is {window}", hint, code="context_length_exceeded")


def turn(
    engine: Engine, model: ChatModel, messages: Sequence[Message], options: TurnOptions, prompt: Prompt | None = None
) -> Iterator[Event]:
    """Run one turn. The texts of the deltas joined are the reply; exactly one ``Done`` comes last, unless it raises."""
    prompt = prompt or render(model, messages, options)
    left = max(options.window - len(prompt.ids), options.window // 4)
    template = template_of(model, options)
    constraint = options.hooks.constraint
    request = Generate(
        ids=prompt.ids,
        max_tokens=options.max_tokens or left,
        sampling=options.sampling,
        stop_ids=template.turn_end_ids if template else [],
        bias=options.bias,
        session=options.session,
        logprobs=options.logprobs,
        slide=options.slide,
        masks=(lambda: constraint(prompt)) if constraint else None,
    )
    parser = reply_parser(template, prompt.reasoning, options.tools)
    markers = markers_of(template, options.tools)
    reply = Reply(model, prompt, parser, markers, options.stop, options.hooks, engine.cancel)
    try:
        for message in engine.generate(request):
            if isinstance(message, protocol.Token):
                yield from reply.token(message)
            elif isinstance(message, protocol.Began):
                slides = message.prompt_tokens > options.window
                yield PromptSize(message.prompt_tokens, message.cached_tokens, slides)
            elif isinstance(message, protocol.Prefilled):
                yield PrefillProgress(message.done, message.total)
            elif isinstance(message, protocol.Done):
                yield from reply.done(message, len(prompt.ids))
            elif isinstance(message, Restarted):
                yield message
    except EngineRefused as refusal:
        raise _in_words(refusal, options) from refusal


def template_of(model: ChatModel, options: TurnOptions) -> ChatTemplate | None:
    """The template that a turn is rendered and read with; a bare text has none."""
    if options.raw:
        return None
    return model.template.for_tools() if options.tools else model.template


def _in_words(refusal: EngineRefused, options: TurnOptions) -> EngineRefused:
    """An <<ERR name>> as a sentence."""
    prompt, window = refusal.fields.get("prompt", "?"), refusal.fields.get("ctx", str(options.window))
    texts = {
        "ctx_overflow": (f"the prompt is {prompt} tokens and the window {window}", "use a larger --ctx, or /reset"),
        "io_error": ("a read from the vault failed", "check the disk; smoe verify reads every byte"),
        "non_finite": ("the model computed numbers that are not finite", "smoe verify checks the vault"),
        "no_memory": ("the engine could not get the memory for this request", "use a smaller --ctx or --budget"),
    }
    text, hint = texts.get(refusal.name, (refusal.text, refusal.hint))
    return EngineRefused(refusal.name, refusal.fields, text, hint)
