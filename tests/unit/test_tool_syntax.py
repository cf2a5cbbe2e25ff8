"""S12, S13: tool calls in every syntax, the same for every way of splitting the text; what is no call stays text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from smoe_cli.chat.request import Tool
from smoe_cli.chat.stream import CONTROL, Piece
from smoe_cli.chat.tools import deepseek, glm, harmony, invoke_tags, kimi, mistral
from smoe_cli.chat.tools.base import Call, CallStream, Syntax, call_of, calls_of, members
from smoe_cli.chat.tools.choose import KINDS, syntax_of
from smoe_cli.chat.tools.deepseek import SeparatedCalls
from smoe_cli.chat.tools.function_tags import FunctionTags
from smoe_cli.chat.tools.glm import ArgKeys
from smoe_cli.chat.tools.invoke_tags import InvokeTags
from smoe_cli.chat.tools.json_tags import JsonTags
from smoe_cli.chat.tools.kimi import NumberedCalls
from smoe_cli.chat.tools.llama import BareJson
from smoe_cli.chat.tools.mistral import BracketCalls

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": ["object", "null"]},
        },
    },
)
TOOLS = [WEATHER, Tool("now")]
ROME = '{"city": "Rome"}'

Result = tuple[str, list[tuple[str, Any, str]]]


def pieces(text: str) -> Iterator[list[str]]:
    """Whole, in two at every place, one character at a time, and cut at random."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield list(text)
    chance = random.Random(5)
    for _ in range(40):
        edges = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(chance.randrange(8)))})
        yield [text[a:b] for a, b in pairwise(edges)]


def run(syntax: Syntax, parts: list[str]) -> tuple[Result, list[str | Call]]:
    stream = CallStream(syntax)
    out = [item for part in parts for item in stream.feed(part)] + stream.end()
    calls = [(item.name, json.loads(item.arguments), item.id) for item in out if isinstance(item, Call)]
    return ("".join(item for item in out if isinstance(item, str)), calls), out


def control(*markers: str) -> Callable[[str], str]:
    """The markers as a tokenizer spells them that has these as tokens."""
    return lambda marker: CONTROL + marker if marker in markers else marker


def check(kind: type[Syntax], text: str, expected: Result) -> None:
    """With markers that are only text, and with all of them as control tokens."""
    spelled = text
    for marker in sorted(kind.markers, key=len, reverse=True):
        spelled = spelled.replace(marker, CONTROL + marker)
    for parts in pieces(text):
        assert run(kind(TOOLS, str), parts)[0] == expected, parts
    for parts in pieces(spelled):
        assert run(kind(TOOLS, control(*kind.markers)), parts)[0] == expected, parts


def rome(call_id: str = "") -> tuple[str, Any, str]:
    return ("weather", {"city": "Rome"}, call_id)


NOW: tuple[str, Any, str] = ("now", {}, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', ("", [rome()])),
        (
            'I look.\n\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
            '<tool_call>{"name":"now","arguments":{}}</tool_call>',
            ("I look.", [rome(), NOW]),
        ),
        ('<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call> \nDone. ', ("Done. ", [rome()])),
        ('<tool_call>[{"name":"weather","arguments":{"city":"Rome"}},{"name":"now"}]</tool_call>', ("", [rome(), NOW])),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', ("", [rome()])),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}', ("", [rome()])),  # ended without the tag
        (
            '<tool_call>{"name":"weather","arguments":{"city":"a </tool_call> b"}}</tool_call>',
            ("", [("weather", {"city": "a </tool_call> b"}, "")]),
        ),
        ("no call, but < and <tool", ("no call, but < and <tool", [])),
        ("ends in white space \n\n", ("ends in white space \n\n", [])),
        ("<tool_call>not json</tool_call> and on", ("<tool_call>not json</tool_call> and on", [])),
        ("a <tool_call>{", ("a <tool_call>{", [])),
        ('<tool_call>{"name": "weather"', ('<tool_call>{"name": "weather"', [])),
        ('<tool_call>{"name": 7}</tool_call>', ('<tool_call>{"name": 7}</tool_call>', [])),
        ('<tool_call>{"name":"now","arguments":[1]}</tool_call>', None),
        ('<tool_call>{"name":"now"} {"name":"now"}</tool_call>', None),
        ('<tool_call>x</tool_call>\n<tool_call>{"name":"now"}</tool_call>', ("<tool_call>x</tool_call>", [NOW])),
        ("", ("", [])),
    ],
)
def test_json_in_tags(text: str, expected: Result | None) -> None:
    if expected and "a </tool_call> b" in text:  # with a control token, what stands in a string is another text
        for parts in pieces(text):
            assert run(JsonTags(TOOLS, str), parts)[0] == expected
    else:
        check(JsonTags, text, expected or (text, []))


