"""One whole measurement: start the programs, go round, stop them, put the result together."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from smoe_cli import _core, sizes
from smoe_cli.bench import machine
from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from smoe_cli.bench.measure import Work, cold_start, measure, median_buckets, medians
from smoe_cli.bench.programs import Ours, Peer
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import ResourceError, from_core

COMPARED = {"prefill_tok_s": 1, "decode_tok_s": 1, "ttft_ms": -1}  # -1: less is better


def run(work: Work, flags: EngineFlags, peers: list[Peer], limit: int | None) -> dict[str, Any]:
    """The result, its keys as `smoe bench --json` has them. ``limit``: bytes of a memory cgroup for each program."""
    check_plan(work, flags, limit)
    ours = Ours("smoe", work.vault, flags, buckets=work.buckets)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(cgroup(limit))
        stack.callback(ours.stop)
        started = cold_start(ours, work, group)
        about = ours.details()
        for peer in peers:
            peer_group = stack.enter_context(cgroup(limit))
            stack.callback(peer.stop)
            peer.start(peer_group)
            peer.prefill(work.ids.take(work.prompt_tokens[0], work.repeat))
        runs = measure(ours, peers, work)
        peak = ours.peak_rss_bytes()
    head = {key: about[key] for key in ("model", "version", "threads", "isa", "budget_bytes", "slots", "ctx")}
    head |= {"commit": machine.commit(), "machine": machine.describe(), "limit_bytes": limit}
    head |= {"gen": work.gen, "repeat": work.repeat, "ids": work.ids.name} | started | {"peak_rss_bytes": peak}
    return head | summary(runs, work, [peer.name for peer in peers]) | {"runs": runs}


def check_plan(work: Work, flags: EngineFlags, limit: int | None = None) -> None:
    """Raises what the engine would only say on its way out, or could not say at all in a group that is too small: a
    budget or a limit below the floor, flags that do not fit."""
    try:
        plan = _core.plan(str(work.vault), **flags.options())
        if limit is None:
            return
        if flags.budget is None and flags.ring is None:
            _core.plan(str(work.vault), **replace(flags, budget=limit).options())
        elif plan["budget_bytes"] > limit:
            raise ResourceError(
                f"a budget of {sizes.show(plan['budget_bytes'])} does not go into --limit {sizes.show(limit)}",
                "give a larger --limit, or a smaller --budget or --ring",
            )
    except _core.CoreError as error:
        raise from_core(error) from None


def summary(runs: list[dict[str, Any]], work: Work, peers: list[str]) -> dict[str, Any]:
    """Medians for each prompt, under ``prompts``; those of the last prompt again at the top; peers with ratios."""
    prompts = columns(runs, work, "smoe")
    result: dict[str, Any] = {name: value for name, value in prompts[-1].items() if name != "prompt_tokens"}
    others = []
    for peer in peers:
        theirs = columns(runs, work, peer)
        for own, other in zip(prompts, theirs, strict=True):
            for name, sign in COMPARED.items():
                other[f"{name}_ratio"] = (own[name] / other[name]) ** sign
        others.append({"name": peer, "prompts": theirs})
    loads = [run["load"] for run in runs if "load" in run]
    return result | {"prompts": prompts, "peers": others, "load_median": statistics.median(loads)}


def columns(runs: list[dict[str, Any]], work: Work, program: str) -> list[dict[str, Any]]:
    """For each prompt size the medians of one program."""
    result = []
    for count in work.prompt_tokens:
        own = [run for run in runs if run["program"] == program and run["prompt_tokens"] == count]
        column: dict[str, Any] = {"prompt_tokens": count} | medians(own)
        if work.buckets and program == "smoe":
            column["buckets"] = median_buckets(own)
        result.append(column)
    return result


@contextlib.contextmanager
def cgroup(limit: int | None) -> Iterator[MemoryCgroup | None]:
    """A memory cgroup of ``limit`` bytes; None gives none. Raises ResourceError where none can be made."""
    if limit is None:
        yield None
        return
    try:
        group = MemoryCgroup(limit)
        group.__enter__()
    except (CgroupUnavailable, OSError) as error:
        raise ResourceError(f"no memory cgroup can be made: {error}", "run as root, or without --limit") from None
    with contextlib.ExitStack() as stack:
        stack.push(group)
        yield group
