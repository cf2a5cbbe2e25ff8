"""What may take part in a turn besides the model: tools on offer, a constraint on the next token, an output filter.

What keeps a state is made anew for every turn, so ``Hooks`` holds what makes it. All are called from the thread that
runs the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from smoe_cli.chat.events import Delta
from smoe_cli.chat.template import Prompt
from smoe_cli.engine.protocol import Masks


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
    """None: there is none. ``constraint`` gets the rendered prompt, whose end tells where the reply begins, and raises
    nothing: what it needs is compiled before. ``single_call``: the reply ends after its first tool call."""

    constraint: Callable[[Prompt], Masks] | None = None
    output_filter: Callable[[], OutputFilter] | None = None
    single_call: bool = False
