"""The official openai client against a real server: chat, streamed and whole, and what it reports."""

from __future__ import annotations

from collections.abc import Callable

import openai

from tests.serve.serving import Running
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
HELLO = [{"role": "user", "content": "hi"}]


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=30)


def test_a_whole_reply(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    reply = client(start()).chat.completions.create(model="tiny", messages=HELLO)
    assert reply.choices[0].message.content == "Rome 🙂, 東京."
    assert (reply.choices[0].finish_reason, reply.model) == ("stop", "tiny")
    assert reply.usage is not None and reply.usage.completion_tokens == len(ids("Rome 🙂, 東京."))
