"""Typer options that several commands share. ``@engine_flags`` gives a command all of the engine's at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from smoe_cli import sizes
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError

VaultDir = Annotated[
    Path | None, typer.Option("--vault-dir", help="Folder of vaults (default: SMOE_VAULT_DIR, else vault/).")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, nothing else there.")]


class Io(StrEnum):
    auto = "auto"
    uring = "uring"
    pread = "pread"


class Isa(StrEnum):
    auto = "auto"
    scalar = "scalar"
    avx2 = "avx2"
    avx512 = "avx512"
    neon = "neon"
    neon_dot = "neon-dot"


class Activations(StrEnum):
    int8 = "int8"
    float = "float"


class Kv(StrEnum):
    f16 = "f16"
    q8 = "q8"
    f32 = "f32"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Engine", show_default=False, **more)


_ENGINE: dict[str, Any] = {
    "budget": Annotated[str | None, _option("--budget", help="Memory for the engine, such as 8G (default: planned).")],
    "ring": Annotated[int | None, _option("--ring", min=0, help="Expert cache slots instead; 0 is automatic.")],
    "ctx": Annotated[str | None, _option("--ctx", help="Window in tokens, or max for the model's limit (chat: 4096).")],
    "chunk": Annotated[int | None, _option("--chunk", min=0, help="Tokens of a prompt computed together; 0: planned.")],
    "threads": Annotated[int | None, _option("--threads", min=0, help="Threads that compute; 0: all we may use.")],
    "workers": Annotated[int | None, _option("--workers", min=0, help="Threads that read from disk; 0: automatic.")],
    "io": Annotated[Io | None, _option("--io", help="Disk backend.")],
    "direct": Annotated[bool | None, _option("--direct/--buffered", help="Force direct or buffered reads.")],
    "isa": Annotated[Isa | None, _option("--isa", help="Force the kernels' instruction set.")],
    "verify_reads": Annotated[bool, _option("--verify-reads", help="Check each expert's checksum when it is read.")],
    "cache_policy": Annotated[
        str | None, _option("--cache-policy", help="Which expert gives way: lru, decayed, floors, lfru, least-stale.")
    ],
    "trace": Annotated[
        str | None, _option("--trace", metavar="FILE", help="Write down which experts were asked for, to replay.")
    ],
    "spec": Annotated[int | None, _option("--spec", min=0, help="Experts a layer to read ahead on a guess; 0 is off.")],
    "activations": Annotated[Activations | None, _option("--activations", help="int8, or float, the reference.")],
    "kv": Annotated[Kv | None, _option("--kv", help="How keys and values are kept.")],
    "experts_per_token": Annotated[
        int | None,
        _option("--experts-per-token", min=1, help="Fewer experts a token than the model's own: faster, worse."),
    ],
    "sessions": Annotated[int | None, _option("--sessions", min=1, help="Conversations kept in memory.")],
    "draft": Annotated[
        str | None, _option("--draft", help="ngram:N guesses up to N tokens at once; auto: while faster; off.")
    ],
    "instrument": Annotated[bool, _option("--instrument", help="Print where the time went, a request, on stderr.")],
}

Command = TypeVar("Command", bound=Callable[..., Any])


def engine_flags(command: Command) -> Command:
    """Replace the command's parameter ``engine: EngineFlags`` by one option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    extra = [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=_ENGINE[item.name]
        )
        for item in fields(EngineFlags)
    ]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        given = {item.name: values.pop(item.name) for item in fields(EngineFlags)}
        return command(**values, engine=_flags(given))

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "engine"]
    run.__signature__ = inspect.Signature(kept + extra)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in kept + extra}
    return run  # type: ignore[return-value]


def _flags(given: dict[str, Any]) -> EngineFlags:
    if given["budget"] is not None and given["ring"] is not None:
        raise UsageError("--budget and --ring both size the expert cache", "give one of them")
    if given["budget"] is not None:
        given["budget"] = sizes.parse(given["budget"])
    if given["ctx"] is not None:
        given["ctx"] = _window(given["ctx"])
    return EngineFlags(**{name: value.value if isinstance(value, Enum) else value for name, value in given.items()})


def _window(text: str) -> int | str:
    if text == "max":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--ctx takes a number of tokens, or max, not {text!r}")
    return int(text)
