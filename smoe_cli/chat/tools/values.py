"""Arguments that a model writes as bare text between tags, given the type that the tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smoe_cli.chat.request import Tool


def schema_of(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """The properties of a tool's parameters, empty for a tool that is not on offer."""
    found = next((tool.parameters or {} for tool in tools if tool.name == name), {})
    properties = found.get("properties")
    return properties if isinstance(properties, dict) else {}


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
