#!/usr/bin/env python3
"""What guessing at tokens from the conversation is worth: with and without, alternating, on prompts that ask for text
that is already there (editing code, summarising) and on one that does not.

    scripts/bench_draft.py --model demo --rounds 5 --draft ngram:8 [--budget 2G]

For each prompt: tokens a second with and without, the ratio, tokens a step, and expert bytes read a token. Both must
say the same, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from smoe_cli import _core, sizes
from smoe_cli.chat.model import ChatModel, open_model

CODE = """def total_price(items, tax_rate, discount):
    subtotal = 0
    for item in items:
        price = item["price"] * item["quantity"]
        if item["on_sale"]:
            price = price * (1 - discount)
        subtotal = subtotal + price
    tax = subtotal * tax_rate
    return subtotal + tax
"""
NEWS = (
    "The town council of Brenholt voted on Tuesday to close the old bridge to cars. From April on, only cyclists and "
    "people on foot may cross it. The bridge was built in 1911 and was last repaired forty years ago. Engineers found "
    "cracks in two of its four pillars last summer. A new bridge for cars is planned half a mile upstream and costs "
    "nine million. Until it opens, in three years at the earliest, drivers will have to go through the village of Ham."
)
PROMPTS = {
    "edit code": f"Rename the variable subtotal to amount and write the whole function again:\n\n{CODE}",
    "repeat": f"Write this text again, word for word:\n\n{NEWS}",
    "summarise": f"Summarise this text in its own words and sentences:\n\n{NEWS}",
    "free": "Write a short story about a fox who learns to swim.",
}


def prompt_ids(model: ChatModel, text: str) -> list[int]:
    return list(model.template.render([{"role": "user", "content": text}]).ids)


def run(engine: Any, ids: list[int], count: int, eos: list[int]) -> tuple[list[int], dict[str, Any], float]:
    engine.reset()
    start = time.perf_counter()
    out, outcome = engine.generate(ids, count, temperature=0.0, stop_ids=eos)
    seconds = time.perf_counter() - start - outcome["prefill_ms"] / 1e3
    return list(out), outcome, len(out) / seconds


def measure(model: ChatModel, options: argparse.Namespace, name: str) -> dict[str, Any]:
    common: dict[str, Any] = {"ctx": 2048} | ({"budget": sizes.parse(options.budget)} if options.budget else {})
    engines = {
        "plain": _core.Engine(str(model.vault), **common),
        "draft": _core.Engine(str(model.vault), **common, draft=options.draft),
    }
    ids = prompt_ids(model, PROMPTS[name])
    speeds: dict[str, list[float]] = {arm: [] for arm in engines}
    said: dict[str, list[int]] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    for round_ in range(options.rounds + 1):  # the first one warms up
        order = list(engines) if round_ % 2 else list(reversed(engines))
        for arm in order:
            said[arm], outcomes[arm], speed = run(engines[arm], ids, options.tokens, model.template.turn_end_ids)
            speeds[arm] += [speed] if round_ else []
    if said["plain"] != said["draft"]:
        sys.exit(f"error: {name}: the two did not say the same")
    drafted = outcomes["draft"]
    steps = len(said["draft"]) - drafted["accepted_tokens"]
    medians = {arm: statistics.median(values) for arm, values in speeds.items()}
    return {
        "prompt": name,
        "tokens": len(said["plain"]),
        "plain_tok_s": medians["plain"],
        "draft_tok_s": medians["draft"],
        "ratio": medians["draft"] / medians["plain"],
        "tokens_per_step": len(said["draft"]) / max(steps, 1),
        "drafted": drafted["drafted_tokens"],
        "accepted": drafted["accepted_tokens"],
        "plain_bytes_per_token": outcomes["plain"]["read_bytes"] / len(said["plain"]),
        "draft_bytes_per_token": drafted["read_bytes"] / len(said["draft"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="With and without drafting, side by side.")
    parser.add_argument("--model", help="a vault's id or path")
    parser.add_argument("--vault-dir", type=Path)
    parser.add_argument("--draft", default="ngram:8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--budget")
    options = parser.parse_args()
    model = open_model(options.model, options.vault_dir)
    for name in PROMPTS:
        print(json.dumps(measure(model, options, name)), flush=True)


if __name__ == "__main__":
    main()
