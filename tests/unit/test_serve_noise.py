"""What is taken out of the head of a system prompt, and what never is."""

from __future__ import annotations

from typing import Any

import pytest

from smoe_cli.serve.noise import quiet

LINE = "x-anthropic-billing-header: cc_version=2.1.9; cch=0a1b2;"


def system(content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": content}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{LINE}\nBe brief.", "Be brief."),
        (f"\n{LINE}\n\nBe brief.", "Be brief."),
        (f"{LINE}\n{LINE.upper()}\nBe brief.", "Be brief."),
        ([LINE, "Be brief."], ["Be brief."]),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "x"}], [{"type": "text", "text": "x"}]),
        ([{"type": "text", "text": LINE + "\nBe brief."}], [{"type": "text", "text": "Be brief."}]),
        (f"Be brief.\n{LINE}", f"Be brief.\n{LINE}"),
        ("x-billing: no such thing", "x-billing: no such thing"),
        ("The x-anthropic-billing-header: y", "The x-anthropic-billing-header: y"),
        ("", ""),
        (None, None),
    ],
)
def test_only_at_the_head_of_a_leading_system_message(content: Any, left: Any) -> None:
    assert quiet(system(content)) == system(left)


def test_a_message_of_nothing_else_goes() -> None:
    assert quiet(system(LINE)) == [{"role": "user", "content": "hi"}]
    assert quiet(system([LINE])) == [{"role": "user", "content": "hi"}]


def test_people_are_left_alone() -> None:
    messages = [{"role": "user", "content": LINE}]
    assert quiet(messages) == messages and quiet([]) == []
