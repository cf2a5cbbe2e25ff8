"""A measurement's result as a table for people, as CSV, as plots."""

from __future__ import annotations

import csv
import html
import io
import json
import sys
from pathlib import Path
from typing import Any

from smoe_cli import sizes, tables
from smoe_cli.errors import UsageError

# figure -> (title, unit, what one unit of the value is)
TITLES: dict[str, tuple[str, str, float]] = {
    "prefill_tok_s": ("prefill", "tok/s", 1.0),
    "ttft_ms": ("first token, warm process", "ms", 1.0),
    "decode_tok_s": ("decode", "tok/s", 1.0),
    "decode_of_floor": ("decode, share of the floor", "%", 100.0),
    "hit_rate": ("expert cache hits", "%", 100.0),
    "read_bytes_per_token": ("read from disk", "MB/token", 1e-6),
    "disk_read_bytes_s": ("the disk, whole records", "GB/s", 1e-9),
    "memory_read_bytes_s": ("the memory", "GB/s", 1e-9),
    "joules_per_token": ("energy net of idle", "J/token", 1.0),
}


def number(value: float) -> str:
    """Three significant digits, and no fewer than the whole part."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cell(figures: dict[str, Any], name: str, scale: float) -> str:
    """``median (least - greatest)``."""
    if figures.get(name) is None:
        return "-"
    middle, low, high = (number(figures[name + end] * scale) for end in ("", "_min", "_max"))
    return middle if low == high else f"{middle} ({low}-{high})"


def table(result: dict[str, Any]) -> list[str]:
    """The result as lines of text."""
    columns = result["prompts"]
    rows = [["", *(f"after {column['prompt_tokens']}" for column in columns), ""]]
    for name, (title, unit, scale) in TITLES.items():
        cells = [cell(column, name, scale) for column in columns]
        if any(text != "-" for text in cells):
            rows.append([title, *cells, unit])
    for peer in result.get("peers", []):
        rows.append([peer["name"], *[""] * len(columns), ""])
        for name in ("prefill_tok_s", "ttft_ms", "decode_tok_s"):
            title, unit, scale = TITLES[name]
            rows.append([f"  {title}", *(cell(column, name, scale) for column in peer["prompts"]), unit])
            rows.append(["  smoe / peer", *(ratio(column, name) for column in peer["prompts"]), ""])
    return [heading(result), "", *tables.aligned(rows), "", *footer(result)]


def heading(result: dict[str, Any]) -> str:
    budget = sizes.show(result["budget_bytes"])
    return (
        f"{result['model']}: {result['threads']} threads, {result['isa']}, budget {budget}, {result['slots']} slots, "
        f"{result['gen']} tokens after each prompt, {result['repeat']} rounds of {result['ids']}"
    )


def footer(result: dict[str, Any]) -> list[str]:
    lines = [
        f"engine up after {result['engine_start_ms']:.0f} ms, first token of the cold process after "
        f"{result['cold_ttft_ms']:.0f} ms, peak RSS {sizes.show(result['peak_rss_bytes'])} "
        f"of a plan of {sizes.show(result['budget_bytes'])}"
    ]
    if buckets := result.get("buckets"):
        parts = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in buckets.items() if abs(ms) >= 0.005)
        lines.append(f"ms a token: {parts}")
    return lines


def ratio(column: dict[str, Any], name: str) -> str:
    value = column.get(f"{name}_ratio")
    return "-" if value is None else f"{value:.2f}"


def as_csv(runs: list[dict[str, Any]]) -> str:
    """One line for each run."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for run in runs for name in run))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(runs)
    return out.getvalue()


def pyplot() -> Any:
    """matplotlib's, drawing without a screen. Raises UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        hint = f"{sys.executable} -m pip install matplotlib, or leave --out away"
        raise UsageError("plots need matplotlib", hint) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plot

    return plot


def ready(folder: Path | None) -> None:
    """Before anything is measured: raises what write() would, for want of matplotlib or of a folder."""
    if folder is not None:
        pyplot()
        folder.mkdir(parents=True, exist_ok=True)


def figure(result: dict[str, Any]) -> Any:
    """Prefill and decode over the prompt's length, medians with their spread, as a matplotlib figure."""
    canvas, axes = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    programs = [("smoe", result["prompts"])] + [(peer["name"], peer["prompts"]) for peer in result.get("peers", [])]
    for axis, name in zip(axes, ("prefill_tok_s", "decode_tok_s"), strict=True):
        for label, columns in programs:
            x = [column["prompt_tokens"] for column in columns]
            y = [column[name] for column in columns]
            spread = [
                [column[name] - column[f"{name}_min"] for column in columns],
                [column[f"{name}_max"] - column[name] for column in columns],
            ]
            axis.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=label)
        axis.set(title=TITLES[name][0], xlabel="prompt, tokens", ylabel="tokens a second", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    canvas.suptitle(result["model"])
    return canvas


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """result.json, runs.csv, plot.png and a report.html that needs nothing else; the files written."""
    canvas = figure(result)
    folder.mkdir(parents=True, exist_ok=True)
    canvas.savefig(folder / "plot.png", dpi=120)
    contents = {
        "result.json": json.dumps(result, indent=1) + "\n",
        "runs.csv": as_csv(result["runs"]),
        "report.html": page(result, canvas),
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in (*contents, "plot.png")]


def page(result: dict[str, Any], canvas: Any) -> str:
    """An HTML page that needs nothing else: the plot as SVG, the table as text."""
    image = io.StringIO()
    canvas.savefig(image, format="svg")
    svg = image.getvalue()
    title, text = html.escape(result["model"]), html.escape("\n".join(table(result)))
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        "<body style='font:15px/1.5 system-ui;max-width:70em;margin:2em auto'>"
        f"{svg[svg.index('<svg') :]}<pre>{text}</pre>"
    )
