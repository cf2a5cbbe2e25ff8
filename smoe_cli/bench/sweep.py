"""Arms of a sweep: combinations of engine flags, builds and encodings, measured in turn. compare.py says what follows.

Every arm runs once a round. Engines that fit into memory together also take turns within it, a few tokens each: what a
busy neighbour does to one arm he does to the others, and a round gives many pairs to compare.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smoe_cli import _core, registry, sizes
from smoe_cli.bench.measure import Turn, Work, cold_start, rotated
from smoe_cli.bench.programs import Ours
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError, from_core

MOST_ARMS = 24
SLICE = 8  # tokens an arm decodes before it is the next one's turn


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a number", "arms take numbers here")
    return int(text)


def _engine(text: str) -> Path:
    path = shutil.which(text)
    if path is None:
        raise UsageError(f"{text} is not an engine that can be run", "give the path of a smoe-engine")
    return Path(path)


def _vault(text: str) -> Path:
    return registry.resolve(text).path


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
    "chunk": ("chunk", _count, False),
    "isa": ("isa", str, False),
    "instrument": ("instrument", _switch, False),
    "engine": ("engine", _engine, False),
    "vault": ("vault", _vault, True),
}


@dataclass
class Arm:
    """One combination. ``values`` as they were written, for people."""

    values: dict[str, str]
    flags: EngineFlags
    changes_output: bool
    engine: Path | None = None  # another build of it
    vault: Path | None = None  # the model in another encoding
    runs: list[dict[str, Any]] = field(default_factory=list)
    # Milliseconds a token of decode and of prefill, each to be compared with its like in another arm.
    decodes: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)
    budget_bytes: int = 0
    again: int = 0  # how many arms before it are the same: such a pair says what this machine takes for a difference

    @property
    def name(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.values.items())
        return words + (f" (again {self.again})" if self.again else "")


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
    arms = [_arm(values, combinations[0], base) for values in combinations]
    for number, one in enumerate(arms):
        one.again = sum(other.values == one.values for other in arms[:number])
    return arms


def _arm(values: dict[str, str], reference: dict[str, str], base: EngineFlags) -> Arm:
    given = {ARMS[key][0]: ARMS[key][1](value) for key, value in values.items()}
    changed = any(ARMS[key][2] and value != reference[key] for key, value in values.items())
    own = {name: given.pop(name) for name in ("engine", "vault") if name in given}
    return Arm(values, replace(base, **given), changed, **own)


def check(arms: list[Arm], work: Work) -> None:
    """Each arm's plan before anything runs. Raises what the engine would say."""
    for arm in arms:
        try:
            flags = replace(arm.flags, instrument=False)
            arm.budget_bytes = _core.plan(str(arm.vault or work.vault), **flags.options())["budget_bytes"]
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
        arm.decodes += turn.slices if len(arms) > 1 else [1e3 / arm.runs[-1]["decode_tok_s"]]
        arm.prefills.append(1e3 / arm.runs[-1]["prefill_tok_s"])


@contextlib.contextmanager
def started(arm: Arm, work: Work) -> Iterator[Ours]:
    flags = replace(arm.flags, instrument=False)
    program = Ours(arm.name, arm.vault or work.vault, flags, arm.engine, buckets=arm.flags.instrument)
    try:
        cold_start(program, work)
        yield program
    finally:
        program.stop()
