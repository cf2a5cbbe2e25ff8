"""The grammar of a reply in the making, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACING = {"whitespace_pattern": r"[ \n]{0,24}"}  # a model may indent, but not for ever
# In a call, as templates write it: what is computed for it is found again when the call comes back.
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class CallGrammar:
    """How a syntax writes calls: ``prefix``, then calls with ``separator`` between them, then ``suffix``; each a rule's
    right side. ``opener`` is the marker that tells a call from text, None where nothing does. ``schemas``: a call is
    bare JSON of one of these."""

    calls: tuple[str, ...] = ()
    prefix: str = ""
    separator: str = ""
    suffix: str = ""
    opener: str | None = None
    several: bool = True
    schemas: tuple[dict[str, Any], ...] = ()


class Lark:
    """``token_id`` gives a marker's id where it is one token of the tokenizer."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def is_token(self, marker: str) -> bool:
        return self._token_id(marker) is not None

    def literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        token = self._token_id(text)
        return self.literal(text) if token is None else f"<[{token}]>"

    def markup(self, text: str, *markers: str) -> str:
        """A literal in which each of ``markers`` is its token."""
        parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
        return " ".join(self.marker(part) if part in markers else self.literal(part) for part in parts if part)

    def json(self, schema: dict[str, Any], tight: bool = True) -> str:
        """A JSON value of this schema, spaced as in a call or, not ``tight``, as the model likes. How it is compiled is
        the only thing that a schema may not choose for itself."""
        own = {key: value for key, value in schema.items() if key != "x-guidance"}
        return self.rule("%json " + json.dumps({**own, "x-guidance": _TIGHT if tight else _SPACING}))

    def text_until(self, marker: str) -> str:
        """Any text, none too, up to and with the marker."""
        token = self._token_id(marker)
        if token is not None:
            return f"{self.text()} <[{token}]>"
        return self.rule("/(?s:.*)/", f"[suffix={self.literal(marker)}]")

    def text(self) -> str:
        """Any text without control tokens, none too."""
        return self.terminal("/(?s:.*)/") + "?"

    def text_without(self, marker: str) -> str:
        """Any text in which the marker does not occur."""
        if self._token_id(marker) is not None:
            return self.text()
        pattern = re.escape(marker).replace("/", r"\/")
        return self.terminal(f"/(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/") + "?"


def one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """A schema for a value of any of these, each with its own definitions."""
    if len(schemas) == 1:
        return schemas[0]
    names = [f"option{index}" for index in range(len(schemas))]
    moved = {name: _rebased(schema, f"#/$defs/{name}") for name, schema in zip(names, schemas, strict=True)}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": moved}


def nested(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """A schema as it stands at ``pointer`` of another one."""
    moved: dict[str, Any] = _rebased(schema, pointer)
    return moved


def _rebased(value: Any, base: str) -> Any:
    """The schema with references to its own root turned to where it stands now."""
    if isinstance(value, list):
        return [_rebased(item, base) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: _rebased(item, base) for key, item in value.items() if key != "x-guidance"}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = base + reference[1:]
    return out
