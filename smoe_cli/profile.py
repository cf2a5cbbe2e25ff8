"""A profile: the engine flags that were measured to be best for a vault on this machine, kept beside it.

``<stem>.profile.json`` holds ``{"flags": {...}, "because": "..."}``. A flag on the command line is stronger; a profile
that cannot be read is left alone, with a notice.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from smoe_cli.engine.flags import EngineFlags

# What a profile may set: nothing that changes what is said, and nothing that belongs to a run.
ALLOWED = ("ring", "budget", "threads", "workers", "io", "direct", "spec", "chunk", "draft", "cache_policy")


def path_for(vault: Path) -> Path:
    return vault.with_suffix(".profile.json")


def save(vault: Path, flags: dict[str, Any], because: str) -> Path:
    """Write it whole or not at all. Raises OSError where the folder cannot be written to."""
    path = path_for(vault)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps({"flags": flags, "because": because}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def load(vault: Path) -> tuple[dict[str, Any], str]:
    """(flags, notice): no flags without a profile, or, with a notice, when it is not what it should be."""
    path = path_for(vault)
    try:
        flags = json.loads(path.read_text(encoding="utf-8"))["flags"]
        unknown = [name for name in flags if name not in ALLOWED]
        if unknown:
            raise ValueError(f"it sets {unknown[0]}")
        wrong = [name for name, value in flags.items() if not isinstance(value, (int, str))]
        if wrong:
            raise ValueError(f"{wrong[0]} is neither a number nor a word")
        return flags, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"notice: the profile {path.name} is left alone: {error}"


def apply(flags: EngineFlags, profile: dict[str, Any]) -> EngineFlags:
    """The flags that were given, and the profile's where none was."""
    default = EngineFlags()
    given = {item.name for item in fields(flags) if getattr(flags, item.name) != getattr(default, item.name)}
    if given & {"ring", "budget"}:  # both size the cache
        given |= {"ring", "budget"}
    return replace(flags, **{name: value for name, value in profile.items() if name not in given})


def flags_of(flags: EngineFlags) -> dict[str, Any]:
    """The part of ``flags`` that a profile keeps."""
    given = asdict(flags)
    return {name: given[name] for name in ALLOWED if given[name] is not None}
