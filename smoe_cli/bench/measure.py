"""Rounds of one program on one model: prefill, first token, decode, what it read, beside what the machine can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.cgroup import MemoryCgroup
from smoe_cli.bench.energy import EnergyMeter
from smoe_cli.bench.programs import Ours, Peer, Program

T = TypeVar("T")

PROBE_S = 0.3
WARM_UP_STEPS = 8

# Where a token's time goes, as the engine accounts for it: they add up to the time that it says a request took.
BUCKETS = ("attention", "router", "expert_compute", "expert_wait", "head", "sampler", "other")

# Of these a result has the median, and beside it the least and the greatest under _min and _max.
FIGURES = (
    "prefill_tok_s",
    "ttft_ms",
    "decode_tok_s",
    "hit_rate",
    "read_bytes_per_token",
    "disk_read_bytes_s",
    "memory_read_bytes_s",
    "decode_of_floor",
    "joules_per_token",
)


class Ids(Protocol):
    @property
    def name(self) -> str: ...

    def take(self, count: int, round_: int) -> list[int]: ...


@dataclass
class Work:
    """What is measured: prompts of these many tokens, each followed by ``gen`` given tokens, ``repeat`` times."""

    ids: Ids
    prompt_tokens: list[int]
    gen: int
    repeat: int
    vault: Path
    active_bytes: int  # what a token reads from memory
    probed: Path  # the file that reads are measured on, and how much is read at once
    record_bytes: int
    grows: bool = False  # one conversation a round, grown to each of the sizes in turn
    buckets: bool = False  # where a token's time goes
    say: Callable[[str], None] = lambda text: None
    energy: EnergyMeter | None = None
    started: float = field(default_factory=time.monotonic)

    def rounds(self) -> Iterable[tuple[int, int, int]]:
        """(number of the run, round, prompt tokens)"""
        number = 0
        for round_ in range(self.repeat):
            for count in self.prompt_tokens:
                yield number, round_, count
                number += 1

    def kept(self, count: int) -> int:
        """Tokens that are there already when a prompt of ``count`` begins."""
        before = [size for size in self.prompt_tokens if size < count] if self.grows else []
        return before[-1] + self.gen if before else 0

    def progress(self, number: int, text: str) -> None:
        total = self.repeat * len(self.prompt_tokens)
        left = (time.monotonic() - self.started) / (number + 1) * (total - number - 1)
        self.say(f"{number + 1} of {total}: {text} ({left:.0f} s left)")


def rotated(items: list[T], by: int) -> Iterator[T]:
    """All of ``items``, beginning with another one each round: no program always runs after the same one."""
    for i in range(len(items)):
        yield items[(i + by) % len(items)]


def cold_start(program: Ours, work: Work, group: MemoryCgroup | None = None) -> dict[str, float]:
    """Start the engine and answer the first prompt: milliseconds until it answers, and until the first token."""
    start = time.perf_counter()
    program.start(group)
    program.details()
    up = time.perf_counter()
    program.prefill(work.ids.take(work.prompt_tokens[0], work.repeat))
    first = time.perf_counter()
    program.decode(work.ids.take(WARM_UP_STEPS, work.repeat + 1))
    program.fill(lambda resident, slots: work.say(f"the engine fills its cache: {resident} of {slots} slots"))
    return {"engine_start_ms": (up - start) * 1e3, "cold_ttft_ms": (first - start) * 1e3}


def measure(program: Ours, peers: list[Peer], work: Work) -> list[dict[str, Any]]:
    """All rounds of started programs, an entry for each (program, round, prompt). Another goes first each round."""
    runs = []
    for number, round_, count in work.rounds():
        arms: list[Program] = [program, *peers]
        for arm in rotated(arms, round_):
            run = one_run(program, work, round_, count) if arm is program else peer_run(arm, work, round_, count)
            runs.append({"program": arm.name, "round": round_, "prompt_tokens": count} | run)
            said = f"{arm.name}, prompt of {count}: {run['prefill_tok_s']:.1f} and {run['decode_tok_s']:.2f} tok/s"
            work.progress(number, said)
    return runs


class Turn:
    """One program's turn of a round: a prompt, then given tokens, at once or in slices among other programs' slices."""

    def __init__(self, program: Ours, work: Work, round_: int, count: int) -> None:
        self.program, self.work, self.count = program, work, count
        self.disk = probe_disk(work)
        self.memory = _core.probe_memory(program.flags.threads or 0, PROBE_S)
        self.ids = work.ids.take(count + work.gen, round_)
        self.added = count - work.kept(count)
        self.ttft_ms = program.prefill(self.ids[:count], work.kept(count))
        self.prefill_ms = program.counters[-1]["prefill_ms"] or self.ttft_ms
        self.steps: list[float] = []  # milliseconds
        self.slices: list[float] = []  # milliseconds a token of each
        self.counters: list[dict[str, float]] = []
        self.joules: list[float] = []

    def decode(self, tokens: int) -> None:
        """The next ``tokens`` of the text; fewer at its end."""
        meter = self.work.energy
        done = self.count + len(self.steps)
        before = meter.counters() if meter else []
        steps = self.program.decode(self.ids[done : done + tokens])
        if meter:
            self.joules.append(meter.net_joules(before, meter.counters(), sum(steps) / 1e3))
        self.slices.append(sum(steps) / len(steps))
        self.counters += self.program.counters[-len(steps) :]
        self.steps += steps

    def figures(self) -> dict[str, Any]:
        tokens, seconds = len(self.steps), sum(self.steps) / 1e3
        counters = total(self.counters)
        read = counters["bytes"] / tokens
        experts = counters["hits"] + counters["misses"]
        floor_s = max(read / self.disk if self.disk else 0.0, self.work.active_bytes / self.memory)
        return {
            "prefill_tok_s": self.added / self.prefill_ms * 1e3,
            "ttft_ms": self.ttft_ms,
            "decode_tok_s": tokens / seconds,
            "hit_rate": counters["hits"] / experts if experts else None,
            "read_bytes_per_token": read,
            "wait_ms_per_token": counters["wait_ms"] / tokens,
            "disk_read_bytes_s": self.disk,
            "memory_read_bytes_s": self.memory,
            "decode_of_floor": floor_s * tokens / seconds,
            "joules_per_token": sum(self.joules) / tokens if self.joules else None,
            "load": machine.load_average(),
        } | (self.buckets(counters, tokens) if self.program.buckets else {})

    def buckets(self, counters: dict[str, float], tokens: int) -> dict[str, float]:
        found = {f"{name}_ms": counters[f"{name}_ms"] / tokens for name in BUCKETS}
        engine = (counters["prefill_ms"] + counters["decode_ms"]) / tokens
        wall = sum(self.steps) / tokens
        return found | {"unaccounted_ms": engine - sum(found.values()), "wire_ms": wall - engine}


def one_run(program: Ours, work: Work, round_: int, count: int) -> dict[str, Any]:
    turn = Turn(program, work, round_, count)
    turn.decode(work.gen)
    return turn.figures()


def probe_disk(work: Work) -> float:
    """Bytes per second of whole-record reads, as the engine reads them."""
    return float(_core.probe_disk(str(work.probed), work.record_bytes, PROBE_S)["read_bytes_s"])


def total(counters: list[dict[str, float]]) -> dict[str, float]:
    names = {"hits", "misses", "bytes", "wait_ms"}.union(*counters)
    return {name: sum(entry.get(name, 0.0) for entry in counters) for name in names}


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each figure's median, least and greatest over the runs that have it; None where none has."""
    result: dict[str, float | None] = {}
    for name in FIGURES:
        values = [run[name] for run in runs if run.get(name) is not None]
        result[name] = statistics.median(values) if values else None
        result[f"{name}_min"] = min(values) if values else None
        result[f"{name}_max"] = max(values) if values else None
    return result


def median_buckets(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds a token: each bucket; what of the engine's time none has; the request's way there and back."""
    return {name: statistics.median(run[f"{name}_ms"] for run in runs) for name in (*BUCKETS, "unaccounted", "wire")}


def peer_run(peer: Program, work: Work, round_: int, count: int) -> dict[str, Any]:
    """One round of another program on the same ids."""
    ids = work.ids.take(count + work.gen, round_)
    read_before = peer.read_bytes()
    ttft_ms = peer.prefill(ids[:count], work.kept(count))
    read = peer.read_bytes()
    steps = peer.decode(ids[count:])
    return {
        "prefill_tok_s": (count - work.kept(count)) / ttft_ms * 1e3,
        "ttft_ms": ttft_ms,
        "decode_tok_s": len(steps) / sum(steps) * 1e3,
        "prefill_read_bytes": read - read_before,
        "read_bytes_per_token": (peer.read_bytes() - read) / len(steps),
    }