def test_a_quoted_marker_is_text_where_the_tokenizer_has_the_marker_as_a_token() -> None:
    syntax = JsonTags(TOOLS, control("<tool_call>", "</tool_call>"))
    quoted = 'Write <tool_call>{"name": "now", "arguments": {}}</tool_call> to call.'
    for parts in pieces(quoted):
        assert run(syntax, parts)[0] == (quoted, [])
    inside = f'{CONTROL}<tool_call>{{"name":"weather","arguments":{{"city":"</tool_call>"}}}}{CONTROL}</tool_call>'
    for parts in pieces(inside):
        assert run(syntax, parts)[0] == ("", [("weather", {"city": "</tool_call>"}, "")])


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"days":1e1,  "city": "caf\\u00e9"}}</tool_call>'
    (call,) = run(JsonTags(TOOLS, str), [text])[1]
    assert call == Call("weather", '{"days":1e1,  "city": "caf\\u00e9"}')


def test_text_before_a_call_comes_out_at_once_and_in_order() -> None:
    stream = CallStream(JsonTags(TOOLS, str))
    assert stream.feed("Look < here") == ["Look < here"]
    assert stream.feed(' <tool_call>{"name":"now"}</tool_call>x<') == [Call("now", "{}"), "x"]
    assert stream.end() == ["<"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JsonTags, "<tool_call> begins"),
        (JsonTags, "a <tool_call>\n\n<b"),
        (FunctionTags, "<tool_call> begins"),
        (FunctionTags, "<tool_call>\n{"),
        (InvokeTags, "<minimax:tool_call>\nThe"),
        (ArgKeys, "<tool_call> (that is"),
    ],
)
def test_a_marker_in_prose_holds_nothing_back(kind: type[Syntax], text: str) -> None:
    stream = CallStream(kind(TOOLS, str))
    assert "".join(item for letter in text for item in stream.feed(letter) if isinstance(item, str)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            '<parameter=exact>\nTrue\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n</function>\n'
            "</tool_call>",
            ("", [("weather", {"city": "Rome", "days": 3, "exact": True, "where": {"a": [1]}}, "")]),
        ),
        ("<tool_call><function=now></function></tool_call>", ("", [NOW])),
        ("ok <function=weather><parameter=city>Rome</parameter></function> so", ("ok" + "so", [rome()])),
        (
            "<tool_call><function=weather><parameter=city>\n12\n\n</parameter></function></tool_call>",
            ("", [("weather", {"city": "12\n"}, "")]),  # a string stays one, with its own line breaks
        ),
        (
            "<tool_call><function=other><parameter=n>12</parameter><parameter=s>1 2</parameter></function></tool_call>",
            ("", [("other", {"n": 12, "s": "1 2"}, "")]),
        ),
        ("<tool_call><function=now>junk</function></tool_call>", None),
        ("<tool_call>{}</tool_call>", None),
        ("<tool_call><function=weather><parameter=city>Ro", None),
    ],
)
def test_function_tags(text: str, expected: Result | None) -> None:
    check(FunctionTags, text, expected or (text, []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
            '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            ("", [rome(), NOW]),
        ),
        ("<minimax:tool_call>junk</minimax:tool_call>", None),
    ],
)
def test_invoke_tags(text: str, expected: Result | None) -> None:
    check(InvokeTags, text, expected or (text, []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
            ("", [("weather", {"city": "Rome", "days": 3}, ""), NOW]),
        ),
        ("<tool_call>now</tool_call> after", ("after", [NOW])),
        ("<tool_call>two words</tool_call>", None),
        ("<tool_call></tool_call>", None),
        ("<tool_call>weather<arg_key>city</arg_key>", None),
    ],
)
def test_arg_keys(text: str, expected: Result | None) -> None:
    check(ArgKeys, text, expected or (text, []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdef123"}, {"name": "now"}]',
            ("", [rome("abcdef123"), NOW]),
        ),
        ('Well. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}', ("Well.", [rome()])),
        ('[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}',
         ("", [rome("abcdef123"), NOW])),
        ('[TOOL_CALLS]weather{"city": "Rome"} so', ("so", [rome()])),
        ("[TOOL_CALLS]", None),
        ("[TOOL_CALLS] nothing of the kind }", None),
        ('[TOOL_CALLS] [{"name": "weather", ', None),
        ('[TOOL_CALLS]now[ARGS][1] [TOOL_CALLS]now[ARGS]{}', ("[TOOL_CALLS]now[ARGS][1]", [NOW])),
    ],
)  # fmt: skip
def test_bracket_calls(text: str, expected: Result | None) -> None:
    check(BracketCalls, text, expected or (text, []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "weather", "parameters": {"city": "Rome"}}', ("", [rome()])),
        (' {"type": "function", "name": "weather", "parameters": {"city": "Rome"}}; {"name": "now"}\n',
         ("", [rome(), NOW])),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', ("", [rome()])),
        ('{"name": "now"} so it is', ("so it is", [NOW])),
        ('{"name": "unheard", "parameters": {}}', None),
        ('{"answer": 42}', None),
        ('{"name": "weather", "par', None),
        ("{{ template }}", None),
        ('See {"name": "now"}', None),
        ("; {", None),
        ('{"name": "now"};', (";", [NOW])),
        ('<|python_tag|>print("x")', None),
    ],
)  # fmt: skip
def test_bare_json(text: str, expected: Result | None) -> None:
    check(BareJson, text, expected or (text, []))


