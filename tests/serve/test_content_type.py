"""Whose bodies are taken for JSON without saying so: programs that speak Ollama's API, and no page in a browser."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.serve.serving import Running
from tests.unit.fakes import FakeEngineFiles

BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": false}'
FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_who_may_leave_the_content_type_out(start: Callable[..., Running], fake: FakeEngineFiles) -> None:
    server = start()

    def status(path: str, headers: dict[str, str]) -> int:
        return httpx.post(server.base + path, content=BODY, headers=headers, timeout=30).status_code

    assert status("/api/chat", {}) == 200
    assert status("/api/chat", FORM) == 200  # what curl sends
    assert status("/api/chat", {"content-type": "text/plain"}) == 415
    assert status("/v1/chat/completions", {}) == 415
    assert status("/v1/chat/completions", FORM) == 415


@pytest.mark.parametrize("mark", ["origin", "referer", "sec-fetch-site", "sec-fetch-mode"])
def test_a_browser_may_not(start: Callable[..., Running], fake: FakeEngineFiles, mark: str) -> None:
    server = start()
    value = server.base if mark in ("origin", "referer") else "same-origin"
    for headers in ({mark: value}, {**FORM, mark: value}):
        assert httpx.post(server.base + "/api/chat", content=BODY, headers=headers, timeout=30).status_code == 415
