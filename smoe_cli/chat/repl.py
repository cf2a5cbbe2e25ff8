"""The conversation in the terminal: lines, commands, and what Ctrl-C does at each moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from smoe_cli import console, sizes
from smoe_cli.chat.conversation import Conversation
from smoe_cli.chat.events import Event
from smoe_cli.chat.launch import Chat, ChatRequest, open_chat, start, switch
from smoe_cli.chat.meters import figures
from smoe_cli.chat.oneshot import INTERRUPTED, interrupt_cancels, pass_on_notices
from smoe_cli.chat.screen import Screen, open_screen
from smoe_cli.errors import SmoeError, UsageError

HELP = {
    "/help": "this list",
    "/model [ID]": "the vaults there are; talk to another one",
    "/system [TEXT]": "show or set the system message; - removes it",
    "/reset": "forget the conversation",
    "/regen": "answer the last message again",
    "/edit": "change the last message and send it again",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a saved one",
    "/stats": "figures of the last turn and of the engine",
    "/quit": "leave (so do Ctrl-D, and Ctrl-C twice)",
}


def converse(request: ChatRequest) -> int:
    """Talk until the user leaves; the exit code. A failed turn is told, and the conversation goes on without it."""
    chat = open_chat(request)
    screen = open_screen([name.split()[0] for name in HELP])
    with chat.engine:
        with screen.wait(f"starting {chat.model.id} ..."):
            start(chat)
        pass_on_notices(chat)
        return Repl(chat, screen).run()


class Repl:
    def __init__(self, chat: Chat, screen: Screen) -> None:
        self._chat = chat
        self._screen = screen
        self._talk = Conversation(chat, chat.request.system)
        self._draft = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/model": self._model,
            "/system": self._system,
            "/reset": self._reset,
            "/regen": lambda _: self._show(self._talk.regenerate()),
            "/edit": self._edit,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
        }

    def run(self) -> int:
        model = self._chat.model
        self._screen.say(f"{model.id} · window {self._chat.window:,} tokens · /help lists the commands")
        interrupted = False
        while True:
            try:
                text = self._screen.ask(self._draft, self._status())
            except KeyboardInterrupt:
                if interrupted:
                    return INTERRUPTED
                interrupted = True
                self._draft = ""
                self._screen.say("(Ctrl-C again to leave)")
                continue
            except EOFError:
                return 0
            interrupted, self._draft = False, ""
            if text.strip() == "/quit":
                return 0
            if text.strip():
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            name, _, rest = text.strip().partition(" ")
            if not text.startswith("/"):
                self._show(self._talk.say(text))
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                raise UsageError(
                    f"there is no command {name}", "/help lists them; begin with a space to send it as text"
                )
        except SmoeError as error:
            console.error(error)
        except KeyboardInterrupt:  # before the engine had the request, or while a model was started
            self._screen.say("stopped")

    def _show(self, events: Iterable[Event]) -> None:
        with interrupt_cancels(self._chat):
            self._screen.show(events, self._chat)
        pass_on_notices(self._chat)

    def _status(self) -> str:
        """The line under the editor."""
        parts = [self._chat.model.id, f"context {self._talk.context_tokens:,}/{self._chat.window:,}"]
        rss = self._chat.engine.rss_bytes()
        return " · ".join([*parts, *([f"RAM {sizes.show(rss)}"] if rss else [])])

    # -- commands --

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        self._screen.say("\n".join(f"{name:<{width}}  {text}" for name, text in HELP.items()))

    def _model(self, name: str) -> None:
        if not name:
            from smoe_cli import registry

            vaults = [vault for vault in registry.find(self._chat.request.vault_dir) if vault.complete]
            lines = [
                f"{'*' if v.path == self._chat.model.vault else ' '} {v.id}  {v.manifest['quant']}" for v in vaults
            ]
            self._screen.say("\n".join(lines) or f"* {self._chat.model.id}")
            return
        with self._screen.wait(f"starting {name} ..."):
            switch(self._chat, name)
        self._screen.say(f"now talking to {self._chat.model.id}; the conversation goes on")

    def _system(self, text: str) -> None:
        self._talk.system = None if text == "-" else text or self._talk.system
        self._screen.say(f"system: {self._talk.system}" if self._talk.system else "there is no system message")

    def _reset(self, _: str) -> None:
        self._talk.reset()
        self._screen.say("the conversation is forgotten")

    def _edit(self, _: str) -> None:
        self._draft = self._talk.take_back()

    def _save(self, name: str) -> None:
        self._talk.save(_path(name))
        self._screen.say(f"saved {len(self._talk.turns)} messages to {name}")

    def _load(self, name: str) -> None:
        self._talk.load(_path(name))
        self._screen.say(f"loaded {len(self._talk.turns)} messages from {name}")

    def _stats(self, _: str) -> None:
        lines = []
        if self._talk.last is not None:
            lines.append(
                "last turn: " + " · ".join([f"{self._talk.last.completion_tokens} tokens", *figures(self._talk.last)])
            )
        if self._talk.miss:
            lines.append(f"part of the prompt was computed again: {self._talk.miss}")
        lines.append(f"generated so far: {self._talk.total_tokens:,} tokens")
        lines += [f"{key}: {value}" for key, value in self._chat.engine.info.items()]
        self._screen.say("\n".join(lines))


def _path(name: str) -> Path:
    if not name:
        raise UsageError("which file?", "give its name after the command")
    return Path(name).expanduser()
