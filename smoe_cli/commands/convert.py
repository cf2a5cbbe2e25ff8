"""``smoe convert``: a checkpoint folder becomes a vault."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe_cli import console, settings
from smoe_cli.commands.options import Json
from smoe_cli.commands.progress import Meter
from smoe_cli.commands.verify import verify_or_fail
from smoe_cli.errors import UsageError
from smoe_cli.sizes import show

if TYPE_CHECKING:  # at run time these are imported by the command itself, so that its --help answers at once
    from smoe_cli.convert.calibrate import Importance
    from smoe_cli.convert.plan import Fallback
    from smoe_cli.convert.run import Job


FEW_TOKENS = 1000  # of a calibration text: some pages


class TerminalUi:
    """Notices, the planned output and a meter, on stderr."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def notice(self, text: str) -> None:
        console.say(f"note: {text}")

    def planned(self, job: Job) -> None:
        plan = job.plan
        console.say(f"{job.stem}: {plan.arch.family}, {len(plan.arch.layers)} layers, {len(plan.experts)} experts")
        console.say(
            f"  output {show(job.output_bytes)}: experts {show(plan.records_bytes)}, trunk {show(plan.trunk_bytes)}"
        )
        for line in _fallback_lines(plan.fallbacks):
            console.say(f"  {line}")

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.meter.update(done_bytes, total_bytes)


def _rates(result: dict[str, Any]) -> str:
    disk = result["disk_read_bytes_s"]
    beside = f" (its disk gave {disk / 1e6:.0f} MB/s while it was asked)" if disk else ""
    return f"{result['source_bytes_s'] / 1e6:.0f} MB/s of source{beside}"


def _fallback_lines(fallbacks: list[Fallback]) -> list[str]:
    """One line for all layers that share a tensor's name."""
    groups = Counter((re.sub(r"^layers\.\d+", "layers.*", f.name), _reason(f), f.used) for f in fallbacks)
    return [f"{name}: {reason}, stored as {used} ({count})" for (name, reason, used), count in groups.items()]


def _reason(fallback: Fallback) -> str:
    if fallback.reason == "packing":
        return f"{fallback.wanted} is not an encoding of the engine"
    return f"rows of {fallback.cols} do not divide for {fallback.wanted}"


class CalibrationUi:
    """For the vault that only reads the calibration text: a meter, no words."""

    def __init__(self, meter: Meter) -> None:
        self.progress = meter.update

    def notice(self, text: str) -> None: ...
    def planned(self, job: Job) -> None: ...


def _importance(job: Job, text: Path) -> Importance:
    """What matters in each matrix when the model reads the text: counted by a vault of 8-bit weights, made for it in
    the target folder and removed again. What can be refused is refused before that vault is made; interrupted or
    killed, it stays for the next run. Of a vault that is there already only the text's name is needed."""
    from smoe_cli.convert.calibrate import Importance, collect, name_of
    from smoe_cli.convert.run import Options, convert, prepare, require_target

    options = job.options
    require_target(job)
    ids = _ids(job, text)
    if job.vault.exists() and not options.fresh:
        return Importance({}, name_of(ids), len(ids))
    console.say("calibrating: an 8-bit vault first, then the text")
    meter = Meter("8-bit vault")
    made, folder = CalibrationUi(meter), options.out_dir / f".calibrate-{job.stem}"
    try:
        with meter:
            eight = prepare(Options(options.source, folder, "calibrate", "q8", (), options.jobs, options.fresh), made)
            try:
                convert(eight, made)
            except UsageError:  # what an earlier run left is of another source
                shutil.rmtree(folder)
                eight = prepare(eight.options, made)
                convert(eight, made)
        found = collect(eight.vault, ids, _reading(len(ids)))
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return found


def _ids(job: Job, text: Path) -> list[int]:
    """The text's own, after what can be refused of it and of the preset."""
    from smoe_cli.bench.ids import text_ids
    from smoe_cli.convert.encodings import SOURCE, is_plain
    from smoe_cli.convert.tokenizer import write_files

    quant = job.options.quant
    if (quant == SOURCE or is_plain(quant)) and not job.options.roles:
        kept = "keeps what is there" if quant == SOURCE else "quantises nothing"
        raise UsageError(
            f"--calibrate weighs what is quantised anew, and --quant {quant} {kept}", "give another --quant, such as q4"
        )
    with tempfile.TemporaryDirectory(prefix="smoe-tokenizer-") as folder:
        ids = text_ids(write_files(job.files, Path(folder), "text"), text).ids
    if len(ids) < FEW_TOKENS:
        console.say(f"note: {text} is {len(ids)} tokens long; less than {FEW_TOKENS} say little of most experts")
    return ids


def _reading(total: int) -> Callable[[int], None]:
    from smoe_cli.bench.quality import Progress

    return Progress(total, console.say, "calibrating").at


def _local(source: str, dry_run: bool) -> Path:
    """The path of what is to be converted, fetched first where it is named by its place on the hub."""
    from smoe_cli.convert import hub

    name = hub.parse(source)
    if name is None:
        return Path(source)
    if dry_run:
        raise UsageError(f"--dry-run writes nothing, and {source} would be fetched", "give a folder or a file")
    return hub.fetch(name, lambda text: console.say(f"note: {text}"))


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Checkpoint folder (safetensors), a .gguf, or hf:ORG/NAME to fetch from the hub."
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of vaults.")] = None,
    name: Annotated[
        str, typer.Option("--name", help="Id of the vault; SRC's name and the quantisation by default.")
    ] = "",
    quant: Annotated[
        str,
        typer.Option(
            "--quant",
            help="q2 q3 q4 q5 q6 q8 source, or one encoding for every matrix; q4, or source where SRC is quantised.",
        ),
    ] = "",
    role: Annotated[
        list[str] | None, typer.Option("--role", help="ROLE=ENCODING, may be repeated: experts attention ffn ...")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", help="UTF-8 text: columns count by what the model multiplies with them as it reads it."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Threads; every CPU by default.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and sizes only; nothing is written.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start over, or continue what was interrupted.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte when it is written.")] = False,
    as_json: Json = False,
) -> None:
    from smoe_cli.convert.run import Options, convert, prepare, report

    options = Options(_local(source, dry_run), out or settings.vault_dir(), name, quant, tuple(role or ()), jobs, fresh)
    meter = Meter("converting")
    ui = TerminalUi(meter)
    job = prepare(options, ui)
    if quant == "q2" and calibrate is None:
        ui.notice("2 bits without --calibrate TEXT ruin most models: KL 6.5 instead of 1.2 where it was measured")
    try:
        if dry_run:
            if calibrate is not None:
                _ids(job, calibrate)
            result = report(job)
        else:
            if calibrate is not None:
                job.options = replace(job.options, importance=_importance(job, calibrate))
            with meter:
                result = convert(job, ui)
    except KeyboardInterrupt:
        console.say("stopped; the same command continues from here, --fresh starts over")
        raise
    if verify and not dry_run:
        result["verified"] = verify_or_fail(job.vault)["ok"]
    if as_json:
        print(json.dumps(result))
    if "seconds" in result:
        for worst in result["worst_errors"]:
            console.say(f"  error {worst['error']:.2%}  {worst['tensor']}")
        console.say(f"{result['path']}: {result['seconds']:.1f} s, {_rates(result)}")
