"""Where a request is prepared: a short one on the event loop, one that may take longer in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from smoe_cli.serve.prepare import Preparer
from tests.serve.serving import Running
from tests.unit.fakes import FakeEngineFiles


@pytest.mark.parametrize(
    ("body", "here"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, True),
        ({"messages": [{"role": "user", "content": "a" * 4096}]}, False),
        ({"messages": [{"role": "user", "content": "a"}], "model": "another"}, False),
    ],
)
def test_short_requests_need_no_thread(
    fake: FakeEngineFiles,
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, object],
    here: bool,
) -> None:
    seen: list[str] = []
    turn = Preparer.turn

    def noted(self: Preparer, request: object) -> object:
        seen.append(threading.current_thread().name)
        return turn(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(Preparer, "turn", noted)
    running = start()
    running.post("/v1/chat/completions", {**body, "max_tokens": 1})
    assert len(seen) == 1 and seen[0].startswith("asyncio_") is not here
