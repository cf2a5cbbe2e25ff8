"""Arguments that a model writes as bare text between tags, given the type that the tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smoe_cli.chat.request import Tool
from smoe_cli.chat.tools.lark import Lark
from smoe_cli.errors import UnsupportedError


def schema_of(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """The properties of a tool's parameters, references followed; empty for a tool that is not on offer."""
    found = next((tool.parameters or {} for tool in tools if tool.name == name), {})
    properties = found.get("properties")
    named = properties if isinstance(properties, dict) else {}
    return {key: _followed(schema, found) for key, schema in named.items()}


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is only a reference within its document refers to."""
    for _ in range(20):  # one may refer to another, or to itself
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if target is None:
            break
        schema = target
    return schema


def types_of(schema: Any) -> set[str]:
    """The JSON types that a property's schema names, empty if it leaves them open."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {item for item in named if isinstance(item, str)}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, []):
            found |= types_of(option)
    if "enum" in schema and not found:
        found = {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    return found


def value_of(text: str, schema: Any) -> Any:
    """The value a text stands for. A string stays as it is; anything else is JSON, or failing that the text itself."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word in ("None", "null") and ("null" in types or not types):
        return None
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return text
    return value if not types or _fits(value, types) or "string" not in types else text


def written(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


def _fits(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return bool(types & {"integer", "number"})
    kinds = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value)) in types


_TEXT_RULES = ("pattern", "format", "minLength", "maxLength")


def bare_arguments(lark: Lark, tool: Tool, head: str, end: str, markers: Sequence[str] = (), after: str = "") -> str:
    """The grammar of a tool's arguments, each as ``head`` with its name, value, ``end``, ``after``: strings as they
    are, other values as JSON. ``end`` may be one of ``markers``, and ``head`` may hold some."""
    parameters = tool.parameters or {}
    required = parameters.get("required") or []
    shared: dict[str, Any] = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    parts = []
    for name, schema in schema_of([tool], tool.name).items():
        value = _bare_value(lark, tool, name, schema, shared, end)
        tail = f" {lark.literal(after)}" if after else ""
        pair = lark.rule(f"{lark.markup(head.format(name), *markers)} {value}{tail}")
        parts.append(pair if name in required else f"{pair}?")
    return " ".join(parts)


def _bare_value(lark: Lark, tool: Tool, name: str, schema: Any, shared: dict[str, Any], end: str) -> str:
    fixed = [schema["const"]] if isinstance(schema, dict) and "const" in schema else None
    choices = fixed or (schema.get("enum") if isinstance(schema, dict) else None)
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(lark.literal, choices))}) {lark.marker(end)}"
    types = types_of(schema)
    if types and types != {"string"} and "string" not in types:
        return f"{lark.json({**schema, **shared})} {lark.marker(end)}"
    rules = [key for key in _TEXT_RULES if isinstance(schema, dict) and key in schema]
    if tool.strict and rules:
        where = f"the argument {name!r} of {tool.name!r} has {rules[0]}"
        raise UnsupportedError(
            f"{where}, which this model's way of writing calls cannot be held to",
            "leave out strict, or the rule",
            param="tools",
        )
    return lark.text_until(end)
