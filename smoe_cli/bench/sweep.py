"""Arms of a sweep: combinations of engine flags, measured in turn, compared in pairs, one of them recommended.

Every arm runs once a round. Engines that fit into memory together also take turns within it, a few tokens each: what a
busy neighbour does to one arm he does to the others, and a round gives many pairs to compare. A difference counts if
the median ratio's interval of confidence, which assumes nothing about how the noise is distributed, leaves out 1.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smoe_cli import _core, sizes
from smoe_cli.bench.measure import Turn, Work, cold_start, medians, rotated
from smoe_cli.bench.programs import Ours
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError, from_core

MOST_ARMS = 24
LEAST_GAIN = 0.01  # less than this is not worth a word
CONFIDENCE = 0.95
SLICE = 8  # tokens an arm decodes before it is the next one's turn
FIGURES = ("decode_tok_s", "prefill_tok_s", "ttft_ms", "hit_rate", "read_bytes_per_token")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a number", "arms take numbers here")
    return int(text)


def _engine(text: str) -> str:
    path = shutil.which(text)
    if path is None:
        raise UsageError(f"{text} is not an engine that can be run", "give the path of a smoe-engine")
    return path


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise UsageError(f"{text!r} is not on or off", "instrument is counting where the time goes, or not")
    return text == "on"


# arm -> (field of EngineFlags or of Arm, its value from a word, whether the output changes)
ARMS: dict[str, tuple[str, Callable[[str], Any], bool]] = {
    "top_k": ("experts_per_token", _count, True),
    "activations": ("activations", str, True),
    "kv": ("kv", str, True),
    "slots": ("ring", _count, False),
    "budget": ("budget", sizes.parse, False),
    "cache_policy": ("cache_policy", str, False),
    "threads": ("threads", _count, False),
    "workers": ("workers", _count, False),
    "io": ("io", str, False),
    "spec": ("spec", _count, False),
    "draft": ("draft", str, False),
    "isa": ("isa", str, False),
    "instrument": ("instrument", _switch, False),
    "engine": ("engine", _engine, False),
}


@dataclass
class Arm:
    """One combination. ``values`` as they were written, for people."""

    values: dict[str, str]
    flags: EngineFlags
    changes_output: bool
    engine: Path | None = None  # another build of it
    runs: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)  # ms a token, each to be compared with its like in another arm
    quality: dict[str, Any] = field(default_factory=dict)
    budget_bytes: int = 0

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def parse_arms(words: list[str], base: EngineFlags) -> list[Arm]:
    """All combinations of ``key=v1,v2,...``; the first of each is the reference. Raises UsageError."""
    axes: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if key not in ARMS or not equals or not all(values.split(",")):
            known = ", ".join(ARMS)
            raise UsageError(f"--arm takes key=v1,v2,..., not {word!r}", f"the keys are {known}")
        if key in axes:
            raise UsageError(f"--arm {key} is given twice", "put its values in one: " + key + "=v1,v2")
        axes[key] = values.split(",")
    if {"slots", "budget"} <= set(axes):
        raise UsageError("slots and budget both size the expert cache", "sweep one of them")
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if not axes:
        raise UsageError("nothing to compare", f"give --arm key=v1,v2,...; the keys are {', '.join(ARMS)}")
    if len(combinations) > MOST_ARMS:
        raise UsageError(f"{len(combinations)} arms are more than {MOST_ARMS}", "give fewer values")
    return [_arm(values, combinations[0], base) for values in combinations]


def _arm(values: dict[str, str], reference: dict[str, str], base: EngineFlags) -> Arm:
    given = {ARMS[key][0]: ARMS[key][1](value) for key, value in values.items()}
    changed = any(ARMS[key][2] and value != reference[key] for key, value in values.items())
    engine = given.pop("engine", None)
    return Arm(values, replace(base, **given), changed, engine and Path(engine))


def check(arms: list[Arm], work: Work) -> None:
    """Each arm's plan before anything runs. Raises what the engine would say."""
    for arm in arms:
        try:
            flags = replace(arm.flags, instrument=False)
            arm.budget_bytes = _core.plan(str(work.vault), **flags.options())["budget_bytes"]
        except _core.CoreError as error:
            failure = from_core(error)
            failure.text = f"{arm.name}: {failure.text}"
            raise failure from None


def fit_together(arms: list[Arm]) -> bool:
    """Whether the engines of all arms may run at once."""
    usable = int(_core.machine_memory()["usable_ram_bytes"])
    return sum(arm.budget_bytes for arm in arms) <= usable * 3 // 4


