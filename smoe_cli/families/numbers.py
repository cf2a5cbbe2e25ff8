"""Reading a family's keys from a config.json, checked."""

from __future__ import annotations

import math
from typing import Any

from smoe_cli.errors import CorruptError, UnsupportedError
from smoe_cli.families.spec import Family, Key

LIMIT = 1 << 24  # no real model is near it; a number above is a damaged config


class Numbers:
    """A family's keys in a config, nested ``text_config`` included. What the family does not have is 0, False, []."""

    def __init__(self, family: Family, config: dict[str, Any]) -> None:
        self.family = family
        nested = config.get("text_config")
        self.config = {**nested, **config} if isinstance(nested, dict) else config
        self.notices: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the family has this number at all."""
        return name in self.family.config

    def raw(self, name: str) -> Any:
        key = self.family.config.get(name)
        if key is None:
            return None
        for candidate in key.keys:
            outer, _, inner = candidate.partition(".")  # a key of an object within
            within = self.config.get(outer) if inner else self.config
            if not isinstance(within, dict) or (inner or candidate) not in within:
                continue
            value = within[inner or candidate]
            if value is not None:
                return value
            if key.has_null:
                return key.null
        return self._default(name, key)

    def _default(self, name: str, key: Key) -> Any:
        if key.default_from == "heads":
            return self.integer("heads")
        if key.default_from == "hidden/heads":
            hidden, heads = self.integer("hidden"), self.integer("heads")
            if hidden % heads:
                raise CorruptError(
                    f"config.json states no {key.keys[0]}; hidden {hidden} does not divide by {heads} heads"
                )
            return hidden // heads
        if key.has_default:
            return key.default
        names = " or ".join(key.keys)
        raise CorruptError(f"config.json states no {names}", f"family {self.family.name} needs it for {name}")

    def key(self, name: str) -> str:
        return self.family.config[name].keys[0]

    def integer(self, name: str, least: int = 1, most: int = LIMIT, layer: int | None = None) -> int:
        """A whole number; where the config has one for each layer, that of ``layer``."""
        value = self.raw(name)
        if value is None:
            return 0
        if layer is not None and isinstance(value, list) and layer < len(value):
            value = value[layer]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected true or false")
        return bool(value)

    def number(self, name: str, absent: float = 0.0) -> float:
        value = self.raw(name)
        if value is None:
            return absent
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a number")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self.raw(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a list of numbers")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self.raw(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a list of numbers")
        return [float(item) for item in value]

    def names(self, name: str, layers: int, known: set[str]) -> list[str]:
        """One name for each layer, or [] where the config has none. UnsupportedError for others than ``known``."""
        value = self.raw(name) or []
        if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
            raise CorruptError(f"config.json: {self.key(name)} is {value!r}, expected a list of names")
        if value and (len(value) != layers or set(value) - known):
            raise UnsupportedError(f"config.json: {self.key(name)} {value!r} for {layers} layers is not supported")
        return value
