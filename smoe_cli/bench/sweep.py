"""Arms of a sweep: combinations of engine flags, measured in turn, compared in pairs, one of them recommended.

Every arm runs once a round, another one first each round, and is compared with the reference round by round: what a
busy neighbour does to one it does to the other. A difference counts only if every round agrees on its direction.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from smoe_cli import _core, sizes
from smoe_cli.bench.measure import Work, cold_start, medians, one_run, rotated
from smoe_cli.bench.programs import Ours
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError, from_core

MOST_ARMS = 24
LEAST_GAIN = 0.01  # less than this is not worth a word
FIGURES = ("decode_tok_s", "prefill_tok_s", "ttft_ms", "hit_rate", "read_bytes_per_token")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a number", "arms take numbers here")
    return int(text)


# arm -> (field of EngineFlags, its value from a word, whether the output changes)
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
}


@dataclass
class Arm:
    """One combination. ``values`` as they were written, for people."""

    values: dict[str, str]
    flags: EngineFlags
    changes_output: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
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
    return Arm(values, replace(base, **given), changed)


def check(arms: list[Arm], work: Work) -> None:
    """Each arm's plan before anything runs. Raises what the engine would say."""
    for arm in arms:
        try:
            arm.budget_bytes = _core.plan(str(work.vault), **arm.flags.options())["budget_bytes"]
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
            for arm in rotated(arms, round_):
                with contextlib.ExitStack() as own:
                    program = programs[arm.name] if together else own.enter_context(started(arm, work))
                    arm.runs.append({"round": round_, "prompt_tokens": count} | one_run(program, work, round_, count))
                work.progress(number, f"{arm.name}: decode {arm.runs[-1]['decode_tok_s']:.2f} tok/s")


@contextlib.contextmanager
def started(arm: Arm, work: Work) -> Iterator[Ours]:
    program = Ours(arm.name, work.vault, arm.flags)
    try:
        cold_start(program, work)
        yield program
    finally:
        program.stop()


# -- what follows -----------------------------------------------------------------------------------------------------


def paired(arm: Arm, reference: Arm, figure: str = "decode_tok_s") -> dict[str, Any]:
    """The median ratio to the reference, round by round, and whether every round agrees that it is more, or less."""
    ratios = [a[figure] / b[figure] for a, b in zip(arm.runs, reference.runs, strict=True)]
    median = statistics.median(ratios)
    agreed = len(ratios) >= 3 and (min(ratios) > 1 or max(ratios) < 1) and abs(median - 1) >= LEAST_GAIN
    return {"ratio": median, "ratio_min": min(ratios), "ratio_max": max(ratios), "differs": agreed}


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
        return reference["arm"], f"Keep {reference['arm']}: no other arm is measurably faster at this quality."
    best = max(faster, key=lambda row: row["ratio"])
    gain = f"{100 * (best['ratio'] - 1):.0f}% faster than {reference['arm']}"
    spread = f"{100 * (best['ratio_min'] - 1):.0f} to {100 * (best['ratio_max'] - 1):.0f}% over the rounds"
    cost = f", at KL {best['kl_mean']:.4f}" if best["kl_mean"] else ", with the same output"
    return best["arm"], f"Use {best['arm']}: {gain} ({spread}){cost}."
