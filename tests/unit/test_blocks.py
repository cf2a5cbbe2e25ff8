"""Markdown blocks of a stream: nothing is lost, and what belongs together stays together."""

from __future__ import annotations

import random

import pytest

from smoe_cli.chat.blocks import BlockSplitter

TEXT = """Intro line
goes on.

1. one

   still one
2. two

3. three

Then `code`:

```python
def f():

    return "```"

```

~~~
```
not the end

~~~
- a

- b

Last"""


def blocks(pieces: list[str]) -> list[str]:
    splitter = BlockSplitter()
    found = [block for piece in pieces for block in splitter.feed(piece)]
    rest = splitter.end()
    return found + ([rest] if rest else [])


def test_blocks_of_a_text() -> None:
    assert blocks([TEXT]) == [
        "Intro line\ngoes on.\n\n",
        "1. one\n\n   still one\n2. two\n\n3. three\n\n",
        "Then `code`:\n\n",
        '```python\ndef f():\n\n    return "```"\n\n```\n\n',
        "~~~\n```\nnot the end\n\n~~~\n- a\n\n",
        "- b\n\n",
        "Last",
    ]


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_however_the_text_is_split(seed: int) -> None:
    chance = random.Random(seed)
    text = TEXT + "\r\nx\r\n\r\ny\u2028z\x0b"
    pieces, at = [], 0
    while at < len(text):
        size = chance.randrange(1, 9)
        pieces.append(text[at : at + size])
        at += size
    assert "".join(blocks(pieces)) == text
    assert not any(block.count("```python") and not block.rstrip().endswith("```") for block in blocks(pieces))


def test_pending_is_the_block_in_progress() -> None:
    splitter = BlockSplitter()
    assert splitter.feed("one\n\ntwo") == ["one\n\n"]
    assert splitter.pending == "two"
