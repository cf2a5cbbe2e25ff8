"""--policy: the stream equals the rules applied to the whole text, for every chunking; and what a policy may say."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.chat.events import Delta, Generated, ReasoningDelta, TextDelta, ToolCallDelta
from smoe_cli.errors import UsageError
from smoe_cli.serve.policy import Policy, PolicyFilter, Screen, load


def policy(tmp_path: Path, *rules: dict[str, Any]) -> Policy:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps([{"action": "redact", **rule} for rule in rules]))
    return load(path)


def cuts(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for count in (1, 2):
        for places in combinations(range(1, len(text)), count):
            yield [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def streamed(rules: Policy, parts: list[str]) -> tuple[str, str | None]:
    screen = Screen(rules)
    text = "".join(screen.feed(part) for part in parts) + screen.end()
    return text, screen.refused.name if screen.refused else None


def reference(rules: list[dict[str, Any]], text: str) -> tuple[str, str | None]:
    """Straight from the words: from the left, the longest match, then the earliest rule. By Python's ``re``."""
    out, at = "", 0
    while at < len(text):
        best: tuple[int, int] = (0, 0)
        for index, rule in enumerate(rules):
            for length in range(1, min(rule.get("window", 256), len(text) - at) + 1):
                if "term" in rule:
                    hit = text[at : at + length].casefold() == rule["term"].casefold()
                else:
                    rest = len(text) - at - length
                    whole = rf"(?s:.{{{at}}})(?:{rule['pattern']})(?s:.{{{rest}}})\Z"
                    hit = re.match(whole, text) is not None
                if hit and length > best[0]:
                    best = (length, index)
        length, index = best
        if not length:
            out, at = out + text[at], at + 1
        elif rules[index].get("action") == "refuse":
            return out, str(index + 1)
        else:
            out, at = out + rules[index].get("replacement", "[redacted]"), at + length
    return out, None


CASES: list[tuple[list[dict[str, Any]], str]] = [
    ([{"term": "secret"}], "a Secret, SECRETS and secre"),
    ([{"term": "straße"}], "STRASSE strasse Straße strass"),
    ([{"term": "ab"}, {"term": "abc", "replacement": "x"}], "ab abc abd aab"),
    ([{"term": "ab", "replacement": "1"}, {"pattern": "a.", "replacement": "2"}], "ab ac"),
    ([{"pattern": "a.", "replacement": "2"}, {"term": "ab", "replacement": "1"}], "ab ac"),
    ([{"pattern": "[0-9]{3}-[0-9]{2,4}"}], "123-45 12-345 123-456789 123-"),
    ([{"pattern": r"\bcat\b"}], "cat concat cats the cat"),
    ([{"pattern": r"\Bcat"}], "cat concat"),
    ([{"pattern": "^a+"}, {"pattern": "b+$", "replacement": ""}], "aab aab bbb"),
    ([{"pattern": "(?m:^x)"}], "x\nxx\ny"),
    ([{"pattern": "(?i:hello)( world)?"}], "HELLO world, hello wor"),
    ([{"pattern": "a+", "window": 3}], "aaaaaaa"),
    ([{"pattern": "a{2,}b?", "window": 4}], "a aa aab aaaab aaaaab"),
    ([{"pattern": "(?:ab|a)(?:c|bcd)"}], "abcd ac abc"),
    ([{"pattern": "a*?b"}], "aab b aa"),
    ([{"pattern": "(a|b)*c", "window": 5}], "ababababc abc"),
    ([{"pattern": "[^a-z ]+"}], "ab CD 12 é"),
    ([{"pattern": "x.y"}, {"pattern": "(?s:p.q)"}], "x\ny p\nq xzy"),
    ([{"term": "no"}, {"term": "stop here", "action": "refuse"}], "no, stop there, no stop here and no more"),
    ([{"term": "日本"}, {"pattern": "🙂+"}], "日本語 🙂🙂 日"),
    ([], "anything"),
]


@pytest.mark.parametrize(("rules", "text"), CASES)
def test_the_stream_equals_the_whole_for_every_chunking(tmp_path: Path, rules: list[dict[str, Any]], text: str) -> None:
    expected = reference(rules, text)
    made = policy(tmp_path, *rules)
    assert made.apply(text)[0] == expected[0]
    for parts in cuts(text):
        assert streamed(made, parts) == expected, parts