def measure(arms: list[Arm], work: Work) -> None:
    """All rounds. Engines that fit together stay up; otherwise each is started and warmed up for its turn."""
    together = fit_together(arms)
    with contextlib.ExitStack() as stack:
        programs = {arm.name: stack.enter_context(started(arm, work)) for arm in arms} if together else {}
        for number, round_, count in work.rounds():
            order = list(rotated(arms, round_))
            if together:
                take_turns(order, programs, work, round_, count)
            else:
                for arm in order:
                    with started(arm, work) as program:
                        take_turns([arm], {arm.name: program}, work, round_, count)
            speeds = ", ".join(f"{arm.name} {arm.runs[-1]['decode_tok_s']:.2f}" for arm in arms)
            work.progress(number, f"decode tok/s {speeds}")


def take_turns(arms: list[Arm], programs: dict[str, Ours], work: Work, round_: int, count: int) -> None:
    """One round of arms whose engines are up: a prompt each, then a few tokens each until all have decoded theirs."""
    turns = [(arm, Turn(programs[arm.name], work, round_, count)) for arm in arms]
    for number in range(math.ceil(work.gen / SLICE)):
        for _, turn in rotated(turns, number):
            turn.decode(SLICE)
    for arm, turn in turns:
        arm.runs.append({"round": round_, "prompt_tokens": count} | turn.figures())
        arm.pairs += turn.slices if len(arms) > 1 else [1e3 / arm.runs[-1]["decode_tok_s"]]


@contextlib.contextmanager
def started(arm: Arm, work: Work) -> Iterator[Ours]:
    flags = replace(arm.flags, instrument=False)
    program = Ours(arm.name, work.vault, flags, arm.engine, buckets=arm.flags.instrument)
    try:
        cold_start(program, work)
        yield program
    finally:
        program.stop()


# -- what follows -----------------------------------------------------------------------------------------------------


def paired(arm: Arm, reference: Arm) -> dict[str, Any]:
    """The median ratio of decode speed to the reference, pair by pair, with its interval of confidence: None where
    there are too few pairs to have one."""
    ratios = sorted(b / a for a, b in zip(arm.pairs, reference.pairs, strict=True))
    median = statistics.median(ratios)
    cut = trimmed(len(ratios))
    interval = (
        {"ratio_low": ratios[cut - 1], "ratio_high": ratios[-cut]} if cut else {"ratio_low": None, "ratio_high": None}
    )
    sure = cut > 0 and (ratios[cut - 1] > 1 or ratios[-cut] < 1)
    return {"ratio": median, **interval, "pairs": len(ratios), "differs": sure and abs(median - 1) >= LEAST_GAIN}


def trimmed(n: int) -> int:
    """Which of n sorted values, counted from either end, bounds the median with CONFIDENCE: binomial, as in the sign
    test. 0: n is too small."""
    rank, tail = 0, 0.5**n
    while tail <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    return rank


def summary(arms: list[Arm], most_kl: float) -> dict[str, Any]:
    """Each arm's figures beside the reference (the first), which arms no other beats, and a recommendation."""
    rows = []
    for arm in arms:
        compared = paired(arm, arms[0])
        rows.append(
            {"arm": arm.name, "values": arm.values, "budget_bytes": arm.budget_bytes}
            | {key: value for key, value in medians(arm.runs).items() if key.startswith(FIGURES)}
            | compared
            | {"kl_mean": 0.0, "top1_agreement": 1.0}
            | arm.quality
        )
    for row in rows:
        row["pareto"] = not any(beats(other, row) for other in rows)
    best, why = recommend(rows, most_kl)
    return {"arms": rows, "recommended": best, "recommendation": why}


def beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Faster, no larger and no worse than ``b``; a tie in all three beats nothing."""
    at_least = a["ratio"] >= b["ratio"] and a["budget_bytes"] <= b["budget_bytes"] and a["kl_mean"] <= b["kl_mean"]
    better = a["ratio"] > b["ratio"] or a["budget_bytes"] < b["budget_bytes"] or a["kl_mean"] < b["kl_mean"]
    return bool(at_least and better)


def recommend(rows: list[dict[str, Any]], most_kl: float) -> tuple[str, str]:
    """(arm, one sentence): the fastest one that is measurably faster than the reference and close enough to it."""
    reference = rows[0]
    faster = [row for row in rows[1:] if row["differs"] and row["ratio"] > 1 and row["kl_mean"] <= most_kl]
    if not faster:
        few = "" if trimmed(reference["pairs"]) else f" ({reference['pairs']} rounds cannot tell: ask for more)"
        return reference["arm"], f"Keep {reference['arm']}: no other arm is measurably faster at this quality{few}."
    best = max(faster, key=lambda row: row["ratio"])
    gain = f"{100 * (best['ratio'] - 1):.0f}% faster than {reference['arm']}"
    spread = f"{100 * (best['ratio_low'] - 1):.0f} to {100 * (best['ratio_high'] - 1):.0f}%, 95% sure"
    cost = f", at KL {best['kl_mean']:.4f}" if best["kl_mean"] else ", with the same output"
    return best["arm"], f"Use {best['arm']}: {gain} ({spread}){cost}."
