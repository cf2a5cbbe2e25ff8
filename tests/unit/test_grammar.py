"""A9 and forced calls: replies held to a grammar, with the tokens of every kind of tokenizer and the calls of every
syntax; what cannot be compiled is refused before anything is generated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from smoe_cli.chat.grammar import Gate, Grammar, Vocabulary
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.parse import markers_of, reply_parser
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.chat.session import TurnOptions, render
from smoe_cli.chat.stream import CONTROL, Piece
from smoe_cli.chat.template import ChatTemplate
from smoe_cli.chat.tokenizer import TextTokenizer
from smoe_cli.chat.tools import harmony
from smoe_cli.chat.tools.base import Call
from smoe_cli.chat.tools.choose import KINDS
from smoe_cli.chat.tools.equip import equip, reply_grammar
from smoe_cli.engine.protocol import Masks
from smoe_cli.errors import UnsupportedError, UsageError
from tests.unit import fakes
from tests.unit import tokenizers_made as made
from tests.unit.test_chat_tools import TEMPLATE, THINKING

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER = Tool("weather", "tells the weather", SCHEMA)
BARE = Tool("weather", "", {**SCHEMA, "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}}})
NOW = Tool("now", "", {"type": "object", "properties": {}, "additionalProperties": False})


def vocabulary(tokenizer: Tokenizer, folder: Path, end: str, *markers: str) -> Vocabulary:
    found = TextTokenizer(made.save(tokenizer, folder))
    markup = [found.id_of(marker) for marker in markers]
    size = tokenizer.get_vocab_size() + 13  # a model's vocabulary is often larger than its tokenizer's
    return Vocabulary(found, size, [found.id_of(end) or 0], [token for token in markup if token is not None])


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


class Driver:
    """Writes a text token by token as far as the masks let it, the longest allowed token first."""

    def __init__(self, tokens: Vocabulary, masks: Masks) -> None:
        self.vocabulary, self.masks = tokens, masks
        self.ids: list[int] = []

    def write(self, text: str) -> str:
        """What of the text could not be written. ``CONTROL`` before a marker: the token itself."""
        rest = text.encode("utf-8", "surrogatepass")
        while rest:
            fitting = [(raw, token) for token in allowed(self.masks.mask()) if rest.startswith(raw := self._raw(token))]
            length, token = max(((len(raw), token) for raw, token in fitting), default=(0, 0))
            if not length:
                break
            self.take(token)
            rest = rest[length:]
        return rest.decode("utf-8", "surrogatepass")

    def take(self, token: int) -> None:
        assert self.masks.mask()[token // 8] >> token % 8 & 1
        self.masks.accept(token)
        self.ids.append(token)

    def may_end(self) -> bool:
        return any(token in self.vocabulary.end_ids for token in allowed(self.masks.mask()))

    def must_end(self) -> bool:
        return set(allowed(self.masks.mask())) <= set(self.vocabulary.end_ids)

    def _raw(self, token: int) -> bytes:
        raw = self.vocabulary.bytes_of(token)
        return (CONTROL.encode("utf-8", "surrogatepass") + raw) if token in self.vocabulary.markup else raw


# -- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "end"), [(made.byte_level, "<|im_end|>"), (made.llama_like, "</s>"), (made.unigram_metaspace, "</s>")]
)
def test_every_tokenizer_can_write_what_is_allowed_and_nothing_else(make: Any, end: str, tmp_path: Path) -> None:
    tokens = vocabulary(make(), tmp_path, end)
    grammar = Grammar(tokens, 'start: %json {"type": "object", "properties": {"The": {"type": "string"}}, '
                      '"additionalProperties": false, "required": ["The"]}', "schema")  # fmt: skip
    for value in ("Rome is", "日本 🙂", "é\\n", ""):
        driver = Driver(tokens, grammar.masks())
        assert driver.write('{"The": "' + value + '"}') == "" and driver.must_end(), value
        assert len(driver.masks.mask()) == (tokens.size + 7) // 8
    assert Driver(tokens, grammar.masks()).write('{"the": 1}') != ""
    assert Driver(tokens, grammar.masks()).write('{"The": 1}') == "1}"
    open_ended = Driver(tokens, grammar.masks())
    open_ended.write('{"The": "a')
    assert not open_ended.may_end()


@pytest.mark.parametrize(
    ("make", "end"), [(made.byte_level, "<|im_end|>"), (made.llama_like, "</s>"), (made.unigram_metaspace, "</s>")]
)
def test_a_token_means_the_bytes_it_is_read_back_as(make: Any, end: str, tmp_path: Path) -> None:
    tokenizer = make()
    tokens = vocabulary(tokenizer, tmp_path, end)
    start = "a"  # the first token of a text loses its space in some tokenizers
    for text in [*made.CORPUS[:3], "naïve 🙂  two\tspaces"]:
        ids = tokenizer.encode(start + text, add_special_tokens=False).ids
        if tokenizer.token_to_id("<unk>") in ids:
            continue
        assert b"".join(map(tokens.bytes_of, ids)).decode().lstrip() == start + text


def test_free_masks_allow_everything_but_the_end_and_ids_that_are_no_tokens(tmp_path: Path) -> None:
    tokens = vocabulary(made.byte_level(), tmp_path, "<|im_end|>")
    end = made.byte_level().token_to_id("<|im_end|>")
    count = made.byte_level().get_vocab_size()
    assert allowed(tokens.anything) == [token for token in range(count) if token != end]
    assert allowed(tokens.end_only) == [end]


# -- calls in every syntax --------------------------------------------------------------------------------------------

SOURCES = {
    "JsonTags": "<tool_call>",
    "FunctionTags": "<tool_call><function=<parameter=",
    "ArgKeys": "<tool_call><arg_key>",
    "InvokeTags": "<minimax:tool_call>",
    "BracketCalls": "[TOOL_CALLS]",
    "NamedBracketCalls": "[TOOL_CALLS][ARGS]",
    "SeparatedCalls": "<｜tool▁call▁begin｜>",
    "FencedCalls": "<｜tool▁call▁begin｜>```json",
    "NumberedCalls": "<|tool_call_begin|><|tool_call_argument_begin|>",
    "BareJson": "<|python_tag|>",
    "harmony": "<|channel|><|message|>",
}
EXAMPLES = {
    "JsonTags": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "FunctionTags": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "ArgKeys": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "InvokeTags": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "BracketCalls": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 3}}]',
    "NamedBracketCalls": '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}',
    "SeparatedCalls": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 3}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "FencedCalls": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "NumberedCalls": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "BareJson": '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}',
    "harmony": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}',
}
MARKERS = {**{kind.__name__: kind.markers for kind in KINDS}, "harmony": harmony.MARKERS}
NAMES = sorted(SOURCES)


class Setup:
    """A made tokenizer that has the syntax's markers as tokens, or not, and a template that only shows them."""

    def __init__(self, name: str, folder: Path, has_tokens: bool) -> None:
        tokenizer = Tokenizer.from_str(made.byte_level().to_str())
        self.markers = MARKERS[name] if has_tokens else ()
        tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in self.markers])
        self.tokenizer = TextTokenizer(made.save(tokenizer, folder, eos_token="<|im_end|>"))
        source = made.CHATML + "{% if false %}" + SOURCES[name] + "{% endif %}"
        self.template = ChatTemplate(source, self.tokenizer, "made")
        markup = [self.tokenizer.id_of(marker) for marker in self.markers]
        ends = [self.tokenizer.id_of("<|im_end|>") or 0]
        self.vocabulary = Vocabulary(self.tokenizer, tokenizer.get_vocab_size(), ends, [m for m in markup if m])

    def driver(self, tools: list[Tool], schema: Any = None, required: bool = False, parallel: bool = True) -> Driver:
        source = reply_grammar(self.template, tools, schema, required, parallel)
        return Driver(self.vocabulary, Grammar(self.vocabulary, source, "tools").masks())

    def spelled(self, text: str) -> str:
        for marker in self.markers:
            text = text.replace(marker, CONTROL + marker)
        return text

    def read(self, driver: Driver, tools: list[Tool]) -> tuple[str, list[Call]]:
        parser = reply_parser(self.template, False, tools)
        keep = {self.tokenizer.marker_id(marker) for marker in markers_of(self.template, tools)}
        half = CONTROL.encode("utf-8", "surrogatepass")
        written = b"".join((half if t in keep else b"") + self.vocabulary.bytes_of(t) for t in driver.ids)
        text = written.decode("utf-8", "surrogatepass")
        out = parser.feed(text) + parser.end()
        shown = "".join(item.text for item in out if isinstance(item, Piece) and not item.reasoning)
        return shown, [item for item in out if isinstance(item, Call)]


