"""From a command line to something that can be talked to: model opened, engine started, sampling resolved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from smoe_cli import console, profile, settings
from smoe_cli.chat.model import ChatModel, open_model
from smoe_cli.chat.session import TurnOptions
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.manager import EngineManager, EngineSpec, resolve_sampling
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError, UnsupportedError

CHAT_WINDOW = 4096


@dataclass(frozen=True)
class ChatRequest:
    """What was asked for on the command line. ``None`` leaves the choice to the vault, then to smoe."""

    model: str | None = None
    vault_dir: Path | None = None
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    raw: bool = False
    thinking: bool | None = None
    template_file: Path | None = None
    flags: EngineFlags = field(default_factory=EngineFlags)


@dataclass
class Chat:
    """A model and its running engine."""

    request: ChatRequest
    model: ChatModel
    engine: EngineManager

    @property
    def window(self) -> int:
        return int(self.engine.info.get("ctx") or CHAT_WINDOW)

    def options(self) -> TurnOptions:
        """For the next turn; an unset seed is drawn anew each time."""
        request = self.request
        return TurnOptions(
            sampling=resolve_sampling(Sampling(), request.sampling, self.model.generation),
            max_tokens=request.max_tokens,
            stop=request.stop,
            thinking=request.thinking,
            window=self.window,
            raw=request.raw,
        )


def open_chat(request: ChatRequest) -> Chat:
    """Resolve and open the model. The engine is not started yet: that is ``chat.engine.start()``."""
    model = open_model(request.model, request.vault_dir, request.template_file)
    return Chat(request, model, EngineManager(engine_spec(request, model)))


def window_of(request: ChatRequest, model: ChatModel) -> int | str:
    """The window that was asked for, else the model's own limit where that is smaller than a chat's. Tokens, or max."""
    limit = model.manifest.get("arch", {}).get("max_positions", CHAT_WINDOW)
    return request.flags.ctx if request.flags.ctx is not None else min(CHAT_WINDOW, int(limit))


def engine_spec(request: ChatRequest, model: ChatModel) -> EngineSpec:
    """The vault's profile, where it has one, fills in the flags that were not given, and is named."""
    flags = replace(request.flags, ctx=window_of(request, model))
    measured, notice = profile.load(model.vault)
    if measured or notice:
        console.say(notice or f"notice: settings from {profile.path_for(model.vault).name}")
    flags = profile.apply(flags, measured)
    if flags.draft is None and flags.trace is None:  # a trace is of tokens that were asked for one by one
        flags = replace(flags, draft="auto")
    exempt = model.tokenizer.exempt_ids(model.eos_ids)
    return EngineSpec(model.vault, flags, exempt, settings.ledger(), settings.history(model.vault))


def start(chat: Chat) -> None:
    """Start the engine; what Python still has to import for the template is imported meanwhile."""
    warm_up = threading.Thread(target=_warm_up, args=[chat], daemon=True)
    if not chat.request.raw:
        warm_up.start()
    chat.engine.start()
    if not chat.request.raw:
        warm_up.join()
        template = chat.model.template  # raises here, before anything is typed, if there is none
        if chat.request.thinking is not None and not template.has_thinking_switch():
            raise UnsupportedError(
                f"{chat.model.id}'s chat template has no thinking switch", "leave out --think/--no-think"
            )


def switch(chat: Chat, name: str) -> None:
    """Talk to another vault from now on. If it cannot be opened or started, the one before is started again."""
    model = open_model(name, chat.request.vault_dir, chat.request.template_file)
    before = chat.model
    chat.engine.switch(engine_spec(chat.request, model))
    chat.model = model
    try:
        start(chat)
    except BaseException:
        chat.model = before
        chat.engine.switch(engine_spec(chat.request, before))
        start(chat)
        raise


def _warm_up(chat: Chat) -> None:
    with contextlib.suppress(SmoeError):  # raised again, and shown, by whoever needs the template
        _ = chat.model.template
