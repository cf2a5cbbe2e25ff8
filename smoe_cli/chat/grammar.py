"""Constrained replies: a grammar over a model's own tokens, as masks for the engine. llguidance does the parsing.

It is imported late: only a request that asks for it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from smoe_cli.chat.stream import ReasoningParser
from smoe_cli.chat.token_text import TokenText
from smoe_cli.chat.tokenizer import TextTokenizer
from smoe_cli.errors import SmoeError, UnsupportedError, UsageError


class Vocabulary:
    """A model's tokens as a grammar needs them: the bytes of each, which are markup, which end a reply. Making one
    takes a second or more for a large vocabulary; it belongs to a model, not to a request.

    ``size`` is the model's vocabulary, at least the tokenizer's. Markup is not text to a grammar: it is only ever
    allowed where a rule names it.
    """

    def __init__(self, tokenizer: TextTokenizer, size: int, end_ids: Iterable[int], markup: Iterable[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.size = size
        self.end_ids = sorted({token for token in end_ids if token < size})
        if not self.end_ids:
            raise UnsupportedError("the model has no token that ends a reply, so none can be held to a grammar")
        self.bytes_of = TokenText(tokenizer.backend).bytes_of
        count = min(tokenizer.backend.get_vocab_size(), size)
        tokens = [self.bytes_of(token) for token in range(count)]
        self.markup = {token for token in (*tokenizer.special_ids, *markup, *self.end_ids) if token < count}
        source = _Source(tokenizer, tokens, sorted(self.markup), self.end_ids)
        self.tokens: Any = LLTokenizer(TokenizerWrapper(source), n_vocab=count, eos_token=self.end_ids)
        empty = [token for token, content in enumerate(tokens) if not content]
        self.anything = self._bits([1] * count, off=(*self.end_ids, *empty))
        self.end_only = self._bits([0] * count, on=self.end_ids)

    def fitted(self, bits: bytes) -> bytes:
        """Cut or filled up to the engine's size."""
        length = (self.size + 7) // 8
        return bits[:length].ljust(length, b"\0")

    def _bits(self, start: list[int], on: Iterable[int] = (), off: Iterable[int] = ()) -> bytes:
        for token in on:
            start[token] = 1
        for token in off:
            if token < len(start):
                start[token] = 0
        number = int("".join(map(str, reversed(start))), 2)
        return number.to_bytes((self.size + 7) // 8, "little")


class _Source:
    """A tokenizer as llguidance wants one. A call gives the ids that a text has in the middle of another one: where
    only one text is possible, they are the only ones allowed. Their bytes are the text's, whatever the tokenizer puts
    before a text that stands alone."""

    def __init__(self, tokenizer: TextTokenizer, tokens: list[bytes], markup: list[int], end_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = markup
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._before = [(before, tokenizer.encode(before)) for before in ("", "\n", "x")]

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        for before, ids in self._before:
            found = self._tokenizer.encode(before + raw.decode())
            if found[: len(ids)] == ids and b"".join(self.tokens[token] for token in found[len(ids) :]) == raw:
                return found[len(ids) :]
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        ids = []
        at = 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self._id_of), None)
            if end is None:
                break
            ids.append(self._id_of[raw[at:end]])
            at = end
        return ids

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        markup = set(self.special_token_ids)
        return {raw: token for token, raw in enumerate(self.tokens) if raw and token not in markup}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._id_of), default=1)


class Grammar:
    """A compiled grammar. Raises UsageError, naming ``param``, for one that cannot be compiled."""

    def __init__(self, vocabulary: Vocabulary, lark: str, param: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.vocabulary = vocabulary
        limits = LLParserLimits(verbose_errors=False)  # a failure names no text of the reply
        self._matcher = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        if self._matcher.is_error():
            raise UsageError(
                f"{param} cannot be compiled: {_reason(self._matcher.get_error())}",
                "see which keywords llguidance supports",
                param=param,
            )

    def masks(self, gate: Gate | None = None) -> GrammarMasks:
        return GrammarMasks(self.vocabulary, self._matcher.deep_copy(), gate)


class Gate:
    """Lets reasoning through unconstrained: the grammar begins behind it.

    ``reasoning``: the prompt has opened it. Otherwise the model may open it with the token ``open_id``, as its first or
    behind one of white space.
    """

    def __init__(
        self,
        tags: tuple[str, str],
        text_of: Callable[[int], str],
        reasoning: bool,
        open_id: int | None,
    ) -> None:
        self._parser = ReasoningParser(tags, reasoning)
        self._text_of = text_of
        self.open = not reasoning
        self.open_id = None if reasoning else open_id
        self._begun = False

    def accept(self, token: int) -> bool:
        """Whether the token was reasoning, and not the grammar's."""
        if self.open and self.open_id is None:
            return False
        text = self._text_of(token)
        if self.open and token != self.open_id:
            if text.isspace() and not self._begun:
                self._begun = True
                return True
            self.open_id = None
            return False
        self._parser.feed(text)
        self.open, self.open_id = not self._parser.reasoning, None
        return True


class GrammarMasks:
    """One reply under a grammar; a ``Masks`` of the engine's protocol."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any, gate: Gate | None) -> None:
        self._vocabulary, self._matcher, self._gate = vocabulary, matcher, gate

    def mask(self) -> bytes:
        if self._gate is not None and not self._gate.open:
            return self._vocabulary.anything
        if self._matcher.is_stopped():
            self._check()
            return self._vocabulary.end_only
        bits = self._vocabulary.fitted(self._matcher.compute_bitmask())
        self._check()
        if self._gate is not None and self._gate.open_id is not None:
            bits = _with(bits, self._gate.open_id)
        return bits

    def accept(self, token: int) -> None:
        if self._gate is not None and self._gate.accept(token):
            return
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SmoeError(f"the reply's grammar failed: {_reason(self._matcher.get_error())}", "simplify the schema")


def _with(bits: bytes, token: int) -> bytes:
    changed = bytearray(bits)
    changed[token // 8] |= 1 << token % 8
    return bytes(changed)


def _reason(message: str) -> str:
    """llguidance's words without its place in a grammar that the client has not written."""
    first = message.split("\n   ", 1)[0].splitlines()
    text = " ".join(line.strip() for line in first if line.strip(" ^"))
    return text.split("failed to compile JSON schema: ", 1)[-1][:300]
