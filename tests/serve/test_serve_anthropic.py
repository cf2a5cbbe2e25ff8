"""The official anthropic client against a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.serve.serving import Running, ShellVault, sse
from tests.serve.test_cases import THINKING
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=30)


def test_a_whole_message(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    reply = client(start()).messages.create(model="claude-x", max_tokens=50, messages=HELLO)
    assert [block.model_dump()["text"] for block in reply.content] == ["Rome 🙂, 東京."]
    assert (reply.stop_reason, reply.stop_sequence, reply.model, reply.role) == ("end_turn", None, "tiny", "assistant")
    assert reply.usage.output_tokens == len(ids("Rome 🙂, 東京."))
    assert reply._request_id is not None


def test_the_streaming_helper_ends_with_the_whole_message(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    with client(start()).messages.stream(model="", max_tokens=50, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Rome 🙂, 東京." == final.content[0].model_dump()["text"]
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == len(ids("Rome 🙂, 東京."))
    assert final.usage.input_tokens == len(fake.prompts()[0])


def test_a_stop_sequence_is_named(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one STOP two")])
    reply = client(start()).messages.create(model="", max_tokens=50, messages=HELLO, stop_sequences=["STOP", "x"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")


def test_the_limit_is_the_reason(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one two three")])
    assert client(start()).messages.create(model="", max_tokens=2, messages=HELLO).stop_reason == "max_tokens"


def test_thinking_comes_as_a_block_of_its_own(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    ShellVault(THINKING).make(tmp_path)
    fake.write([ids("because.\n</think>\n\nRome.")])
    api = client(start(tmp_path)).messages
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = api.create(model="", max_tokens=2048, messages=HELLO, thinking=thinking)
    assert [(block.type) for block in whole.content] == ["thinking", "text"]
    with api.stream(model="", max_tokens=2048, messages=HELLO, thinking=thinking) as stream:
        streamed = stream.get_final_message()
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]


def test_tokens_are_counted_as_they_are_sent(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    api = client(start()).messages
    counted = api.count_tokens(model="", messages=HELLO, system="Be brief.")
    reply = api.create(model="", max_tokens=9, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == reply.usage.input_tokens


def test_errors_are_the_clients_own(start: Start, fake: FakeEngineFiles) -> None:
    api = client(start()).messages
    with pytest.raises(anthropic.BadRequestError) as error:
        api.create(model="", max_tokens=9, messages=[{"role": "user", "content": [{"type": "hologram"}]}])  # type: ignore[typeddict-item, list-item]
    assert "hologram" in str(error.value) and error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_an_error_in_a_stream_raises(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one two")], faults=[{"reply": 0, "after": 1, "kind": "signal", "times": 2}])
    api = client(start()).messages
    with (
        pytest.raises(anthropic.APIStatusError, match="SIGKILL"),
        api.stream(model="", max_tokens=9, messages=HELLO) as s,
    ):
        s.get_final_message()


def billed(number: int) -> list[dict[str, Any]]:
    """What Claude Code sends: a first block for billing, another one in each request, then the prompt proper."""
    head = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05x};"
    return [{"type": "text", "text": head}, {"type": "text", "text": "You are a careful assistant. " * 5}]


def test_a_billing_line_that_changes_does_not_cost_the_prefix(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    usages = []
    for number in (1, 2):
        ask = {"system": billed(number), "messages": HELLO, "max_tokens": 9}
        usages.append(server.post("/v1/messages", ask).json()["usage"])
    assert usages[1]["cache_read_input_tokens"] == len(fake.prompts()[1]) - 1
    assert fake.prompts()[0] == fake.prompts()[1]
    prompt = made.byte_level().decode(fake.prompts()[0], skip_special_tokens=False)
    assert "billing" not in prompt and "You are a careful assistant." in prompt


def test_the_same_line_elsewhere_is_left_alone(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    text = "Explain this:\nx-anthropic-billing-header: a=b;"
    start().post(
        "/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "system": "Be brief."}
    )
    assert "billing" in made.byte_level().decode(fake.prompts()[0])


def test_blocks_are_numbered_without_gaps(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    ShellVault(THINKING).make(tmp_path)
    fake.write([ids("because.\n</think>\n\nRome.")])
    events = sse(start(tmp_path).stream("/v1/messages", {"messages": HELLO, "max_tokens": 50}))
    opened = [
        (event["index"], event["content_block"]["type"]) for event in events if event["type"] == "content_block_start"
    ]
    closed = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert opened == [(0, "thinking"), (1, "text")] and closed == [0, 1]


def test_models_are_listed(start: Start, fake: FakeEngineFiles) -> None:
    assert [model.id for model in client(start()).models.list()] == ["tiny"]


def test_a_begun_reply_is_gone_on_with(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids(" Rome.")])
    api = client(start()).messages
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "It is<|im_end|>"}]
    reply = api.create(model="", max_tokens=9, messages=begun)
    assert reply.content[0].model_dump()["text"] == " Rome."
    plain = made.byte_level()
    control = plain.token_to_id("<|im_end|>")
    prompt = fake.prompts()[0]
    assert plain.decode(prompt, skip_special_tokens=False).endswith("assistant\nIt is<|im_end|>")
    assert prompt.count(control) == 1  # what was begun is people's text: its marker is no control token
    assert api.count_tokens(model="", messages=begun).input_tokens == len(prompt)
    for wrong in ("It is ", [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]):
        with pytest.raises(anthropic.BadRequestError):
            api.create(model="", max_tokens=9, messages=[*HELLO, {"role": "assistant", "content": wrong}])  # type: ignore[typeddict-item]
    ShellVault(THINKING).make(tmp_path)
    with pytest.raises(anthropic.BadRequestError, match="reasons before"):
        client(start(tmp_path)).messages.create(model="", max_tokens=9, messages=begun)
