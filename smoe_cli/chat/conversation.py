"""A conversation's history: what was said and answered. A turn that fails leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from smoe_cli.chat.events import Done, Event, Generated, PromptSize, ReasoningDelta, Restarted, Stats, TextDelta
from smoe_cli.chat.launch import Chat
from smoe_cli.chat.session import render, turn
from smoe_cli.chat.template import Message
from smoe_cli.errors import UsageError


@dataclass
class Conversation:
    """Turns one after the other. A turn that raises, or is cancelled before it says anything, leaves no trace."""

    chat: Chat
    system: str | None = None
    turns: list[Message] = field(default_factory=list)  # user and assistant messages, in order
    last: Stats | None = None
    total_tokens: int = 0
    miss: str = ""  # why the last turn did not find all of the conversation before it in the engine's cache
    _held: list[int] = field(default_factory=list)  # ids that the engine was last sent and made itself

    def say(self, text: str) -> Iterator[Event]:
        return self._run([*self.turns, {"role": "user", "content": text}])

    def regenerate(self) -> Iterator[Event]:
        """Answer the last message again. Raises UsageError when there is none."""
        return self._run(self._up_to_last_user()[0])

    def take_back(self) -> str:
        """Remove the last exchange and return what the user had said, to be edited."""
        kept, text = self._up_to_last_user()
        self.turns = kept[:-1]
        return text

    def reset(self) -> None:
        self.turns, self._held = [], []

    @property
    def context_tokens(self) -> int:
        """Tokens of the last turn's prompt and reply: what the conversation fills of the window."""
        return self.last.prompt_tokens + self.last.completion_tokens if self.last and self.turns else 0

    def save(self, path: Path) -> None:
        content = {"model": self.chat.model.id, "system": self.system, "messages": self.turns}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Take over a saved conversation; a file that is not one changes nothing."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            turns = [_checked(message) for message in content["messages"]]
            system = content.get("system")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a saved conversation", "save one with /save FILE") from error
        self.turns, self.system, self.last = turns, system if isinstance(system, str) else None, None

    def _up_to_last_user(self) -> tuple[list[Message], str]:
        for index in range(len(self.turns) - 1, -1, -1):
            if self.turns[index]["role"] == "user":
                return self.turns[: index + 1], str(self.turns[index]["content"])
        raise UsageError("nothing has been said yet")

    def _run(self, turns: list[Message]) -> Iterator[Event]:
        messages = [{"role": "system", "content": self.system}, *turns] if self.system else turns
        text: list[str] = []
        reasoning: list[str] = []
        options = self.chat.options()
        prompt = render(self.chat.model, messages, options)
        held, self._held, self.miss = self._held, list(prompt.ids), ""
        for event in turn(self.chat.engine, self.chat.model, messages, options, prompt):
            if isinstance(event, PromptSize):
                self.miss = _miss(held, prompt.ids, event.cached_tokens)
                event = replace(event, miss=self.miss)
            elif isinstance(event, Restarted):
                held = []  # whatever it had is gone, which has been said
            elif isinstance(event, Generated):
                self._held.append(event.id)
            elif isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, ReasoningDelta):
                reasoning.append(event.text)
            elif isinstance(event, Done):
                self._keep(turns, "".join(text), "".join(reasoning), event)
            yield event

    def _keep(self, turns: list[Message], text: str, reasoning: str, done: Done) -> None:
        self.total_tokens += done.stats.completion_tokens
        if done.finish_reason == "cancel" and not text:
            return
        reply: Message = {"role": "assistant", "content": text}
        if reasoning:
            reply["reasoning_content"] = reasoning
        self.turns, self.last = [*turns, reply], done.stats


def _miss(held: list[int], ids: list[int], cached: int) -> str:
    common = next((at for at, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
    if cached + 1 < common:
        return "the engine could not go back to what it had"
    return f"it differs from the one before from token {common:,} on" if common < min(len(held), len(ids)) else ""


def _checked(message: Message) -> Message:
    if message["role"] not in ("user", "assistant") or not isinstance(message["content"], str):
        raise ValueError(message)
    kept = ("role", "content", "reasoning_content")
    return {key: value for key, value in message.items() if key in kept and isinstance(value, str)}
