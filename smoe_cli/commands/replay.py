"""``smoe replay``: a routing trace through any cache policy and size, and what it says of the text's locality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.commands.options import Json
from smoe_cli.errors import UsageError

SHARES = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


def command(
    trace: Annotated[Path, typer.Argument(help="A file made with --trace.")],
    cache_policy: Annotated[str | None, typer.Option(help="Names, such as lru,decayed (default: all).")] = None,
    slots: Annotated[str | None, typer.Option(help="Sizes of the cache, such as 40,80 (default: 3% to all).")] = None,
    skip: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the trace that only warms the cache.")] = 0.25,
    out: Annotated[Path | None, typer.Option(help="Folder for replay.json and replay.png.")] = None,
    json_output: Json = False,
) -> None:
    from smoe_cli import _core, console
    from smoe_cli.bench import replay_report
    from smoe_cli.bench.locality import locality
    from smoe_cli.errors import from_core

    try:
        info = _core.trace_info(str(trace))
        sizes = _sizes(slots, sum(info["experts"]))
        hits = {
            policy: [_hit_rate(trace, policy, size, int(skip * info["fetches"])) for size in sizes]
            for policy in _policies(cache_policy)
        }
        about = locality(_core.trace_fetches(str(trace)))
    except _core.CoreError as error:
        raise from_core(error) from None
    distances = about.pop("distances")
    result: dict[str, Any] = {"trace": info, "slots": sizes, "skip": skip, "hit_rate": hits, "locality": about}
    if out is not None:
        for path in replay_report.write(result, distances, out):
            console.say(f"wrote {path}")
    print(json.dumps(result) if json_output else "\n".join(replay_report.table(result)))


def _sizes(text: str | None, records: int) -> list[int]:
    if text is None:
        return sorted({max(1, round(share * records)) for share in SHARES})
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--slots takes sizes such as 40,80, not {text!r}")
    return [int(word) for word in words]


def _policies(text: str | None) -> list[str]:
    from smoe_cli import _core

    known = [*_core.policies(), "optimal"]
    asked = known if text is None else text.split(",")
    for name in asked:
        if name not in known:
            raise UsageError(f"there is no cache policy {name!r}", f"there are {', '.join(known)}")
    return asked


def _hit_rate(trace: Path, policy: str, slots: int, skip: int) -> float | None:
    from smoe_cli import _core

    counts = _core.replay(str(trace), policy, slots, skip)
    asked = counts["hits"] + counts["misses"]
    return counts["hits"] / asked if asked else None
