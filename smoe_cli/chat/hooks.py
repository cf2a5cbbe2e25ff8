"""What may take part in a turn besides the model: a tool-call parser, a constraint on the next token, an output filter.

Each is made anew for every turn, so ``Hooks`` holds what makes them. All are called from the thread that runs the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from smoe_cli.chat.events import Delta, TextDelta, ToolCallDelta


class ToolParser(Protocol):
    """Cuts a reply's text, its reasoning already taken out, into text and tool calls; however it is split."""

    @property
    def markers(self) -> Sequence[str]:
        """Control tokens it looks for: they stay in the text that it is fed."""
        ...

    def feed(self, text: str) -> Iterable[TextDelta | ToolCallDelta]: ...

    def end(self) -> Iterable[TextDelta | ToolCallDelta]: ...


class Constraint(Protocol):
    """Which tokens may come next."""

    def mask(self) -> bytes:
        """One bit per vocabulary id, least significant first, 1 = allowed. Asked before each token."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        ...


class OutputFilter(Protocol):
    """The operator's rules on what leaves: sees every delta, may hold back, change or drop."""

    @property
    def refused(self) -> bool:
        """The reply ends here, with ``finish_reason`` refusal."""
        ...

    def feed(self, delta: Delta) -> Iterable[Delta]: ...

    def end(self) -> Iterable[Delta]: ...


@dataclass(frozen=True)
class Hooks:
    """None: there is none."""

    tool_parser: Callable[[], ToolParser] | None = None
    constraint: Callable[[], Constraint] | None = None
    output_filter: Callable[[], OutputFilter] | None = None
