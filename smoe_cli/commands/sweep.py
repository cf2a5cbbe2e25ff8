"""``smoe sweep``: combinations of engine settings, measured in turn; which is best, and what it costs."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe_cli.commands.bench import make_work, with_window
from smoe_cli.commands.options import Json, VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError

if TYPE_CHECKING:
    from smoe_cli.bench.measure import Work
    from smoe_cli.bench.sweep import Arm
    from smoe_cli.registry import Vault

QUALITY_WINDOW = 512


class Goal(StrEnum):
    decode = "decode"
    prefill = "prefill"


@engine_flags
def command(
    model: Annotated[str | None, typer.Argument(help="A vault's id, or a path to a .smoe.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="key=v1,v2,...: settings to combine.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Times each arm runs; they take turns.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    gen: Annotated[int, typer.Option(min=1, help="Tokens decoded after it.")] = 64,
    text: Annotated[Path | None, typer.Option(help="A text to feed (default: a sample).")] = None,
    quality_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text for KL and perplexity.")] = 512,
    most_kl: Annotated[float, typer.Option(min=0, help="Largest KL, nats, of a recommended arm.")] = 0.01,
    goal: Annotated[Goal, typer.Option(help="What the comparison is about.")] = Goal.decode,
    save_profile: Annotated[bool, typer.Option("--save-profile", help="chat and serve then use it.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for sweep.json and pareto.png.")] = None,
    vault_dir: VaultDir = None,
    json_output: Json = False,
    engine: EngineFlags = EngineFlags(),
) -> None:
    from smoe_cli import console, registry
    from smoe_cli.bench import compare, report, sweep, sweep_report

    vault = registry.resolve(model, vault_dir)
    arms = sweep.parse_arms(arm or [], with_window(engine, vault, prompt_tokens + gen))
    if save_profile and any(one.engine or one.vault for one in arms):
        raise UsageError("a profile names no other engine and no other vault", "leave out --save-profile, or that arm")
    work = make_work(vault, [prompt_tokens], gen, rounds, text, random=False)
    if not json_output:
        work.say = console.say
    sweep.check(arms, work)
    report.ready(out)
    sweep.measure(arms, work)
    if any(one.changes_output for one in arms):
        _quality(vault, arms, work, quality_tokens)
    result = {"model": vault.id, "rounds": rounds, "text": work.ids.name} | compare.summary(arms, most_kl, goal)
    result["runs"] = {one.name: one.runs for one in arms}
    if out is not None:
        for path in sweep_report.write(result, out):
            console.say(f"wrote {path}")
    if save_profile:
        _save(vault, next(one for one in arms if one.name == result["recommended"]), str(result["recommendation"]))
    print(json.dumps(result) if json_output else "\n".join(sweep_report.table(result)))


def _quality(vault: Vault, arms: list[Arm], work: Work, tokens: int) -> None:
    """Perplexity of each arm, and its distance from the reference where its output differs."""
    from smoe_cli import _core
    from smoe_cli.bench import quality

    ids = work.ids.take(tokens, 0)
    window = min(QUALITY_WINDOW, int(vault.manifest["arch"]["max_positions"]))

    def engine(one: Arm) -> Any:
        return _core.Engine(str(one.vault or vault.path), **one.flags.options() | {"ctx": window})

    with tempfile.TemporaryDirectory(prefix="smoe-sweep-") as folder:
        progress = quality.Progress(len(ids), work.say, f"{arms[0].name} (reference)")
        reference = quality.Recording.record(Path(folder), engine(arms[0]), ids, window, progress)
        for one in [arms[0], *(one for one in arms if one.changes_output)]:
            one.quality = quality.compare(engine(one), reference, quality.Progress(len(ids), work.say, one.name))
    arms[0].quality |= {"kl_mean": 0.0, "kl_p99": 0.0}  # what is left is the recording's rounding


def _save(vault: Vault, best: Arm, because: str) -> None:
    from smoe_cli import console, profile
    from smoe_cli.errors import ResourceError

    flags = profile.flags_of(best.flags)
    try:
        console.say(f"wrote {profile.save(vault.path, flags, because)}")
    except OSError as error:
        raise ResourceError(f"the profile cannot be written: {error}", "check the vault's folder") from None
