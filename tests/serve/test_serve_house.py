"""--policy, --guard and --state over HTTP: the same on every route, streamed and whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.errors import UsageError
from tests.serve import serving
from tests.serve.serving import Running, sse, text_of, wait_for
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "policy.json"
    path.write_text(
        json.dumps(
            [
                {"term": "secret", "action": "redact"},
                {"pattern": "[0-9]{3}-[0-9]{4}", "action": "redact", "replacement": "<phone>"},
                {"term": "forbidden", "action": "refuse", "message": "No more of this."},
            ]
        )
    )
    return path


def streamed(server: Running, **more: Any) -> tuple[str, str]:
    content = {"messages": [{"role": "user", "content": "hi"}], **more}
    events = [event for event in sse(server.stream("/v1/chat/completions", content)) if event.get("choices")]
    return text_of(events), events[-1]["choices"][0]["finish_reason"]


def test_the_policy_holds_on_every_route_streamed_and_whole(start: Start, fake: FakeEngineFiles, rules: Path) -> None:
    fake.write([ids("A Secret: call 555-1234 or 555-12, secre")])
    expected = "A [redacted]: call <phone> or 555-12, secre"
    server = start(policy=rules)
    assert server.chat().json()["choices"][0]["message"]["content"] == expected
    assert streamed(server) == (expected, "stop")
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    assert server.post("/v1/messages", message).json()["content"][0]["text"] == expected
    assert server.post("/v1/completions", {"prompt": "hi"}).json()["choices"][0]["text"] == expected
    assert server.post("/api/chat", {**message, "stream": False}).json()["message"]["content"] == expected


def test_a_refusal_ends_the_generation(start: Start, fake: FakeEngineFiles, rules: Path) -> None:
    fake.write([ids("It is forbidden to") + ids(" go on") * 200, ids("next")], token_ms=2)
    server = start(policy=rules)
    reply = server.chat(max_tokens=600).json()
    assert reply["choices"][0]["message"]["content"] == "It is No more of this."
    assert reply["choices"][0]["finish_reason"] == "content_filter"
    assert reply["usage"]["completion_tokens"] < 60
    assert server.chat().json()["choices"][0]["message"]["content"] == "next"


def test_log_probabilities_do_not_tell_what_was_redacted(start: Start, fake: FakeEngineFiles, rules: Path) -> None:
    fake.write([ids("A secret.")])
    reply = start(policy=rules).chat(logprobs=True).json()["choices"][0]
    told = "".join(token["token"] for token in reply["logprobs"]["content"])
    assert reply["message"]["content"] == "A [redacted]." and "secret" not in told and "ecre" not in told


def test_a_bad_policy_or_guard_stops_the_server_before_it_binds(shell: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('[{"pattern": "a*", "action": "redact"}]')
    for more in ({"policy": tmp_path / "bad.json"}, {"guard": "no-such-program"}, {"policy": tmp_path / "none.json"}):
        with pytest.raises(UsageError):
            serving.run(serving.request(shell, **more))  # type: ignore[arg-type]


GUARD = """
import json, sys
turn = json.load(sys.stdin)
last = turn["messages"][-1]["content"]
answer = {"action": "proceed"}
if last == "shout":
    answer = {"action": "rephrase", "text": "whisper"}
elif last in ("wait", "leave"):
    answer = {"action": {"wait": "pause", "leave": "end"}[last], "message": "The guard speaks."}
print(json.dumps(answer))
"""


@pytest.fixture
def guarded(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> Running:
    (tmp_path / "guard.py").write_text(GUARD)
    fake.write([ids("model")])
    return start(guard=f"{sys.executable} {tmp_path / 'guard.py'}")


def said(server: Running, fake: FakeEngineFiles) -> str:
    return str(server.service.fleet.active.model.tokenizer.backend.decode(fake.prompts()[-1]))


def test_the_guard_lets_through_rephrases_pauses_and_ends(guarded: Running, fake: FakeEngineFiles) -> None:
    assert guarded.chat("hello").json()["choices"][0]["message"]["content"] == "model"
    assert guarded.chat("shout").json()["choices"][0]["message"]["content"] == "model"
    assert "whisper" in said(guarded, fake) and "shout" not in said(guarded, fake)
    asked = len(fake.requests())
    paused = guarded.chat("wait").json()
    assert (paused["choices"][0]["message"]["content"], paused["choices"][0]["finish_reason"]) == (
        "The guard speaks.",
        "stop",
    )
    assert paused["usage"]["completion_tokens"] == 0 and paused["usage"]["prompt_tokens"] > 0
    assert guarded.chat("leave").json()["choices"][0]["finish_reason"] == "content_filter"
    more = [
        {"role": "user", "content": "leave"},
        {"role": "assistant", "content": "The guard speaks."},
        {"role": "user", "content": "hello"},
    ]
    content = {"messages": more, "max_tokens": 9}
    assert streamed(guarded, **content) == ("The guard speaks.", "content_filter")
    assert guarded.post("/v1/messages", content).json()["stop_reason"] == "refusal"
    assert len(fake.requests()) == asked


def test_a_conversation_outlives_the_server(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("Rome it is")])
    first = start(state=tmp_path / "state")
    reply = first.chat("Italy?").json()["choices"][0]["message"]["content"]
    prompt = fake.prompts()[-1]
    first.stop()
    second = start(state=tmp_path / "state")
    assert wait_for(lambda: len(fake.requests()) == 2, 10) and second.idle()
    assert fake.prompts()[1] == prompt + ids("Rome it is")  # computed again before anybody asks
    more = [
        {"role": "user", "content": "Italy?"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And France?"},
    ]
    usage = second.post("/v1/chat/completions", {"messages": more}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(fake.prompts()[1])


def test_a_request_does_not_wait_for_what_is_computed_again(
    start: Start, fake: FakeEngineFiles, tmp_path: Path
) -> None:
    fake.write([ids("Rome it is")], chunk=1)
    first = start(state=tmp_path / "state")
    first.chat("a long question " * 40)
    first.stop()
    fake.write([ids("Rome it is")], chunk=1, prefill_ms=50)
    second = start(state=tmp_path / "state")
    assert wait_for(lambda: second.service.queue.running, 10)
    assert second.chat("x").json()["choices"][0]["message"]["content"] == "Rome it is"
    assert second.idle()


def test_another_vault_does_not_take_over_the_ids(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    first = start(state=tmp_path / "state")
    first.chat("Italy?")
    first.stop()
    serving.ShellVault(generation={"top_k": 7}).make(tmp_path / "others")
    second = start(tmp_path / "others", state=tmp_path / "state")
    assert second.idle() and len(fake.requests()) == 1
