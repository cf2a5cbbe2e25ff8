"""A reply's text into reasoning, text and tool calls: the one parser of a reply, as the model's template needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import Piece, ReasoningParser, plain
from smoe_cli.chat.template import ChatTemplate
from smoe_cli.chat.tools import harmony
from smoe_cli.chat.tools.base import Call, CallStream, Syntax


class ReplyParser(Protocol):
    """The parts joined are the same however the text is split. ``CONTROL`` stands before a control token's text."""

    @property
    def reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as can be told."""
        ...

    def feed(self, text: str) -> list[Piece | Call]: ...

    def end(self) -> list[Piece | Call]:
        """What was held back at the end of the reply."""
        ...


class TaggedReply:
    """Reasoning between tags at the start, if at all; then text, with calls in it if there is a syntax for them."""

    def __init__(self, tags: tuple[str, str] | None, open_at_start: bool, syntax: Syntax | None = None) -> None:
        self._reasoning = ReasoningParser(tags, open_at_start)
        self._calls = CallStream(syntax) if syntax else None

    @property
    def reasoning(self) -> bool:
        return self._reasoning.reasoning

    def feed(self, text: str) -> list[Piece | Call]:
        return self._through(self._reasoning.feed(text))

    def end(self) -> list[Piece | Call]:
        out = self._through(self._reasoning.end())
        return out + [_piece(item) for item in (self._calls.end() if self._calls else [])]

    def _through(self, pieces: Sequence[Piece]) -> list[Piece | Call]:
        out: list[Piece | Call] = []
        for piece in pieces:
            if piece.reasoning or self._calls is None:
                out += [Piece(text, piece.reasoning)] if (text := plain(piece.text)) else []
            else:
                out += [_piece(item) for item in self._calls.feed(piece.text)]
        return out


def _piece(item: str | Call) -> Piece | Call:
    return item if isinstance(item, Call) else Piece(item, False)


def markers_of(template: ChatTemplate | None, tools: Sequence[Tool] = ()) -> tuple[str, ...]:
    """The control tokens that the parser looks for."""
    if template is None:
        return ()
    if harmony.claims(template.source):
        return harmony.MARKERS
    syntax = template.syntax if tools else None
    return (*(template.reasoning_tags or ()), *(syntax.markers if syntax else ()))


def reply_parser(template: ChatTemplate | None, reasoning: bool, tools: Sequence[Tool] = ()) -> ReplyParser:
    """``reasoning``: the prompt has opened it already. Calls are looked for only where tools are on offer. Without a
    template all is text."""
    if template is None:
        return TaggedReply(None, False)
    if harmony.claims(template.source):
        return harmony.HarmonyReply(template.spell, bool(tools))
    tags = template.reasoning_tags
    spelled = (template.spell(tags[0]), template.spell(tags[1])) if tags else None
    syntax = template.syntax if tools else None
    return TaggedReply(spelled, reasoning, syntax(tools, template.spell) if syntax else None)
