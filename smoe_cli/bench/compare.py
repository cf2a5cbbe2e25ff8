"""What a sweep's figures say: arms compared in pairs, those that no other beats, and the one to use.

A difference counts if the median ratio's interval of confidence, which assumes nothing about how the noise is
distributed, leaves out 1, and if it is worth a word.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from smoe_cli.bench.measure import medians
from smoe_cli.bench.sweep import Arm

LEAST_GAIN = 0.01  # less than this is not worth a word
CONFIDENCE = 0.99  # many arms are compared: with 95% one in twenty would differ by chance
FIGURES = ("decode_tok_s", "prefill_tok_s", "ttft_ms", "hit_rate", "read_bytes_per_token")


def paired(times: list[float], reference: list[float]) -> dict[str, Any]:
    """The median ratio of speed to the reference, pair by pair, with its interval of confidence: None where there are
    too few pairs to have one. Milliseconds in."""
    ratios = sorted(b / a for a, b in zip(times, reference, strict=True))
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


def summary(arms: list[Arm], most_kl: float, goal: str = "decode") -> dict[str, Any]:
    """Each arm's figures beside the reference (the first), which arms no other beats, and a recommendation. What counts
    as speed is ``goal``: decode or prefill."""
    rows = []
    for arm in arms:
        decode, prefill = paired(arm.decodes, arms[0].decodes), paired(arm.prefills, arms[0].prefills)
        compared = decode if goal == "decode" else prefill
        rows.append(
            {"arm": arm.name, "values": arm.values, "budget_bytes": arm.budget_bytes}
            | {key: value for key, value in medians(arm.runs).items() if key.startswith(FIGURES)}
            | compared
            | {"decode_ratio": decode["ratio"], "prefill_ratio": prefill["ratio"]}
            | {"kl_mean": 0.0, "top1_agreement": 1.0}
            | arm.quality
        )
    for row in rows:
        row["pareto"] = not any(beats(other, row) for other in rows)
    best, why = recommend(rows, most_kl)
    return {"goal": goal, "arms": rows, "recommended": best, "recommendation": why}


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
        few = "" if trimmed(reference["pairs"]) else f" ({reference['pairs']} pairs cannot tell: ask for more rounds)"
        return reference["arm"], f"Keep {reference['arm']}: no other arm is measurably faster at this quality{few}."
    best = max(faster, key=lambda row: row["ratio"])
    gain = f"{100 * (best['ratio'] - 1):.0f}% faster than {reference['arm']}"
    spread = f"{100 * (best['ratio_low'] - 1):.0f} to {100 * (best['ratio_high'] - 1):.0f}%, 99% sure"
    cost = f", at KL {best['kl_mean']:.4f}" if best["kl_mean"] else ", with the same output"
    return best["arm"], f"Use {best['arm']}: {gain} ({spread}){cost}."