@pytest.fixture(params=[True, False], ids=["tokens", "letters"])
def has_tokens(request: pytest.FixtureRequest, name: str) -> bool:
    if not request.param and re.search(r"<[|｜]", SOURCES[name]):
        return True  # a template whose markers are no tokens is refused
    return bool(request.param)


def tools_for(name: str, strict: bool = False) -> list[Tool]:
    weather = BARE if name in ("FunctionTags", "ArgKeys", "InvokeTags") else WEATHER
    return [Tool(weather.name, weather.description, weather.parameters, strict), NOW]


@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_is_written_as_the_syntax_has_it_and_read_back(
    name: str, has_tokens: bool, tmp_path: Path
) -> None:
    setup = Setup(name, tmp_path, has_tokens)
    driver = setup.driver(tools_for(name), required=True)
    assert not driver.may_end()
    assert driver.write(setup.spelled(EXAMPLES[name])) == ""
    assert driver.may_end()
    text, calls = setup.read(driver, tools_for(name))
    assert text == "" and [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Rome", "days": 3})
    ]
    for wrong in ("Well, ", EXAMPLES[name].replace("weather", "whatever"), EXAMPLES[name].replace("city", "town")):
        assert setup.driver(tools_for(name), required=True).write(setup.spelled(wrong)) != ""
    wrong_value = setup.driver(tools_for(name), required=True)
    assert wrong_value.write(setup.spelled(EXAMPLES[name].replace("3", "0"))).startswith("0")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("BareJson", "harmony")])
