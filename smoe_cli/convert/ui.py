"""How a conversion speaks to its caller: notices, the planned output, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from smoe_cli.convert.run import Job


class Ui(Protocol):
    def notice(self, text: str) -> None: ...
    def planned(self, job: Job) -> None: ...
    def progress(self, done_bytes: int, total_bytes: int) -> None: ...


class Quiet:
    """Keeps the notices, says nothing."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def planned(self, job: Job) -> None: ...

    def progress(self, done_bytes: int, total_bytes: int) -> None: ...
