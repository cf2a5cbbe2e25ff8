"""A2, A13 with the official anthropic client: calls streamed and whole, text behind one, the conversation going on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.serve.serving import Running
from tests.serve.test_serve_tools import TWO, held
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
ASK: list[Any] = [{"role": "user", "content": "Rome and Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}
WEATHER: Any = {"name": "weather", "description": "tells the weather", "input_schema": {**SCHEMA, "properties": {}}}


@pytest.fixture
def running(start: Start, fake: FakeEngineFiles) -> Running:
    return held(start())


def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=30)


def ask(server: Running, **more: Any) -> Any:
    return client(server).messages.create(**{"model": "tiny", "max_tokens": 200, "messages": ASK, **more})


def shape(content: Any) -> list[Any]:
    return [block.text if block.type == "text" else (block.name, block.input) for block in content]


def test_two_calls_and_text_behind_them_whole_and_streamed(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO + "\nDone")])
    expected = ["I look.", ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo", "days": 2}), "Done"]
    whole = ask(running, tools=[WEATHER])
    assert (shape(whole.content), whole.stop_reason) == (expected, "tool_use")
    open_blocks: list[int] = []
    with client(running).messages.stream(model="tiny", max_tokens=200, messages=ASK, tools=[WEATHER]) as stream:
        for event in stream:
            if event.type == "content_block_start":
                assert event.index == len(open_blocks)
                open_blocks.append(event.index)
            elif event.type == "content_block_delta":
                assert event.index == open_blocks[-1]
        streamed = stream.get_final_message()
    assert (shape(streamed.content), streamed.stop_reason) == (expected, "tool_use")
    assert [b.id for b in streamed.content if b.type == "tool_use"] == [
        b.id for b in whole.content if b.type == "tool_use"
    ]


def test_a_conversation_with_calls_goes_on(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO), ids("Sun and snow.")])
    first = ask(running, tools=[WEATHER])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = ask(running, tools=[WEATHER], messages=messages)
    assert (shape(second.content), second.stop_reason) == (["Sun and snow."], "end_turn")
    assert second.usage.cache_read_input_tokens > 0.9 * len(fake.prompts()[0])
    sent = running.service.fleet.active.model.tokenizer.backend.decode(fake.prompts()[1], skip_special_tokens=False)
    assert TWO in sent and sent.count("<tool_response>\nsun\n</tool_response>") == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_call_is_made(running: Running, fake: FakeEngineFiles, choice: Any) -> None:
    fake.write([ids("No.")])
    tools = [{**WEATHER, "input_schema": SCHEMA}]
    reply = ask(running, tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True})
    ((name, given),) = shape(reply.content)
    assert (name, set(given) <= {"city"}, reply.stop_reason) == ("weather", True, "tool_use")


def test_a_schema_that_cannot_be_compiled_is_refused(running: Running, fake: FakeEngineFiles) -> None:
    tools = [{**WEATHER, "input_schema": {"type": "object", "properties": {"x": {"not": {}}}}}]
    with pytest.raises(anthropic.BadRequestError, match="not"):
        ask(running, tools=tools, tool_choice={"type": "any"})
    assert fake.requests() == []


def test_counting_compiles_nothing_and_counts_what_is_asked(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids("No.")])
    tools: Any = [{**WEATHER, "input_schema": SCHEMA, "strict": True}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    given: Any = {"model": "tiny", "messages": ASK, "tools": tools, "tool_choice": choice}
    counted = client(running).messages.count_tokens(**given).input_tokens
    assert "vocabulary" not in vars(running.service.fleet.active.model)
    ask(running, tools=tools, tool_choice=choice)
    assert counted == len(fake.prompts()[0])