def test_several_calls_or_one_only(name: str, has_tokens: bool, tmp_path: Path) -> None:
    setup = Setup(name, tmp_path, has_tokens)
    both = {
        "BracketCalls": EXAMPLES[name].replace("}]", '}, {"name": "now", "arguments": {}}]'),
        "SeparatedCalls": EXAMPLES[name].replace(
            "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "FencedCalls": EXAMPLES[name].replace(
            "<｜tool▁calls▁end｜>",
            "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        "NumberedCalls": EXAMPLES[name].replace(
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        "InvokeTags": EXAMPLES[name].replace("</minimax", '<invoke name="now">\n</invoke>\n</minimax'),
        "JsonTags": EXAMPLES[name] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "FunctionTags": EXAMPLES[name] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "ArgKeys": EXAMPLES[name] + "\n<tool_call>now\n</tool_call>",
        "NamedBracketCalls": EXAMPLES[name] + "[TOOL_CALLS]now[ARGS]{}",
    }[name]
    driver = setup.driver(tools_for(name), required=True)
    assert driver.write(setup.spelled(both)) == "" and driver.may_end()
    assert [call.name for call in setup.read(driver, tools_for(name))[1]] == ["weather", "now"]
    single = setup.driver(tools_for(name), required=True, parallel=False)
    assert single.write(setup.spelled(both)) != ""


@pytest.mark.parametrize("name", NAMES)
def test_strict_tools_leave_text_free_and_hold_calls(name: str, has_tokens: bool, tmp_path: Path) -> None:
    setup = Setup(name, tmp_path, has_tokens)
    tools = tools_for(name, strict=True)
    plain = "<|channel|>final<|message|>Well < so [it] is." if name == "harmony" else "Well < so [it] is."
    driver = setup.driver(tools)
    assert driver.write(setup.spelled(plain)) == "" and driver.may_end()
    assert setup.read(driver, tools) == ("Well < so [it] is.", [])
    before = "" if name in ("harmony", "BareJson") else "I look.\n"
    driver = setup.driver(tools)
    assert driver.write(setup.spelled(before + EXAMPLES[name])) == "" and driver.may_end()
    assert [call.name for call in setup.read(driver, tools)[1]] == ["weather"]
    wrong = setup.driver(tools)
    assert wrong.write(setup.spelled(before + EXAMPLES[name].replace("3", "0"))).startswith("0")


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_for_the_text_beside_tools(name: str, has_tokens: bool, tmp_path: Path) -> None:
    setup = Setup(name, tmp_path, has_tokens)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    answer = setup.driver(tools_for(name), schema=SCHEMA)
    assert answer.write(setup.spelled(head + '{"city": "Rome"}')) == "" and answer.may_end()
    assert setup.read(answer, tools_for(name)) == ('{"city": "Rome"}', [])
    call = setup.driver(tools_for(name), schema=SCHEMA)
    assert call.write(setup.spelled(EXAMPLES[name])) == ""
    assert setup.driver(tools_for(name), schema=SCHEMA).write(setup.spelled(head + "Well")) != ""


def test_a_call_is_spaced_as_templates_write_it_and_an_answer_as_the_model_likes(tmp_path: Path) -> None:
    setup = Setup("JsonTags", tmp_path, True)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":'
    assert setup.driver(tools_for("JsonTags"), required=True).write(setup.spelled(call + '"Rome"')) == '"Rome"'
    assert setup.driver(tools_for("JsonTags"), required=True).write(setup.spelled(call + ' "Rome"')) == ""
    for answer in ('{"city":"Rome"}', '{\n  "city": "Rome"\n}'):
        assert setup.driver(tools_for("JsonTags"), schema=SCHEMA).write(answer) == ""


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_sampled_is_a_valid_call(name: str, tmp_path: Path) -> None:
    setup = Setup(name, tmp_path, True)
    tools = [Tool("weather", "", {**SCHEMA, "properties": {
        "city": {"enum": ["Rome", "Oslo", "日本"]}, "days": {"$ref": "#/$defs/days"}}})]  # fmt: skip
    for seed in range(6):
        chance = random.Random(seed)
        driver = setup.driver(tools, required=True, parallel=False)
        for _ in range(400):
            options = allowed(driver.masks.mask())
            ends = [token for token in options if token in setup.vocabulary.end_ids]
            if ends:
                break
            markup = [token for token in options if token in setup.vocabulary.markup]
            driver.take(chance.choice(markup if markup and chance.random() < 0.5 else options))
        text, calls = setup.read(driver, tools)
        assert ends and text == "" and [call.name for call in calls] == ["weather"], driver.ids
        jsonschema.validate(json.loads(calls[0].arguments), tools[0].parameters or {})


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> ChatModel:
    return fakes.model(tmp_path, TEMPLATE)


def test_what_cannot_be_compiled_or_has_no_meaning_is_refused_by_name(model: ChatModel) -> None:
    def param(*arguments: Any) -> str:
        with pytest.raises(UsageError) as raised:
            equip(model, TurnOptions(), *arguments)
        assert raised.value.http_status == 400
        return raised.value.param

    bad = {"type": "objekt"}
    assert param((), ToolChoice(), ResponseFormat("json_schema", bad)) == "response_format"
    assert param((), ToolChoice(), ResponseFormat("json_schema", {"$ref": "#/nowhere"})) == "response_format"
    assert param((), ToolChoice(), ResponseFormat("json_schema", {"not": {}})) == "response_format"
    lenient = {"not": {}, "x-guidance": {"lenient": True}}  # nobody but the server chooses how it is compiled
    assert param((), ToolChoice(), ResponseFormat("json_schema", lenient)) == "response_format"
    assert param((), ToolChoice(), ResponseFormat("json_schema", None)) == "response_format"
    assert param([Tool("f", "", bad)], ToolChoice("required")) == "tools"
    assert param([Tool("f", "", bad, strict=True)]) == "tools"
    assert param((), ToolChoice("required")) == "tool_choice"
    assert param([NOW], ToolChoice("required", "other")) == "tool_choice"
    assert param([NOW, NOW]) == "tools"
    assert param([Tool("two words")]) == param([Tool("")]) == param([Tool('a">')]) == "tools"


def test_the_reason_is_said_and_the_server_s_own_grammar_is_not(model: ChatModel) -> None:
    with pytest.raises(
        UsageError, match=r"response_format cannot be compiled: Unimplemented keys: \[.not.\]"
    ) as raised:
        equip(model, TurnOptions(), (), ToolChoice(), ResponseFormat("json_schema", {"not": {}}))
    assert "start" not in raised.value.text and "x-guidance" not in raised.value.text


def test_a_rule_that_the_syntax_cannot_enforce_is_refused_for_strict_tools_only(tmp_path: Path) -> None:
    setup = Setup("FunctionTags", tmp_path, True)
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^R"}}}
    reply_grammar(setup.template, [Tool("f", "", schema)], None, True, True)
    with pytest.raises(UnsupportedError, match="'city' of 'f' has pattern"):
        reply_grammar(setup.template, [Tool("f", "", schema, strict=True)], None, True, True)


def test_nothing_asked_means_no_constraint_and_none_means_no_tools(model: ChatModel) -> None:
    options = equip(model, TurnOptions(), [WEATHER], ToolChoice(parallel=False))
    assert options.hooks.constraint is None and options.hooks.single_call and options.tools == (WEATHER,)
    assert equip(model, TurnOptions(), [WEATHER], ToolChoice("none")).tools == ()


def masks_of(model: ChatModel, options: TurnOptions) -> Masks:
    prompt = render(model, [{"role": "user", "content": "x"}], options)
    assert options.hooks.constraint is not None
    return options.hooks.constraint(prompt)


def test_a_named_tool_is_the_only_one_that_can_be_called(model: ChatModel) -> None:
    options = equip(model, TurnOptions(), [WEATHER, NOW], ToolChoice("required", "now"))
    assert options.tools == (WEATHER, NOW)
    weather, now = (Driver(model.vocabulary, masks_of(model, options)) for _ in range(2))
    assert weather.write('<tool_call>\n{"name": "weather"').startswith("we")
    assert now.write('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>') == ""


def test_the_grammar_begins_behind_the_reasoning(tmp_path: Path) -> None:
    thinking = fakes.model(tmp_path, THINKING)
    options = equip(thinking, TurnOptions(), (), ToolChoice(), ResponseFormat("json_object"))
    driver = Driver(thinking.vocabulary, masks_of(thinking, options))
    assert not driver.may_end()
    assert driver.write("Why </t not so?" + CONTROL + "</think>\n\n") == ""
    assert driver.write("no") == "no" and driver.write('{"a": [1, {}]}') == "" and driver.must_end()


def test_a_model_may_open_its_reasoning_itself_unless_the_prompt_has_closed_it(tmp_path: Path) -> None:
    closed = THINKING.replace("{%- endif -%}", "{%- else -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}")
    closed = closed.replace("{{ '<think>' }}", "")
    model = fakes.model(tmp_path, closed)
    for thinking, may in ((None, True), (False, False)):
        options = equip(model, TurnOptions(thinking=thinking), (), ToolChoice(), ResponseFormat("json_object"))
        driver = Driver(model.vocabulary, masks_of(model, options))
        opened = driver.write(CONTROL + "<think>") == ""
        assert opened is may
        if opened:
            assert driver.write(f"Why{CONTROL}</think>\n") == ""
        assert driver.write('{"a": 1}') == "" and driver.must_end()
        assert driver.write(CONTROL + "<think>") != ""


def test_a_line_break_may_come_before_the_reasoning_that_a_model_opens(tmp_path: Path) -> None:
    model = fakes.model(tmp_path, TEMPLATE)
    options = equip(model, TurnOptions(), (), ToolChoice(), ResponseFormat("json_object"))
    for begin in ("\n" + CONTROL + "<think>why" + CONTROL + "</think>\n", "\n", "\n\n"):
        driver = Driver(model.vocabulary, masks_of(model, options))
        assert driver.write(begin + '{"a": 1}') == "" and driver.must_end(), begin
    endless = Driver(model.vocabulary, masks_of(model, options))
    assert endless.write("\n" * 50) != ""


def test_a_gate_of_letters_closes_where_the_text_does() -> None:
    gate = Gate(("<think>", "</think>"), lambda token: chr(token), True, None)
    for letter in "so</think>":
        assert not gate.open
        assert gate.accept(ord(letter))
    assert gate.open and not gate.accept(ord("x"))