def test_a_json_answer_that_is_no_call_is_not_held_back() -> None:
    stream = CallStream(BareJson(TOOLS, str))
    assert stream.feed('{"answer"') == ["{", '"answer"']


V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>".replace(
        "{}", ROME
    )
)
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + ROME + "\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (V31, ("", [rome()])),
        ("So.\n" + V31 + " after", ("So." + "after", [rome()])),
        (f"<｜tool▁calls▁begin｜>{V3_CALL}\n{V3_CALL}<｜tool▁calls▁end｜>", ("", [rome(), rome()])),
        (V31.removesuffix("<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), ("", [rome()])),
        (V31.replace('"Rome"', "Rome").replace("<｜tool▁calls▁end｜>", ""), None),
        ("<｜tool▁calls▁begin｜> and nothing", None),
    ],
)
def test_separated_calls(text: str, expected: Result | None) -> None:
    check(SeparatedCalls, text, expected or (text, []))


def numbered(arguments: str) -> str:
    return f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"<|tool_calls_section_begin|>{numbered(ROME)}\n{numbered(ROME)}<|tool_calls_section_end|>",
            ("", [rome("functions.weather:0")] * 2),
        ),
        (f"I see. {numbered(ROME)}", ("I see.", [rome("functions.weather:0")])),
        (f"<|tool_calls_section_begin|>{numbered('{]')}", None),
    ],
)
def test_numbered_calls(text: str, expected: Result | None) -> None:
    check(NumberedCalls, text, expected or (text, []))


# -- channels ---------------------------------------------------------------------------------------------------------


def spoken(parts: list[str], calls: bool, spell: Callable[[str], str]) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = harmony.HarmonyReply(spell, calls)
    out = [item for part in parts for item in parser.feed(part)] + parser.end()
    texts = {
        side: "".join(p.text for p in out if isinstance(p, Piece) and p.reasoning is side) for side in (True, False)
    }
    return texts[True], texts[False], [(c.name, json.loads(c.arguments)) for c in out if isinstance(c, Call)]


