"""The tables and plots of scripts/study.py, from its raw.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smoe_cli.bench.report import pyplot

Arms = dict[str, dict[str, Any]]  # arm -> text -> figures


def write(data: dict[str, Any], folder: Path) -> list[Path]:
    """tables.md and a plot for each part that has been measured; the files written."""
    texts: list[str] = data["texts"]
    lines, written = ["# Tables", ""], [folder / "tables.md"]
    for question, arms in data.get("quality", {}).items():
        lines += quality_table(question, arms, texts)
    if "quality" in data:
        written.append(save(quality_plot(data["quality"], texts), folder / "quality.png"))
    for question, arms in data.get("cache", {}).items():
        runs = list(next(iter(arms.values())))
        lines += cache_table(question, arms, runs)
        written.append(save(cache_plot(arms, runs), folder / "cache.png"))
    for question, arms in data.get("speed", {}).items():
        lines += speed_table(question, arms, texts)
    if "speed" in data:
        written.append(save(speed_plot(data["speed"], texts), folder / "speed.png"))
    written[0].write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return written


def save(canvas: Any, path: Path) -> Path:
    canvas.savefig(path, dpi=100)
    return path


def markdown(title: str, note: str, head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"## {title}", "", note, "", "| " + " | ".join(["", *head]) + " |", "|---" * (len(head) + 1) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


# -- quality ----------------------------------------------------------------------------------------------------------


def quality_table(question: str, arms: Arms, texts: list[str]) -> list[str]:
    rows = []
    for arm, by_text in arms.items():
        cells = [quality_cell(by_text[text]) if text in by_text else "" for text in texts]
        some = next(iter(by_text.values()))
        rows.append([arm, f"{some['expert_bytes_per_token'] / 1e6:.1f}", *cells])
    note = "KL in nats from the reference with half of its 95% interval; same likeliest token; perplexity over its own."
    return markdown(f"{question}: quality", note, ["MB of experts a token", *texts], rows)


def quality_cell(figures: dict[str, Any]) -> str:
    error = "" if figures["kl_error"] is None else f" ± {figures['kl_error']:.4f}"
    return f"{figures['kl_mean']:.4f}{error}; {figures['top1_agreement']:.1%}; x{figures['perplexity_ratio']:.3f}"


def quality_plot(questions: dict[str, Arms], texts: list[str]) -> Any:
    shown = {question: arms for question, arms in questions.items() if len(arms) > 2}
    canvas, axes = pyplot().subplots(1, len(shown), figsize=(6 * len(shown), 7), layout="constrained", squeeze=False)
    for axis, (question, arms) in zip(axes[0], shown.items(), strict=True):
        for text in texts:
            found = [(arm, by_text[text]) for arm, by_text in arms.items() if text in by_text]
            y = [figures["kl_mean"] for _, figures in found]
            error = [figures["kl_error"] or 0 for _, figures in found]
            axis.errorbar([arm for arm, _ in found], y, yerr=error, marker="o", capsize=3, linestyle="", label=text)
        axis.set(title=question, ylabel="KL from the reference, nats", yscale="log")
        axis.tick_params(axis="x", rotation=60)
        axis.grid(alpha=0.3)
        axis.legend()
    return canvas


# -- cache ------------------------------------------------------------------------------------------------------------


def cache_table(question: str, arms: Arms, runs: list[str]) -> list[str]:
    lines = []
    shares = next(iter(arms.values()))[runs[0]]["share"]
    for run in runs:
        best = [
            max(by_run[run]["hit_rate"][i] for arm, by_run in arms.items() if arm != "optimal")
            for i in range(len(shares))
        ]
        rows = []
        for arm, by_run in arms.items():
            cells = by_run[run]
            words = [
                f"{rate:.1%}, {read / 1e6:.1f} MB".join(["**", "**"] if rate == top and arm != "optimal" else ["", ""])
                for rate, read, top in zip(cells["hit_rate"], cells["read_bytes_per_token"], best, strict=True)
            ]
            rows.append([arm, *words])
        note = "Hits and bytes read a token in decode, by the share of the experts that the cache holds."
        lines += markdown(f"{question}: {run}", note, [f"{share:.0%}" for share in shares], rows)
    return lines


def cache_plot(arms: Arms, runs: list[str]) -> Any:
    canvas, axes = pyplot().subplots(1, len(runs), figsize=(4 * len(runs), 4), layout="constrained", squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        for arm, by_run in arms.items():
            style = {"color": "black", "linestyle": ":"} if arm == "optimal" else {"marker": "."}
            cells = by_run[run]
            axis.plot([100 * x for x in cells["share"]], [100 * y for y in cells["hit_rate"]], label=arm, **style)
        axis.set(title=run, xlabel="experts in the cache, %", ylabel="hits, %", ylim=(0, 101))
        axis.grid(alpha=0.3)
    axes[0][-1].legend()
    return canvas


# -- speed ------------------------------------------------------------------------------------------------------------


def speed_table(question: str, arms: Arms, texts: list[str]) -> list[str]:
    rows = [[arm, *(speed_cell(by_text.get(text)) for text in texts)] for arm, by_text in arms.items()]
    some = next(iter(next(iter(arms.values())).values()))
    note = (
        f"Decode speed over the first row's, with its 99% interval from {some['pairs']} pairs (= where it holds 1); "
        "tokens a second; expert cache hits and bytes read a token where not all experts are in memory."
    )
    return markdown(f"{question}: speed", note, texts, rows)


def speed_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    spread = "" if row["ratio_low"] is None else f" ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
    words = [f"{row['ratio']:.2f}x{spread}{'' if row['differs'] else ' ='}; {row['decode_tok_s']:.0f} tok/s"]
    if row.get("hit_rate") is not None and row["hit_rate"] < 0.995:
        words.append(f"hits {row['hit_rate']:.0%}, {row['read_bytes_per_token'] / 1e6:.1f} MB")
    return "; ".join(words)


def speed_plot(questions: dict[str, Arms], texts: list[str]) -> Any:
    canvas, axes = pyplot().subplots(
        1, len(questions), figsize=(5.5 * len(questions), 6), layout="constrained", squeeze=False
    )
    for axis, (question, arms) in zip(axes[0], questions.items(), strict=True):
        for text in texts:
            found = [(arm, by_text[text]) for arm, by_text in arms.items() if text in by_text]
            y = [row["ratio"] for _, row in found]
            spread = [
                [max(0.0, row["ratio"] - (row["ratio_low"] or row["ratio"])) for _, row in found],
                [max(0.0, (row["ratio_high"] or row["ratio"]) - row["ratio"]) for _, row in found],
            ]
            axis.errorbar([arm for arm, _ in found], y, yerr=spread, marker="o", capsize=3, linestyle="", label=text)
        axis.set(title=question, ylabel="decode speed over the first", ylim=(0, None))
        axis.tick_params(axis="x", rotation=60)
        axis.grid(alpha=0.3)
        axis.legend()
    return canvas
