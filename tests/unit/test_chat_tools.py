"""Tools in a turn: calls as events, ids, history and the reply's end, through the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from smoe_cli.chat.events import Done, Event, ReasoningDelta, Restarted, TextDelta, ToolCallDelta
from smoe_cli.chat.hooks import Hooks
from smoe_cli.chat.launch import Chat, ChatRequest
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.chat.session import TurnOptions, turn
from smoe_cli.chat.tools.equip import equip
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import SmoeError
from tests.unit import fakes
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

WEATHER = Tool("weather", "tells the weather", {"type": "object", "properties": {"city": {"type": "string"}}})
OPTIONS = TurnOptions(sampling=Sampling(temperature=0.0), tools=[WEATHER, Tool("now")])
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = TEMPLATE + "{%- if enable_thinking is not defined or enable_thinking -%}{{ '<think>' }}{%- endif -%}"
ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture
def chat(fake: FakeEngineFiles, tmp_path: Path) -> Iterator[Chat]:
    model = fakes.model(tmp_path, TEMPLATE)
    with fakes.manager(model.vault) as engine:
        yield Chat(ChatRequest(), model, engine)


def run(chat: Chat, options: TurnOptions = OPTIONS, messages: list[dict[str, Any]] | None = None) -> list[Event]:
    return list(turn(chat.engine, chat.model, messages or USER, options))


def calls(events: list[Event]) -> list[tuple[int, str, str]]:
    return [(e.index, e.name, e.arguments) for e in events if isinstance(e, ToolCallDelta)]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finish(events: list[Event]) -> str:
    assert isinstance(events[-1], Done)
    return events[-1].finish_reason


def test_two_calls_then_text(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids(f"I look.\n{ROME}\n{NOW}\nDone")])
    events = run(chat)
    assert calls(events) == [(0, "weather", '{"city": "Rome"}'), (1, "now", "{}")]
    assert text(events) == "I look.Done" and finish(events) == "tool_calls"
    made_ids = [event.id for event in events if isinstance(event, ToolCallDelta)]
    assert len(set(made_ids)) == 2 and all(one.startswith("call_") for one in made_ids)


def test_ids_are_stable_for_a_conversation_and_differ_between_turns(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids(ROME)])

    def call_id(messages: list[dict[str, Any]]) -> str:
        return next(event.id for event in run(chat, messages=messages) if isinstance(event, ToolCallDelta))

    first = call_id(USER)
    assert call_id(USER) == first
    call = {"id": first, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    more = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert call_id([*more, {"role": "tool", "tool_call_id": first, "content": "sun"}]) != first


def test_without_tools_on_offer_markup_is_text(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids(ROME)])
    events = run(chat, replace(OPTIONS, tools=()))
    assert (text(events), calls(events), finish(events)) == (ROME, [], "stop")


def test_a_malformed_call_is_text_and_a_cut_one_ends_with_length(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids('<tool_call>{"name": </tool_call> so')])
    events = run(chat)
    assert (text(events), calls(events), finish(events)) == ('<tool_call>{"name": </tool_call> so', [], "stop")
    fake.write([ids(ROME)])
    chat.engine.stop()
    events = run(chat, replace(OPTIONS, max_tokens=len(ids(ROME)) - 9))
    assert text(events) and ROME.startswith(text(events)) and finish(events) == "length"


def test_reasoning_then_a_call(fake: FakeEngineFiles, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, THINKING)
    fake.write([ids(f"why <tool_call>\n</think>\n\n{ROME}")])
    with fakes.manager(model.vault) as engine:
        events = run(Chat(ChatRequest(), model, engine))
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "why <tool_call>"
    assert (text(events), calls(events), finish(events)) == ("", [(0, "weather", '{"city": "Rome"}')], "tool_calls")


def test_a_quoted_reasoning_tag_closes_nothing(fake: FakeEngineFiles, tmp_path: Path) -> None:
    """S12: the tokenizer has </think> as a token; spelled by other tokens it is text."""
    model = fakes.model(tmp_path, THINKING)
    quoted = [token for letter in "</think>" for token in ids(letter)]
    fake.write([[*ids("so "), *quoted, *ids(" is a tag</think>"), *ids("ok "), *ids("</think>"), *ids("!")]])
    with fakes.manager(model.vault) as engine:
        events = run(Chat(ChatRequest(), model, engine))
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "so </think> is a tag"
    assert text(events) == "ok </think>!"


def test_a_single_call_ends_the_reply(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids(ROME + NOW) + ids(" more") * 50, ids("next")], token_ms=2)
    events = run(chat, replace(OPTIONS, hooks=Hooks(single_call=True)))
    assert (calls(events), text(events)) == ([(0, "weather", '{"city": "Rome"}')], "")
    assert finish(events) == "tool_calls"
    assert text(run(chat)) == "next"


def test_a_stop_string_before_a_call_drops_the_call_and_one_inside_it_does_not_count(
    chat: Chat, fake: FakeEngineFiles
) -> None:
    fake.write([ids(f"one STOP {ROME}"), ids(f"one ST {ROME}OP"), ids(ROME)])
    events = run(chat, replace(OPTIONS, stop=["STOP"]))
    assert (text(events), calls(events), finish(events)) == ("one ", [], "stop")
    events = run(chat, replace(OPTIONS, stop=["STOP"]))
    assert (text(events), len(calls(events)), finish(events)) == ("one STOP", 1, "tool_calls")
    assert len(calls(run(chat, replace(OPTIONS, stop=["Rome"])))) == 1


def test_a_marker_in_the_users_text_survives(chat: Chat, fake: FakeEngineFiles) -> None:
    """S12."""
    said = f"What does {ROME} mean? And <think>?"
    fake.write([ids("It is a call.")])
    run(chat, messages=[{"role": "user", "content": said}])
    sent = chat.model.tokenizer.backend.decode(fake.prompts()[0], skip_special_tokens=False)
    assert said in sent
    think = chat.model.tokenizer.id_of("<think>")
    assert think not in fake.prompts()[0]
    assert made.byte_level().decode(fake.prompts()[0], skip_special_tokens=False) == sent


# -- held to a grammar ------------------------------------------------------------------------------------------------

ROME_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 3, "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_schema_holds_the_reply_whatever_the_model_would_say(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("I would rather talk."), ids('{"city": "Oslo", "days": 2}')])
    options = equip(chat.model, OPTIONS, (), ToolChoice(), ResponseFormat("json_schema", ROME_SCHEMA))
    for _ in range(2):
        events = run(chat, options)
        jsonschema.validate(json.loads(text(events)), ROME_SCHEMA)
        assert finish(events) == "stop"
    assert json.loads(text(events)) == {"city": "Oslo", "days": 2}
    assert " mask=1 " in fake.requests()[0]["request"]


def test_a_required_call_is_made_whatever_the_model_would_say(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("No.")])
    tool = Tool("weather", "", ROME_SCHEMA)
    options = equip(chat.model, OPTIONS, [tool], ToolChoice("required", parallel=False))
    events = run(chat, options)
    ((index, name, arguments),) = calls(events)
    assert (index, name, text(events), finish(events)) == (0, "weather", "", "tool_calls")
    jsonschema.validate(json.loads(arguments), ROME_SCHEMA)


def test_masks_begin_anew_when_the_engine_dies_and_the_request_is_sent_again(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids('{"city": "Rome", "days": 1}')], faults=[{"after": 4, "kind": "signal"}])
    options = equip(chat.model, OPTIONS, (), ToolChoice(), ResponseFormat("json_schema", ROME_SCHEMA))
    events = run(chat, options)
    assert any(isinstance(event, Restarted) for event in events)
    assert json.loads(text(events)) == {"city": "Rome", "days": 1} and finish(events) == "stop"


def test_the_budget_may_end_a_held_reply_and_a_cancelled_one_leaves_the_engine_well(
    chat: Chat, fake: FakeEngineFiles
) -> None:
    fake.write([ids('{"city": "Rome", "days": 1}')], token_ms=20)
    options = equip(chat.model, OPTIONS, (), ToolChoice(), ResponseFormat("json_schema", ROME_SCHEMA))
    assert finish(run(chat, replace(options, max_tokens=3))) == "length"
    running = turn(chat.engine, chat.model, USER, options)
    next(event for event in running if isinstance(event, TextDelta))
    running.close()  # type: ignore[attr-defined]
    pid = chat.engine.pid
    assert json.loads(text(run(chat, options))) == {"city": "Rome", "days": 1} and chat.engine.pid == pid


def test_a_mask_that_cannot_be_made_ends_the_turn_and_leaves_the_engine_well(chat: Chat, fake: FakeEngineFiles) -> None:
    class Broken:
        def __init__(self) -> None:
            self.asked = 0

        def mask(self) -> bytes:
            self.asked += 1
            if self.asked == 3:
                raise SmoeError("the reply's grammar failed: too complex")
            return b"\xff" * 100

        def accept(self, token: int) -> None:
            pass

    fake.write([ids("one two three four"), ids("next")])
    with pytest.raises(SmoeError, match="too complex"):
        run(chat, replace(OPTIONS, hooks=Hooks(constraint=lambda prompt: Broken())))
    pid = chat.engine.pid
    assert pid and text(run(chat)) and chat.engine.pid == pid
