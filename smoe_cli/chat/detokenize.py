"""Ids to text as they come: the deltas joined are exactly ``tokenizer.decode`` of the whole, at constant cost a token.

Decoding the last few ids again and comparing (the usual way) loses leading spaces, sticks at broken bytes and costs
more with each token that does not finish a character. Here each stage of the tokenizer's own decoder has a streaming
twin, which keeps back only what a later token may still change. (``clean_up_tokenization_spaces`` of old tokenizers is
not applied.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer

from smoe_cli.chat.stream import CONTROL
from smoe_cli.errors import UnsupportedError


class Stage(Protocol):
    """One decoder of the chain: token texts in, token texts out; ``end`` gives what is still kept back."""

    def feed(self, piece: str) -> list[str]: ...

    def end(self) -> list[str]: ...


class Map:
    """A stage that looks at one token at a time."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def feed(self, piece: str) -> list[str]:
        return [self._function(piece)]

    def end(self) -> list[str]:
        return []


class Bytes:
    """Byte-level BPE: every character of a token stands for one byte; the bytes together are UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: str) -> list[str]:
        try:
            raw = bytes(BYTE_OF[character] for character in piece)
        except KeyError:  # an added token with characters of its own
            raw = piece.encode()
        return [self._decoder.decode(raw)]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class ByteFallback:
    """Tokens ``<0x41>`` are bytes. A run of them is text if all of it is UTF-8, else one replacement mark for each."""

    _BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> list[str]:
        match = self._BYTE.fullmatch(piece)
        if match:
            self._run.append(int(match[1], 16))
            return []
        return [*self.end(), piece]

    def end(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class First:
    """Does something else with the first token than with the others."""

    def __init__(self, first: Callable[[str], str], others: Callable[[str], str]) -> None:
        self._function, self._others = first, others

    def feed(self, piece: str) -> list[str]:
        text = self._function(piece)
        self._function = self._others
        return [text]

    def end(self) -> list[str]:
        return []


class StripStart:
    """After Fuse the tokens are one text: up to ``count`` leading ``content`` characters of it are dropped."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def feed(self, piece: str) -> list[str]:
        while self._left and piece.startswith(self._content):
            piece, self._left = piece[1:], self._left - 1
        if piece:
            self._left = 0
        return [piece]

    def end(self) -> list[str]:
        return []


class Detokenizer:
    """One reply's ids to text. Ids in ``skip`` leave no text, as with ``skip_special_tokens``; the text of those in
    ``control`` comes with ``CONTROL`` before it."""

    def __init__(
        self, tokenizer: Tokenizer, skip: frozenset[int] = frozenset(), control: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._control = control
        self._stages = _stages(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None)

    def feed(self, token: int) -> str:
        """The text that this token finishes, often a whole token's, sometimes none."""
        piece = None if token in self._skip else self._tokenizer.id_to_token(token)
        if piece is None:
            return ""
        text = self._through([piece], 0)
        if token in self._control and text.endswith(piece):
            text = text[: len(text) - len(piece)] + CONTROL + piece
        return text

    def end(self) -> str:
        """What is left at the end of the reply; unfinished characters come out as U+FFFD."""
        text = ""
        for index, stage in enumerate(self._stages):
            text += self._through(stage.end(), index + 1)
        return text

    def _through(self, pieces: list[str], start: int) -> str:
        for stage in self._stages[start:]:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
        return "".join(pieces)


def _stages(spec: dict[str, Any] | None) -> list[Stage]:
    """The streaming twins of a decoder as tokenizer.json describes it. Raises UnsupportedError, naming the kind."""
    if spec is None:
        return [First(str, lambda piece: " " + piece)]
    specs = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    fused = False
    stages: list[Stage] = []
    for one in specs:
        if one["type"] == "Fuse":
            fused = True
        else:
            stages.append(_stage(one, fused))
            fused = fused or one["type"] == "ByteLevel"  # which makes one text of its tokens, too
    return stages


def _stage(spec: dict[str, Any], fused: bool) -> Stage:
    kind = spec["type"]
    if kind == "ByteLevel" and not fused:
        return Bytes()
    if kind == "ByteFallback" and not fused:
        return ByteFallback()
    if kind == "Replace" and not fused:
        return Map(_replace(spec["pattern"], spec["content"]))
    if kind == "Metaspace" and not fused:
        return _metaspace(spec)
    if kind == "Strip":
        return _strip(spec, fused)
    raise UnsupportedError(f"the tokenizer's decoder {kind} cannot be streamed", "report the model's tokenizer.json")


def _replace(pattern: dict[str, str], content: str) -> Callable[[str], str]:
    if "String" in pattern:
        return lambda piece: piece.replace(pattern["String"], content)
    raise UnsupportedError("the tokenizer's decoder replaces by a regular expression, which cannot be streamed")


def _metaspace(spec: dict[str, Any]) -> Stage:
    mark = spec["replacement"]
    others: Callable[[str], str] = lambda piece: piece.replace(mark, " ")  # noqa: E731
    if spec.get("prepend_scheme", "always") == "never":
        return Map(others)
    return First(lambda piece: piece.replace(mark, ""), others)


def _strip(spec: dict[str, Any], fused: bool) -> Stage:
    content, start, stop = spec["content"], spec["start"], spec["stop"]
    if fused and not stop:
        return StripStart(content, start)
    if fused:
        raise UnsupportedError("the tokenizer's decoder strips the end of a text, which cannot be streamed")
    return Map(lambda piece: _strip_ends(piece, content, start, stop))


def _strip_ends(piece: str, content: str, start: int, stop: int) -> str:
    while start and piece.startswith(content):
        piece, start = piece[1:], start - 1
    while stop and piece.endswith(content):
        piece, stop = piece[:-1], stop - 1
    return piece


def _byte_table() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes are themselves, the others U+0100 and up, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_table()