A, F, C = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{A}Why < so.{NEXT}{F}So.", ("Why < so.", "So.", [])),
        (f"{A}Why{NEXT}{C} to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>",
         ("Why", "", [("weather", {"city": "Rome"})])),
        (f"{A}Why{NEXT}{C} to=functions.weather <|constrain|>json<|message|>{ROME}",  # <|call|> ends the reply unseen
         ("Why", "", [("weather", {"city": "Rome"})])),
        (f" to=functions.now{C} json<|message|>", ("", "", [])),
        (f" to=functions.now{C} json<|message|>{{}}", ("", "", [("now", {})])),
        (f"{A}a{NEXT}{A}b{NEXT}{C}<|message|>first{NEXT}{F}then", ("a\n\nb", "first\n\nthen", [])),
        (f"{F}half an ans", ("", "half an ans", [])),
        (f"{A}the budget ends", ("the budget ends", "", [])),
        (f"{F}no end before the next<|start|>assistant{F}one", ("", "no end before the next\n\none", [])),
        ("no channel at all", ("", "no channel at all", [])),
        (f"{C} to=functions.weather<|message|>{{broken<|call|>", ("", "{broken", [])),
        (f"{A}Why<|end|><|start|>assist", ("Why", "", [])),
        ("", ("", "", [])),
    ],
)  # fmt: skip
def test_channels(text: str, expected: tuple[str, str, list[tuple[str, Any]]]) -> None:
    spelled = text
    for marker in harmony.MARKERS:
        spelled = spelled.replace(marker, CONTROL + marker)
    for parts in pieces(text) if text else [[""]]:
        assert spoken(parts, True, str) == expected, parts
    for parts in pieces(spelled) if text else [[""]]:
        assert spoken(parts, True, control(*harmony.MARKERS)) == expected, parts


def test_without_tools_a_message_to_one_is_text_and_a_quoted_marker_stays() -> None:
    assert spoken([f"{C} to=functions.now<|message|>{{}}"], False, str) == ("", "{}", [])
    spelled = f"{CONTROL}<|channel|>final{CONTROL}<|message|>write <|end|> so"
    assert spoken([spelled], True, control(*harmony.MARKERS)) == ("", "write <|end|> so", [])


def test_the_state_says_which_side_a_token_counts_for() -> None:
    parser = harmony.HarmonyReply()
    assert parser.reasoning
    parser.feed(A + "x")
    assert parser.reasoning
    parser.feed(NEXT + F)
    assert not parser.reasoning and parser.in_text


# -- choosing, JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ '<tool_call>' }}", JsonTags),
        ("'<tool_call>\\n<function=' + name + '>' '<parameter='", FunctionTags),
        ("<tool_call>{n}<arg_key>", ArgKeys),
        (mistral.OPEN, BracketCalls),
        (f"'{deepseek.SECTION}{deepseek.OPEN}'", SeparatedCalls),
        (f"{kimi.OPEN} {kimi.ARGUMENTS}", NumberedCalls),
        (invoke_tags.OPEN, InvokeTags),
        ('<|start_header_id|> {"name": f, "parameters": p}', BareJson),
        (glm.KEY, ArgKeys),
        ("<|im_start|>", None),
    ],
)
def test_the_template_tells_the_syntax(template: str, kind: type[Syntax] | None) -> None:
    assert syntax_of(template) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_model_may_write_is_an_error_or_lost(kind: type[Syntax]) -> None:
    chance = random.Random(kind.__name__)
    scraps = [
        *kind.markers,
        *'{}[]":,;<>\n ',
        "name",
        '"name"',
        "weather",
        "arguments",
        "<function=",
        "</function>",
        "x",
    ]
    for _ in range(400):
        text = "".join(chance.choice(scraps) for _ in range(chance.randrange(14)))
        whole = run(kind(TOOLS, str), [text])[0]
        assert run(kind(TOOLS, str), list(text))[0] == whole, text
        assert whole[1] or whole[0].split() == text.split() or issubclass(kind, (SeparatedCalls, NumberedCalls)), text


def test_members_are_given_as_written() -> None:
    assert members(' {"a" : [1,  2] , "b":"\\u00e9", "c":{}} ') == {"a": "[1,  2]", "b": '"\\u00e9"', "c": "{}"}
    assert members("{}") == {}
    assert [members(bad) for bad in ("", "[]", "{", '{"a":}', "nul")] == [None] * 5
    assert call_of('{"name":"f","arguments":null}') == Call("f", "{}")
    assert calls_of("[]") is None
    assert call_of("[" * 10000) is None
