"""A2, A9, S12: tools and formats over HTTP with the official client, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.serving import Running, ShellVault
from tests.unit.fakes import FakeEngineFiles, ids
from tests.unit.test_chat_tools import THINKING

Start = Callable[..., Running]
ASK: list[Any] = [{"role": "user", "content": "Rome and Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TWO = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
)


@pytest.fixture
def running(start: Start, fake: FakeEngineFiles) -> Running:
    return held(start())


def held(server: Running) -> Running:
    """The shell vault's own vocabulary is smaller than its tokenizer's."""
    server.service.fleet.active.model.manifest["arch"]["vocab"] = 512
    return server


def chat(server: Running, **more: Any) -> Any:
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=30)
    return client.chat.completions.create(**{"model": "tiny", "messages": ASK, **more})


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_two_calls_whole_and_streamed(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO)])
    whole = chat(running, tools=[WEATHER]).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
    assert calls(whole.message) == [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo", "days": 2})]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    text, found, finish = "", {}, None
    for chunk in chat(running, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            kept = found.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
            assert delta.id in (None, kept["id"])
            kept["arguments"] += delta.function.arguments or ""
        finish = choice.finish_reason or finish
    assert (text, finish, sorted(found)) == ("I look.", "tool_calls", [0, 1])
    assert [found[index] for index in (0, 1)] == [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in whole.message.tool_calls
    ]


def test_a_conversation_with_calls_goes_on(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO), ids("Sun and snow.")])
    first = chat(running, tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in first.tool_calls]
    messages = [*ASK, first.model_dump(exclude_none=True), *results]
    second = chat(running, tools=[WEATHER], messages=messages)
    assert second.choices[0].message.content == "Sun and snow."
    assert second.usage.prompt_tokens_details.cached_tokens > 0.9 * len(fake.prompts()[0])
    sent = running.service.fleet.active.model.tokenizer.backend.decode(fake.prompts()[1], skip_special_tokens=False)
    assert TWO in sent and sent.count("<tool_response>") == 2


def test_parallel_calls_off_and_choice_none(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO)])
    one = chat(running, tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert (calls(one.message), one.finish_reason) == ([("weather", {"city": "Rome"})], "tool_calls")
    none = chat(running, tools=[WEATHER], tool_choice="none").choices[0]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (TWO, None, "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_required_call_is_made(running: Running, fake: FakeEngineFiles, choice: Any, stream: bool) -> None:
    fake.write([ids('I had rather not. "Rome"}}')])
    cities = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": cities}},
        {"type": "function", "function": {"name": "now"}},
    ]
    reply = chat(running, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=200, stream=stream)
    if stream:
        deltas = [choice for chunk in reply for choice in chunk.choices]
        arguments = "".join(d.function.arguments for c in deltas for d in c.delta.tool_calls or [])
        finish = deltas[-1].finish_reason
    else:
        assert reply.choices[0].message.content in (None, "")
        arguments, finish = reply.choices[0].message.tool_calls[0].function.arguments, reply.choices[0].finish_reason
    assert isinstance(json.loads(arguments), dict)
    assert finish == "tool_calls"


class Forecast(BaseModel):
    city: str
    days: int


def test_structured_output_is_parsed_by_the_client(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids('{"city": "Rome", "days": 3}'), ids("Rome!"), ids('{"a": {"b": []}}')])
    client = openai.OpenAI(base_url=running.base + "/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Forecast)
    assert parsed.choices[0].message.parsed == Forecast(city="Rome", days=3)
    format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Oslo", "Rome"]}}}
    assert json.loads(chat(running, response_format=format_).choices[0].message.content) in ("Oslo", "Rome")
    assert json.loads(chat(running, response_format={"type": "json_object"}).choices[0].message.content) == {
        "a": {"b": []}
    }


def test_reasoning_stays_free_before_a_schema(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    ShellVault(THINKING).make(tmp_path / "vaults")
    server = held(start(tmp_path / "vaults"))
    fake.write([ids('Well, {"no".</think>\n\n{"city": "Rome", "days": 3}')])
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": Forecast.model_json_schema()}}
    message = chat(server, response_format=schema).choices[0].message
    assert message.reasoning_content == 'Well, {"no".'
    assert Forecast.model_validate_json(message.content) == Forecast(city="Rome", days=3)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True,
                                                      "parameters": {"type": "nothing"}}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_enforced_is_refused_before_generating(
    running: Running, fake: FakeEngineFiles, more: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(running, stream=stream, **more)
    assert raised.value.param == param
    assert fake.requests() == []


def test_tools_on_a_model_that_cannot_call_are_a_400(start: Start, fake: FakeEngineFiles, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    ShellVault(source).make(tmp_path / "vaults")
    with pytest.raises(openai.BadRequestError) as raised:
        chat(start(tmp_path / "vaults"), tools=[WEATHER])
    assert raised.value.param == "tools" and "knows no tools" in str(raised.value)


def test_a_marker_quoted_in_the_users_text_survives_the_round_trip(running: Running, fake: FakeEngineFiles) -> None:
    said = f"What does {TWO} mean? And <think>, </think>?"
    fake.write([ids("<tool_call> begins a call.")])
    reply = chat(running, messages=[{"role": "user", "content": said}], tools=[WEATHER])
    assert reply.choices[0].message.content == "<tool_call> begins a call."
    sent = running.service.fleet.active.model.tokenizer.backend.decode(fake.prompts()[0], skip_special_tokens=False)
    assert said in sent


# -- the other routes -------------------------------------------------------------------------------------------------


def test_calls_over_responses(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO), ids("Sun."), ids('{"city": "Rome", "days": 3}')])
    client = openai.OpenAI(base_url=running.base + "/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "strict": False, **WEATHER["function"]}]
    first = client.responses.create(model="tiny", input="Rome and Oslo?", tools=tools)
    made = [item for item in first.output if item.type == "function_call"]
    assert [(item.name, json.loads(item.arguments)) for item in made] == [
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Oslo", "days": 2}),
    ]
    asked: Any = [{"role": "user", "content": "Rome and Oslo?"}, *(item.model_dump() for item in first.output)]
    asked += [{"type": "function_call_output", "call_id": item.call_id, "output": "sun"} for item in made]
    assert client.responses.create(model="tiny", input=asked, tools=tools).output_text == "Sun."
    parsed = client.responses.parse(model="tiny", input="Rome?", text_format=Forecast)
    assert parsed.output_parsed == Forecast(city="Rome", days=3)


def test_calls_and_formats_over_ollama(running: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids(TWO), ids("Rome!")])
    reply = running.post("/api/chat", {"messages": ASK, "tools": [WEATHER], "stream": False}).json()
    assert [call["function"] for call in reply["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Rome"}},
        {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
    ]
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    held_to = running.post("/api/chat", {"messages": ASK, "format": schema, "stream": False}).json()
    assert json.loads(held_to["message"]["content"]) == {"city": "Rome"}
