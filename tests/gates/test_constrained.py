"""A9, A2 with the real engine: whatever its weights say, a reply held to a grammar obeys it. The weights are random."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from smoe_cli.chat.events import Done, TextDelta, ToolCallDelta
from smoe_cli.chat.launch import Chat, start
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.chat.session import TurnOptions, turn
from smoe_cli.chat.tools.equip import equip
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.protocol import Sampling
from tests.gates.test_chat_engine import open_tiny
from tests.gates.test_chat_engine import vault as vault

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["sun", "snow", "日本"]},
    },
    "required": ["city", "days", "kind"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def chat(vault: Path) -> Iterator[Chat]:
    opened = open_tiny(vault, flags=EngineFlags(ctx=512, threads=1))
    with opened.engine:
        start(opened)
        yield opened


def options(chat: Chat, seed: int) -> TurnOptions:
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=seed)
    return replace(chat.options(), sampling=sampling, max_tokens=400)


def run(chat: Chat, held: TurnOptions) -> tuple[str, list[ToolCallDelta], str]:
    events = list(turn(chat.engine, chat.model, USER, held))
    assert isinstance(events[-1], Done)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, [event for event in events if isinstance(event, ToolCallDelta)], events[-1].finish_reason


def test_random_weights_write_json_of_the_schema(chat: Chat) -> None:
    finished = 0
    for seed in range(6):
        held = equip(chat.model, options(chat, seed), (), ToolChoice(), ResponseFormat("json_schema", SCHEMA))
        text, _, finish = run(chat, held)
        if finish == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
            finished += 1
    assert finished >= 4


def test_random_weights_make_the_call_that_is_required(chat: Chat) -> None:
    finished = 0
    schema = {"type": "object", "properties": {"city": {"enum": ["sun", "日本"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    tools = [Tool("w", "", schema), Tool("n")]  # a short prompt: the window is 512
    for seed in range(4):
        held = equip(chat.model, options(chat, seed), tools, ToolChoice("required", "w", parallel=False))
        text, calls, finish = run(chat, held)
        if finish == "tool_calls":
            assert text == "" and [call.name for call in calls] == ["w"]
            jsonschema.validate(json.loads(calls[0].arguments), schema)
            finished += 1
    assert finished == 4  # nothing in the schema may go on for long


def test_a_held_reply_is_the_same_warm_and_cold_and_leaves_the_next_one_free(chat: Chat) -> None:
    held = equip(chat.model, options(chat, 1), (), ToolChoice(), ResponseFormat("json_schema", SCHEMA))
    first = run(chat, held)
    assert run(chat, held) == first
    chat.engine.reset()
    assert run(chat, held) == first
    free = run(chat, options(chat, 1))[0]
    with pytest.raises(ValueError):
        json.loads(free)
