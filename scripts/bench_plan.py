#!/usr/bin/env python3
"""How far what the plan predicts is from what the engine does: decode and prefill, several models and budgets.

    scripts/bench_plan.py --vault vault/bench.smoe --vault vault/oss.smoe --shares 0.15,0.3,0.6 --out DIR

For each vault and each share of its experts: the prediction of a vault without history, then an engine with that many
slots, fed with the ids of --text where the vault has a tokenizer, else random ones: a prompt of 512 that is not
counted, then rounds of a prompt, decode steps that are not counted, and decode steps that are; then the prediction
again with the history which that engine has kept. The machine must be quiet. Writes raw.json and README.md; models that
are there already, from another run, stay.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.ids import RandomIds, TextIds, text_ids
from smoe_cli.bench.programs import Ours
from smoe_cli.commands.plan import ids_to_rehearse
from smoe_cli.engine.flags import EngineFlags

PROMPT = 512
CTX = 1024
# (heading, when it was predicted, what): each is compared with what was measured.
PREDICTED = [(when, what) for what in ("decode_tok_s", "prefill_tok_s") for when in ("before", "after")]


def ids_of(vault: Path, text: Path | None) -> TextIds | RandomIds:
    if text is not None and (vault.with_suffix(".tokenizer") / "tokenizer.json").is_file():
        return text_ids(vault.with_suffix(".tokenizer"), text)
    return RandomIds(json.loads(_core.inspect(str(vault))["manifest"])["arch"]["vocab"])


def measure(vault: Path, ring: int, history: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds. A token's time is the engine's own: the client adds half a millisecond to a step."""
    ids = ids_of(vault, options.text)
    flags = EngineFlags(ring=ring, ctx=CTX)
    program = Ours("smoe", vault, flags, extra=("--history", str(history), "--no-warm"), buckets=True)
    program.start()
    rounds: dict[str, list[float]] = {}
    try:
        program.prefill(ids.take(PROMPT, 0))
        for number in range(1, options.repeat + 1):
            fed = ids.take(PROMPT + options.warm + options.steps, number)
            prefill = program.prefill(fed[:PROMPT])
            program.decode(fed[PROMPT : PROMPT + options.warm])
            before = program.read_bytes()
            program.decode(fed[PROMPT + options.warm :])
            counted = program.counters[-options.steps :]
            sums = {name: sum(c[name] for c in counted) for name in counted[0]}
            found = sums["hits"] - sums["guessed_right"]  # not what was read on a guess a moment before
            row = {
                "decode_tok_s": 1e3 * options.steps / (sums["prefill_ms"] + sums["decode_ms"]),
                "prefill_tok_s": PROMPT * 1e3 / prefill,
                "hit_rate": found / (sums["hits"] + sums["misses"]),
                "read_bytes_per_token": (program.read_bytes() - before) / options.steps,
            }
            for name, value in row.items():
                rounds.setdefault(name, []).append(value)
    finally:
        program.stop()
    return {name: statistics.median(values) for name, values in rounds.items()} | {"ids": ids.name, "rounds": rounds}


def predicted(vault: Path, ring: int, history: Path | None) -> dict[str, Any]:
    more: dict[str, Any] = {"history": str(history)} if history else {}
    plan = _core.predict(str(vault), 1.0, ids_to_rehearse(vault), ring=ring, ctx=CTX, **more)
    keep = ("predicted_", "rehearsed_", "read_", "disk_", "memory_", "slots", "total_records", "budget_bytes")
    return {key: value for key, value in plan.items() if key.startswith(keep)}


def configuration(vault: Path, share: float, options: argparse.Namespace) -> dict[str, Any]:
    records = _core.inspect(str(vault))["records"]
    ring = max(1, round(records * share))
    history = options.out / f"{vault.stem}-{share:g}.usage"
    history.unlink(missing_ok=True)
    row: dict[str, Any] = {"model": vault.stem, "share": share, "slots": ring, "before": predicted(vault, ring, None)}
    row["measured"] = measure(vault, ring, history, options)
    row["after"] = predicted(vault, ring, history)
    history.unlink()
    print(line(row), file=sys.stderr, flush=True)
    return row


def error(row: dict[str, Any], when: str, what: str) -> float:
    return float(row[when][f"predicted_{what}"] / row["measured"][what] - 1)


def line(row: dict[str, Any]) -> str:
    cells = [row["model"], f"{row['share']:.0%}", f"{row['measured']['hit_rate']:.3f}"]
    cells += [f"{row[when]['predicted_hit_rate']:.3f}" for when in ("before", "after")]
    for what in ("decode_tok_s", "prefill_tok_s"):
        rounds = row["measured"]["rounds"][what]
        cells.append(f"{row['measured'][what]:.1f} ({min(rounds):.1f} to {max(rounds):.1f})")
        cells += [f"{row[w]['predicted_' + what]:.1f} ({error(row, w, what):+.0%})" for w in ("before", "after")]
    return "| " + " | ".join(cells) + " |"


def report(result: dict[str, Any]) -> str:
    errors = [[abs(error(row, *which)) for row in result["rows"]] for which in PREDICTED]
    spoken = (
        f"{what} {when} {max(all_):.0%}, {sum(e <= 0.15 for e in all_)} of {len(all_)} within 15%"
        for (when, what), all_ in zip(PREDICTED, errors, strict=True)
    )
    fed = {row["model"]: row["measured"]["ids"] for row in result["rows"]}
    names = ["model", "slots of experts", "hit rate", "expected", "with history"]
    names += ["decode tok/s", "predicted", "with history", f"prefill {PROMPT} tok/s", "predicted", "with history"]
    return "\n".join(
        [
            f"# What the plan predicts and what the engine does, {result['date']}",
            "",
            *(f"    {command}" for command in result["commands"]),
            "",
            f"- commit {result['commit']}; {result['machine']}; load {result['load']:.2f} before",
            "- fed with " + ", ".join(f"{ids} ({model})" for model, ids in fed.items()),
            "- medians of the rounds, the least and the greatest beside them; predicted before the engine ran, without "
            "history, and after it, with what it has kept",
            "- largest errors: " + "; ".join(spoken),
            "",
            "| " + " | ".join(names) + " |",
            "|---" * len(names) + "|",
            *[line(row) for row in result["rows"]],
            "",
        ]
    )


def add_to(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """`result` with the models of an earlier run that this one has not measured."""
    if not file.exists():
        return result
    earlier = json.loads(file.read_text())
    models = {row["model"] for row in result["rows"]}
    kept = [row for row in earlier["rows"] if row["model"] not in models]
    if not kept:
        return result
    return result | {"rows": kept + result["rows"], "commands": earlier["commands"] + result["commands"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="The plan's predictions against the engine.")
    parser.add_argument("--vault", type=Path, action="append", required=True)
    parser.add_argument("--shares", default="0.15,0.3,0.6", help="slots, as shares of all experts (%(default)s)")
    parser.add_argument("--text", type=Path, help="what is fed to vaults that have a tokenizer (default: random ids)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which the median is taken")
    parser.add_argument("--warm", type=int, default=8, help="decode steps of a round that are not counted")
    parser.add_argument("--steps", type=int, default=24, help="decode steps that are")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    load = machine.load_average()
    shares = [float(text) for text in options.shares.split(",")]
    result = {
        "commands": [shlex.join(["scripts/bench_plan.py", *sys.argv[1:]])],
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "load": load,
        "rows": [configuration(vault, share, options) for vault in options.vault for share in shares],
    }
    result = add_to(options.out / "raw.json", result)
    (options.out / "raw.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "README.md").write_text(report(result))


if __name__ == "__main__":
    main()
