#!/usr/bin/env python3
"""What a model's settings cost and give on several kinds of text: fewer experts, other encodings, cache sizes.

    scripts/study.py --vault vault/sparse.smoe --encoding q8=vault/sparse-q8.smoe --encoding q4=vault/sparse-q4.smoe \\
        --text prose=FILE --text code=FILE ... --out tests/bench_data/2026-01-31-study

One `smoe sweep` for each question and kind of text: all arms of a question are in one run and take turns, the first is
the reference. Writes raw.json and README.md. What is said of quality holds on any machine; speeds are ratios, taken on
this one, which should be quiet. Cache policies are scripts/bench_policies.py's: they need no clock.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.model import describe_vault

SHARES = (0.95, 0.65, 0.5, 0.35)  # of all experts that the cache holds
Table = dict[str, dict[str, dict[str, Any]]]  # arm -> text -> row of the sweep


def pairs(words: list[str]) -> dict[str, Path]:
    return {name: Path(file) for name, _, file in (word.partition("=") for word in words)}


def sweep(options: argparse.Namespace, text: Path, arms: str) -> list[dict[str, Any]]:
    """The rows of one sweep over ``text``, without their single runs."""
    command = [sys.executable, "-m", "smoe_cli", "sweep", str(options.vault), "--arm", arms, "--text", str(text)]
    command += ["--rounds", str(options.rounds), "--gen", str(options.gen), "--json"]
    command += ["--quality-tokens", str(options.quality_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with {done.returncode}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["arms"]
    return rows


def questions(options: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """title -> (--arm, what its values are called)"""
    about = describe_vault(options.vault)
    top_k, records = min(about["top_k"]), sum(about["experts"])
    fewer = sorted({top_k, *(round(top_k * share) for share in (0.75, 0.5, 0.33))}, reverse=True)
    slots = [max(2 * top_k, round(records * share)) for share in SHARES]
    found = {
        "Experts a token": ("top_k=" + ",".join(map(str, fewer)), [f"top-{k}" for k in fewer]),
        "Cache size": ("slots=" + ",".join(map(str, slots)), [f"{share:.0%} of the experts" for share in SHARES]),
    }
    encodings = pairs(options.encoding)
    if encodings:
        paths = [options.vault, *encodings.values()]
        found["Encoding"] = ("vault=" + ",".join(map(str, paths)), ["as it is", *encodings])
    return found


def rendered(title: str, table: Table, texts: list[str]) -> list[str]:
    lines = [f"## {title}", "", "| | " + " | ".join(texts) + " |", "|---" * (len(texts) + 1) + "|"]
    for arm, by_text in table.items():
        lines.append(f"| {arm} | " + " | ".join(cell(by_text[text]) for text in texts) + " |")
    return [*lines, ""]


def cell(row: dict[str, Any]) -> str:
    """Speed against the first arm, and what the output lost."""
    words = [f"{row['decode_ratio']:.2f}x" + ("" if row["differs"] or row["ratio"] == 1 else " (no difference)")]
    if row.get("perplexity"):
        words.append(f"ppl {row['perplexity']:.2f}")
    if row["kl_mean"]:
        words.append(f"KL {row['kl_mean']:.4f}, top-1 {100 * row['top1_agreement']:.1f}%")
    if row.get("hit_rate") is not None and row["hit_rate"] < 0.995:
        words.append(f"hits {100 * row['hit_rate']:.0f}%, {row['read_bytes_per_token'] / 1e6:.1f} MB/token")
    return "; ".join(words)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What settings cost and give on several kinds of text.")
    parser.add_argument("--vault", type=Path, required=True)
    parser.add_argument("--encoding", action="append", default=[], help="NAME=FILE.smoe, may be repeated")
    parser.add_argument("--text", action="append", required=True, help="KIND=FILE, may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--quality-tokens", type=int, default=1024)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    texts = pairs(options.text)
    tables: dict[str, Table] = {}
    for title, (arms, names) in questions(options).items():
        table = tables.setdefault(title, {name: {} for name in names})
        for kind, text in texts.items():
            print(f"{title}: {kind}", file=sys.stderr)
            for name, row in zip(names, sweep(options, text, arms), strict=True):
                table[name][kind] = row | {"arm": name, "values": {}}  # paths are nobody's business
    about = describe_vault(options.vault)
    head = [
        f"# Settings of {options.vault.stem} on several kinds of text, {time.strftime('%Y-%m-%d')}",
        "",
        f"- commit {machine.commit()}; {machine.describe()['cpu']}, {_core.usable_threads()} threads",
        f"- {len(about['experts'])} MoE layers of {about['experts'][0]} experts, top-{about['top_k'][0]}; "
        f"{options.rounds} rounds of {options.gen} tokens, quality over {options.quality_tokens} tokens a text",
        "- each cell against the first row of its column: decode speed; perplexity; KL in nats and agreement on the "
        "likeliest token; expert cache",
        "",
    ]
    body = [line for title, table in tables.items() for line in rendered(title, table, list(texts))]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text("\n".join(head + body))
    (options.out / "raw.json").write_text(
        json.dumps({"machine": machine.describe(), "tables": tables}, indent=1) + "\n"
    )
    print(f"wrote {options.out}/README.md", file=sys.stderr)


if __name__ == "__main__":
    main()