def test_random_rules_and_texts(tmp_path: Path) -> None:
    chance = random.Random(7)

    def piece(depth: int) -> str:
        kind = chance.randrange(7 if depth else 4)
        if kind < 3:
            return chance.choice(["a", "b", "[ab]", ".", "[^a]", r"\b", "c"])
        if kind == 3:
            return "".join(piece(0) for _ in range(chance.randrange(1, 4)))
        if kind == 4:
            return f"(?:{piece(depth - 1)}|{piece(depth - 1)})"
        return f"(?:{piece(depth - 1)}){chance.choice(['?', '*', '+', '{1,2}', '{2}'])}"

    tried = 0
    while tried < 150:
        rules: list[dict[str, Any]] = [{"pattern": piece(2), "window": chance.choice([2, 4, 256])} for _ in range(2)]
        rules.append({"term": chance.choice(["ab", "bca"]), "replacement": "T"})
        rules[1]["action"] = chance.choice(["redact", "refuse"])
        try:
            made = policy(tmp_path, *rules)
        except UsageError:
            continue
        tried += 1
        text = "".join(chance.choice("abc ") for _ in range(chance.randrange(1, 14)))
        expected = reference(rules, text)
        edges = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(3))})
        for parts in ([text], list(text), [text[a:b] for a, b in pairwise(edges)]):
            assert streamed(made, parts) == expected, (rules, parts)


def test_only_what_may_still_change_is_held_back(tmp_path: Path) -> None:
    screen = Screen(policy(tmp_path, {"term": "secret"}, {"pattern": "[0-9]{4}"}))
    assert [screen.feed(part) for part in ("a s", "ec", "h", "secret", "12", "3x", "1234")] == [
        "a ", "", "sech", "[redacted]", "", "123x", "[redacted]"]  # fmt: skip
    assert (screen.feed("secre"), screen.end(), screen.holds) == ("", "secre", False)


def test_nothing_makes_it_run_for_ever(tmp_path: Path) -> None:
    made = policy(tmp_path, {"pattern": "(a*)*b"}, {"pattern": "(a|aa)+$"})
    began = time.monotonic()
    streamed(made, ["a" * 400 + "c"])
    assert time.monotonic() - began < 20


# -- deltas -----------------------------------------------------------------------------------------------------------


def through(rules: Policy, *deltas: Delta) -> tuple[list[Delta], PolicyFilter]:
    made = rules.filter()
    out = [one for delta in deltas for one in made.feed(delta)]
    return out + list(made.end()), made


def test_reasoning_text_and_calls_are_covered(tmp_path: Path) -> None:
    rules = policy(tmp_path, {"term": "secret", "replacement": "*"})
    call = ToolCallDelta(0, "id", "tell", '{"a": "the \\u0073ecret", "n": [1.50, "x"]}')
    deltas = [ReasoningDelta("a sec"), ReasoningDelta("ret"), TextDelta("se"), TextDelta("cret is."), call]
    assert through(rules, *deltas)[0] == [
        ReasoningDelta("a "),
        ReasoningDelta("*"),
        TextDelta("* is."),
        ToolCallDelta(0, "id", "tell", '{"a": "the *", "n": [1.5, "x"]}'),
    ]


def test_a_clean_call_is_left_as_the_model_wrote_it(tmp_path: Path) -> None:
    call = ToolCallDelta(0, "id", "tell", '{"n":  1.50}')
    assert through(policy(tmp_path, {"term": "secret"}), call)[0] == [call]


def test_a_number_and_a_cut_call_are_looked_at_too(tmp_path: Path) -> None:
    rules = policy(tmp_path, {"pattern": "[0-9]{4}", "replacement": "*"})
    assert through(rules, ToolCallDelta(0, "i", "f", '{"n": 1234}'))[0] == [ToolCallDelta(0, "i", "f", '{"n": "*"}')]
    assert through(rules, ToolCallDelta(0, "i", "f", '{"n": 1234'))[0] == [ToolCallDelta(0, "i", "f", '{"n": *')]


