#!/usr/bin/env python3
"""What guessing at tokens from the conversation is worth: without and with, in turns, on prompts that ask for text that
is already there (editing code, summarising) and on one that does not.

    scripts/bench_draft.py --model demo --rounds 5 --draft ngram:8,auto [--ring 240] [--temperature 0.6]

For each prompt and way to guess: tokens a second without and with, the ratio, tokens a step, and expert bytes read a
token. All must say the same, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
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


def run(engine: Any, ids: list[int], eos: list[int], options: argparse.Namespace) -> tuple[list[int], dict[str, Any]]:
    engine.reset()
    out, outcome = engine.generate(ids, options.tokens, temperature=options.temperature, stop_ids=eos)
    return list(out), {**outcome, "tok_s": len(out) / outcome["decode_ms"] * 1e3}


def measure(model: ChatModel, engines: dict[str, Any], options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    ids = prompt_ids(model, PROMPTS[name])
    said: dict[str, list[int]] = {}
    outcomes: dict[str, list[dict[str, Any]]] = {way: [] for way in engines}
    for round_ in range(options.rounds + 1):  # the first one warms up
        for way in engines if round_ % 2 else reversed(engines):
            said[way], outcome = run(engines[way], ids, model.template.turn_end_ids, options)
            outcomes[way] += [outcome] if round_ else []
    if any(tokens != said["off"] for tokens in said.values()):
        sys.exit(f"error: {name}: they did not say the same")
    return [row(name, way, len(said[way]), outcomes["off"], outcomes[way]) for way in engines if way != "off"]


def row(name: str, way: str, tokens: int, plain: list[dict[str, Any]], guessed: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(outcomes: list[dict[str, Any]], key: str) -> float:
        return float(statistics.median(outcome[key] for outcome in outcomes))

    ratios = [g["tok_s"] / p["tok_s"] for g, p in zip(guessed, plain, strict=True)]
    return {
        "prompt": name,
        "draft": way,
        "tokens": tokens,
        "plain_tok_s": middle(plain, "tok_s"),
        "draft_tok_s": middle(guessed, "tok_s"),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "tokens_per_step": tokens / max(tokens - middle(guessed, "accepted_tokens"), 1),
        "drafted": middle(guessed, "drafted_tokens"),
        "accepted": middle(guessed, "accepted_tokens"),
        "plain_bytes_per_token": middle(plain, "read_bytes") / tokens,
        "draft_bytes_per_token": middle(guessed, "read_bytes") / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a vault's id or path")
    parser.add_argument("--vault-dir", type=Path)
    parser.add_argument("--draft", default="ngram:8,auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budget")
    parser.add_argument("--ring", type=int, help="so many experts in memory")
    options = parser.parse_args()
    model = open_model(options.model, options.vault_dir)
    flags: dict[str, Any] = {"ctx": 2048}
    flags |= {"budget": sizes.parse(options.budget)} if options.budget else {}
    flags |= {"ring": options.ring} if options.ring else {}
    engines = {way: _core.Engine(str(model.vault), **flags, draft=way) for way in ["off", *options.draft.split(",")]}
    for name in PROMPTS:
        for one in measure(model, engines, options, name):
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
