"""S3 to S6, S12: stop strings and reasoning, the same for every way of splitting the text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from smoe_cli.chat.stream import Piece, ReasoningParser, StopStrings

TAGS = ("<think>", "</think>")


def splits(text: str, cuts: int = 3) -> Iterator[list[str]]:
    """Every way to cut the text in up to ``cuts`` places, and one character at a time."""
    for count in range(cuts + 1):
        for places in combinations(range(1, len(text)), count):
            edges = [0, *places, len(text)]
            yield [text[a:b] for a, b in pairwise(edges)]
    yield list(text)


def stopped(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.end(), matcher.matched


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one ST", ["STOP"], "one ST", None),  # the beginning of a stop at the end is flushed
        ("one STO", ["STOP", "OX"], "one STO", None),
        ("ab\n\ncd", ["\n\n"], "ab", "\n\n"),
        ("ab\ncd", ["\n"], "ab", "\n"),
        ("\nab", ["\n"], "", "\n"),
        ("abcd", ["bcd", "cd"], "a", "bcd"),  # both complete at the same character: the longer
        ("abcd", ["bc", "abcd"], "a", "bc"),  # the one that completes first
        ("aaab", ["aab"], "a", "aab"),
        ("東京STOP", ["京S"], "東", "京S"),
        ("nothing", [], "nothing", None),
        ("nothing", [""], "nothing", None),
    ],
)
def test_stop_strings_for_every_split(text: str, stops: list[str], shown: str, matched: str | None) -> None:
    for pieces in splits(text):
        assert stopped(pieces, stops) == (shown, matched), pieces


def test_only_a_tail_that_may_grow_is_held_back() -> None:
    matcher = StopStrings(["</answer>"])
    assert matcher.feed("x < y") == "x < y"
    assert matcher.feed("z </a") == "z "
    assert matcher.feed("b>") == "</ab>"
    assert matcher.end() == ""


def test_after_a_match_nothing_comes_out() -> None:
    matcher = StopStrings(["."])
    assert matcher.feed("a.b") == "a"
    assert (matcher.feed("c"), matcher.end()) == ("", "")


def parsed(pieces: list[str], opened: bool, tags: tuple[str, str] | None = TAGS) -> tuple[str, str]:
    parser = ReasoningParser(tags, opened)
    out: list[Piece] = [one for piece in pieces for one in parser.feed(piece)] + parser.end()
    return "".join(p.text for p in out if p.reasoning), "".join(p.text for p in out if not p.reasoning)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\nwhy\n\nnot\n</think>\nso", True, "why\n\nnot", "so"),
        ("why, and the budget ends", True, "why, and the budget ends", ""),  # S5
        ("why </thi", True, "why </thi", ""),
        ("plain", False, "", "plain"),
        ("\n plain", False, "", "\n plain"),
        ("<thing> a", False, "", "<thing> a"),
        ("<thi", False, "", "<thi"),
        ("say <think> or </think>", False, "", "say <think> or </think>"),  # S12: quoted, not at the start
        ("a</think>b</think>", True, "a", "b</think>"),
        ("<think></think>ok", False, "", "ok"),
        ("", True, "", ""),
        ("\n\n", False, "", "\n\n"),
    ],
)
def test_reasoning_for_every_split(text: str, opened: bool, reasoning: str, content: str) -> None:
    for pieces in splits(text):
        assert parsed(pieces, opened) == (reasoning, content), pieces


def test_a_model_without_reasoning_keeps_every_character() -> None:
    assert parsed(["\n<think>a</think>"], False, None) == ("", "\n<think>a</think>")


def test_text_that_cannot_be_a_tag_comes_out_at_once() -> None:
    parser = ReasoningParser(TAGS, False)
    assert parser.feed("H") == [Piece("H", False)]
    assert ReasoningParser(TAGS, True).feed("H") == [Piece("H", True)]


def test_the_state_says_which_side_a_token_counts_for() -> None:
    parser = ReasoningParser(TAGS, True)
    assert parser.reasoning
    parser.feed("a</think>")
    assert not parser.reasoning