def test_text_on_both_sides_of_a_call_is_one_text(tmp_path: Path) -> None:
    call = ToolCallDelta(0, "id", "tell", "{}")
    rules = policy(tmp_path, {"term": "secret", "replacement": "*"})
    assert through(rules, TextDelta("sec"), call, TextDelta("ret"))[0] == [TextDelta("*"), call]
    assert through(rules, TextDelta("sec"), call)[0] == [TextDelta("sec"), call]


def test_a_refusal_says_its_message_and_nothing_after_it(tmp_path: Path) -> None:
    rules = policy(tmp_path, {"term": "stop", "action": "refuse", "message": " No."})
    out, made = through(rules, TextDelta("a st"), TextDelta("op b"), TextDelta("c"), ToolCallDelta(0, "i", "f", "{}"))
    assert out == [TextDelta("a "), TextDelta(" No.")] and made.refused
    out, made = through(rules, ReasoningDelta("stop"), TextDelta("c"))
    assert out == [TextDelta(" No.")] and made.refused
    out, made = through(rules, ToolCallDelta(0, "i", "f", '{"a": "stop"}'), TextDelta("c"))
    assert out == [TextDelta(" No.")] and made.refused
    assert not through(rules, TextDelta("a st"))[1].refused


def test_the_report_of_a_redacted_token_never_leaves(tmp_path: Path) -> None:
    rules = policy(tmp_path, {"term": "secret", "replacement": "*"})
    tokens = [Generated(n, n, -0.5) for n in range(4)]
    out, _ = through(
        rules,
        TextDelta("a ", (tokens[0],)),
        TextDelta("sec", (tokens[1],)),
        TextDelta("ret", (tokens[2],)),
        TextDelta("b", (tokens[3],)),
    )
    sent = [token for delta in out if isinstance(delta, TextDelta) for token in delta.tokens]
    assert sent == [tokens[0], tokens[3]]


def test_the_audit_has_rule_and_action_and_never_the_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = policy(tmp_path, {"term": "secret", "name": "codeword"}, {"term": "stop", "action": "refuse"})
    with caplog.at_level(logging.INFO, "smoe.policy"):
        streamed(rules, ["a secret, stop"])
    assert caplog.messages == ["rule codeword: redact", "rule 2: refuse"]


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "not JSON"),
        ('{"rule": []}', "not a list"),
        ("[3]", "rule 1: it is not an object"),
        ('[{"term": "a", "action": "redact"}, {"action": "redact"}]', "rule 2: it needs a term or a pattern"),
        ('[{"term": "a", "pattern": "b", "action": "redact"}]', "a term or a pattern"),
        ('[{"term": "a", "action": "drop"}]', "redact or refuse"),
        ('[{"term": "a"}]', "redact or refuse"),
        ('[{"term": "", "action": "redact"}]', "the term is empty"),
        ('[{"term": 3, "action": "redact"}]', "are texts"),
        ('[{"term": "a", "action": "redact", "colour": 1}]', "unknown: colour"),
        ('[{"pattern": "(", "action": "redact"}]', "no regular expression"),
        ('[{"pattern": "a*", "action": "redact"}]', "no characters"),
        (r'[{"pattern": "\\b", "action": "redact"}]', "no characters"),
        ('[{"pattern": "(?=a)b", "action": "redact"}]', "cannot be matched as a text is written"),
        (r'[{"pattern": "(a)\\1", "action": "redact"}]', "cannot be matched as a text is written"),
        ('[{"pattern": "(a{1000}){1000}", "action": "redact", "window": 60000}]', "states"),
        ('[{"pattern": "a", "action": "redact", "window": 0}]', "window"),
        ('[{"pattern": "a", "action": "redact", "window": true}]', "window"),
    ],
)
def test_a_bad_policy_is_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        load(path)
    assert "bad.json" in str(raised.value)


def test_a_missing_policy_is_refused_and_both_forms_of_the_file_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "nowhere.json")
    (tmp_path / "p.json").write_text('{"rules": [{"term": "a", "action": "redact"}]}')
    assert load(tmp_path / "p.json").apply("abc")[0] == "[redacted]bc"
