"""Where a conversation is shown: a terminal with an editor, live meters and Markdown, or plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from smoe_cli import console, settings
from smoe_cli.chat.blocks import BlockSplitter
from smoe_cli.chat.events import Done, Event, ReasoningDelta, TextDelta
from smoe_cli.chat.launch import Chat
from smoe_cli.chat.meters import Meters, summary
from smoe_cli.chat.oneshot import notice, tell

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown


class Screen(Protocol):
    def ask(self, draft: str, status: str) -> str:
        """What the user types next. Raises KeyboardInterrupt for Ctrl-C and EOFError for the end of input."""
        ...

    def show(self, events: Iterable[Event], chat: Chat) -> None:
        """A reply, as it comes."""
        ...

    def say(self, text: str) -> None:
        """An answer to a command, or a notice."""
        ...

    def wait(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Shown while something takes its time."""
        ...


def open_screen(commands: list[str]) -> Screen:
    from rich.console import Console

    out = Console(highlight=False)
    plain = not sys.stdout.isatty() or out.is_dumb_terminal
    return PlainScreen() if plain else TerminalScreen(out, commands)


class PlainScreen:
    """No colours, no bars: replies on stdout, the rest on stderr."""

    def ask(self, draft: str, status: str) -> str:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def show(self, events: Iterable[Event], chat: Chat) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Done):
                sys.stdout.write("\n")
                sys.stdout.flush()
            else:
                tell(event)

    def say(self, text: str) -> None:
        console.say(text)

    def wait(self, text: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class TerminalScreen:
    def __init__(self, out: Console, commands: list[str]) -> None:
        self._out = out
        self._commands = commands
        self._editor: PromptSession[str] | None = None

    def ask(self, draft: str, status: str) -> str:
        self._editor = self._editor or make_editor(self._commands)
        return self._editor.prompt("> ", default=draft, bottom_toolbar=status)

    def say(self, text: str) -> None:
        self._out.print(text, markup=False)

    def wait(self, text: str) -> contextlib.AbstractContextManager[object]:
        return self._out.status(text)

    def show(self, events: Iterable[Event], chat: Chat) -> None:
        """Finished blocks are printed for good; below them live the block in progress and the meters."""
        from rich.live import Live

        view = ReplyView(Meters(chat))
        with keyboard_is_silent(), Live(view, console=self._out, refresh_per_second=8, transient=True) as live:
            for event in events:
                for block in view.see(event):
                    live.console.print(block)
                if isinstance(event, Done):
                    for block in view.rest():
                        live.console.print(block)
                    live.console.print(summary(event, chat, view.meters.miss), style="dim", markup=False)
                elif text := notice(event):  # above the live part, so not on stderr, which knows nothing of it
                    live.console.print(f"warning: {text}", style="yellow", markup=False)


class ReplyView:
    """A reply in progress, as something that Rich can draw."""

    def __init__(self, meters: Meters) -> None:
        self.meters = meters
        self._splitter = BlockSplitter()
        self._reasoning = False

    def see(self, event: Event) -> list[object]:
        """Take in an event; returns what is complete, ready to print."""
        self.meters.see(event)
        if not isinstance(event, TextDelta | ReasoningDelta):
            return []
        switched = isinstance(event, ReasoningDelta) != self._reasoning
        before = self.rest() if switched else []
        self._reasoning = isinstance(event, ReasoningDelta)
        return before + [self._draw(block) for block in self._splitter.feed(event.text)]

    def rest(self) -> list[object]:
        rest = self._splitter.end()
        return [self._draw(rest)] if rest.strip() else []

    def _draw(self, block: str) -> object:
        from rich.padding import Padding
        from rich.text import Text

        body = Text(block.strip("\n"), style="dim italic") if self._reasoning else markdown(block)
        return Padding(body, (0, 0, 1, 0))

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        tail = Text(self._splitter.pending.rstrip("\n"), style="dim italic" if self._reasoning else "")
        room = max(options.max_height - 3, 1)
        yield from tail.wrap(out, options.max_width)[-room:]
        yield Text(self.meters.line(), style="reverse", no_wrap=True, overflow="ellipsis")


def markdown(text: str) -> Markdown:
    """Markdown in which HTML is text: by default Rich drops it without a word."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    drawn = Markdown(text)
    drawn.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)
    return drawn


def make_editor(commands: list[str]) -> PromptSession[str]:
    """A line editor with history across runs; Enter sends, Alt-Enter starts a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):  # a read-only home costs the history, not the conversation
        settings.state_dir().mkdir(parents=True, exist_ok=True)
        path = settings.state_dir() / "history"
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    completer = WordCompleter(commands, sentence=True)
    return PromptSession(history=history, key_bindings=keys, completer=completer, complete_while_typing=False)


@contextlib.contextmanager
def keyboard_is_silent() -> Iterator[None]:
    """While a reply is drawn, typed keys are not echoed into it; they wait for the next prompt. Ctrl-C still works."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    silent = termios.tcgetattr(fd)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
