"""A conversion from a checkpoint folder to a finished vault, step by step. Talks through ``Ui`` only."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli import __version__, _core, registry, settings
from smoe_cli.convert import tokenizer as tok
from smoe_cli.convert.calibrate import Importance
from smoe_cli.convert.checkpoint import Checkpoint
from smoe_cli.convert.encodings import SOURCE, choose_roles, default_quant
from smoe_cli.convert.manifest import build_manifest
from smoe_cli.convert.plan import Plan, make_plan
from smoe_cli.convert.safetensors import FileReader
from smoe_cli.convert.sources import locate, model_name, open_source
from smoe_cli.convert.ui import Ui
from smoe_cli.convert.write import VaultWrite, discard
from smoe_cli.errors import ResourceError, SmoeError, UsageError
from smoe_cli.families.arch import arch_json
from smoe_cli.sizes import show

RATE_LEAST_BYTES = 256 << 20  # of large reads that say something of the disk
HEADROOM_BYTES = 16 << 20  # manifest, tables, tokenizer files
TEMPLATES = settings.chat_templates()


@dataclass(frozen=True)
class Options:
    source: Path
    out_dir: Path
    name: str = ""
    quant: str = ""  # default_quant's
    roles: tuple[str, ...] = ()
    jobs: int = 0  # 0 = every CPU this process may use
    fresh: bool = False
    importance: Importance | None = None  # weighs the fits


@dataclass
class Job:
    """A conversion that has been checked and could start."""

    options: Options
    checkpoint: Checkpoint
    plan: Plan
    files: tok.TokenizerFiles
    stem: str
    fingerprint: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def vault(self) -> Path:
        return self.options.out_dir / f"{self.stem}.smoe"

    @property
    def output_bytes(self) -> int:
        return self.plan.trunk_bytes + self.plan.records_bytes


class Count:
    """A sum that several threads add to; ``tell`` hears each new value, one caller at a time."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.value = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        with self._lock:
            self.value += more
            self._tell(self.value)


@contextmanager
def file_errors(hint: str = "the same command continues when this is put right") -> Iterator[None]:
    """What the operating system refuses, as members of the error tree: a full disk is one of resources."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{where}no room left on the disk", hint) from error
        raise SmoeError(f"{where}{error.strerror or error}", hint) from error


@file_errors()
def prepare(options: Options, ui: Ui) -> Job:
    """Open, match, plan: everything that can be refused without writing is refused here."""
    options = replace(options, source=locate(options.source))
    checkpoint = open_source(options.source)
    options = replace(options, quant=options.quant or default_quant(checkpoint.tensors.values()))
    roles = choose_roles(options.quant, options.roles, dense=checkpoint.family.experts is None)
    plan = make_plan(checkpoint, options.quant, roles)
    template = checkpoint.family.chat_template
    default = TEMPLATES / template if template and (TEMPLATES / template).is_file() else None
    files = tok.collect(options.source, checkpoint.config, default, checkpoint.texts)
    tok.check(files, plan.arch.vocab, lambda ids: _embedding_rows(checkpoint, plan, ids))
    job = Job(options, checkpoint, plan, files, _stem(options))
    ui.planned(job)
    for notice in (*plan.notices, *files.notices):
        ui.notice(notice)
    return job


def _embedding_rows(checkpoint: Checkpoint, plan: Plan, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of the embedding, [ids, hidden]."""
    source = plan.tensors[0].source
    return np.concatenate([source.read(checkpoint.reader, int(token), int(token) + 1) for token in ids])


def _stem(options: Options) -> str:
    """A folder may be called anything, and what an id cannot have becomes "-"; of --name only the file's ending."""
    called = model_name(options.source)
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", called).strip("-._+")
    if stem and not (options.source.is_file() and options.quant == SOURCE):
        stem = f"{stem}-{options.quant}"
    stem = options.name.removesuffix(registry.SUFFIX) or stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", stem):
        allowed = "at most 128 ASCII letters, digits, and . _ + -, a letter or digit first"
        raise UsageError(f"{options.name or called!r} cannot name a vault", f"pass --name with {allowed}")
    return stem


@file_errors()
def convert(job: Job, ui: Ui) -> dict[str, Any]:
    """Write the vault of a prepared job; the report. Interrupted at any moment, the same call continues."""
    try:
        return _convert(job, ui)
    finally:
        job.checkpoint.reader.close()


def _convert(job: Job, ui: Ui) -> dict[str, Any]:
    options, checkpoint = job.options, job.checkpoint
    start = time.monotonic()
    require_target(job)
    fingerprint, stamp = checkpoint.fingerprint(), checkpoint.stamp()
    source = {"fingerprint": fingerprint, "kind": checkpoint.kind, "bytes": checkpoint.source_bytes, "stamp": stamp}
    source |= checkpoint.facts
    if options.fresh:
        discard(options.out_dir, job.stem)
    elif job.vault.exists():
        _require_same(job, source)
        ui.notice(f"{job.vault} is up to date")
        return report(job) | {"unchanged": True}
    begun_as = _job_fingerprint(job, source)
    with VaultWrite(
        job.plan, checkpoint.reader, options.out_dir, job.stem, begun_as, _jobs(options), options.importance
    ) as write:
        result = _write(job, write, source, ui)
    seconds = time.monotonic() - start
    rates = {
        "seconds": round(seconds, 3),
        "source_bytes_s": round(result.pop("read_bytes") / seconds),
        "disk_read_bytes_s": _disk_read_bytes_s(checkpoint.reader),
    }
    return report(job) | {"unchanged": False} | result | rates


def _write(job: Job, write: VaultWrite, source: dict[str, Any], ui: Ui) -> dict[str, Any]:
    """Encode and write what is not there yet, and finish: from then on the vault exists."""
    if write.resumed:
        tensors, records = len(write.done_tensors), len(write.done_records)
        ui.notice(f"continuing: {tensors} tensors and {records} experts are written already")
    total = write.todo_bytes()
    done = Count(lambda count: ui.progress(count, total))
    errors = write.run(done.add)
    tok.write_files(job.files, job.options.out_dir, job.stem)
    crcs = {tensor.name: int(write.writer.tensor_crc(tensor.name)) for tensor in job.plan.tensors}
    scout, config = dict(write.writer.scout_info()), job.checkpoint.config
    manifest = build_manifest(job.plan, job.stem, source, job.files, scout, crcs, errors, config)
    write.finish(manifest | _calibration(job.options))
    worst = [{"tensor": name, "error": error} for name, error in errors.worst()]
    return {"resumed": write.resumed, "read_bytes": done.value, "worst_errors": worst}


def _calibration(options: Options) -> dict[str, Any]:
    """What the manifest says of the text that weighed the fits."""
    if options.importance is None:
        return {}
    return {"calibration": {"ids": options.importance.name, "tokens": options.importance.tokens}}


def report(job: Job) -> dict[str, Any]:
    """What is known before writing: the ``--dry-run`` answer."""
    plan = job.plan
    return {
        "id": job.stem,
        "path": str(job.vault),
        "family": plan.arch.family,
        "model_type": plan.arch.model_type,
        "quant": plan.quant,
        "source_bytes": job.checkpoint.source_bytes,
        "trunk_bytes": plan.trunk_bytes,
        "records_bytes": plan.records_bytes,
        "output_bytes": job.output_bytes,
        "tensors": len(plan.tensors),
        "experts": len(plan.experts),
        "fallbacks": [vars(fallback) for fallback in plan.fallbacks],
        "notices": [*plan.notices, *job.files.notices],
    }


def _jobs(options: Options) -> int:
    if options.jobs < 0:
        raise UsageError(f"--jobs {options.jobs} is not a number of threads")
    return options.jobs or _core.usable_threads()


def _disk_read_bytes_s(reader: FileReader) -> int | None:
    """What the source's disk gave while it was asked, to set beside the conversion's rate; None for a small source."""
    return round(reader.large_bytes / reader.reading_s) if reader.large_bytes >= RATE_LEAST_BYTES else None


def _job_fingerprint(job: Job, source: dict[str, Any]) -> str:
    """Source, converter and options, readable: part files made from anything else are refused with both shown."""
    digest = hashlib.sha256(json.dumps([source, __version__], sort_keys=True).encode()).hexdigest()
    calibrated = [f"calibrated:{job.options.importance.name}"] if job.options.importance else []
    return " ".join([digest[:16], "with", job.options.quant, *job.options.roles, *calibrated])


def _require_same(job: Job, source: dict[str, Any]) -> None:
    """A finished vault under this name is left alone if it is this very conversion; anything else is for the caller."""
    there = registry.open_vault(job.vault)
    hint = "--fresh replaces it, --name makes another"
    if there.error is not None:
        raise UsageError(f"{job.vault} exists and cannot be used: {there.error.text}", hint)
    stated = there.manifest["source"]
    if stated["fingerprint"] != source["fingerprint"] or stated.get("stamp") != source["stamp"]:
        raise UsageError(f"{job.vault} exists, made from other files than {job.options.source} now holds", hint)
    encodings = {name: entry["encoding"] for name, entry in there.manifest["tensors"].items()}
    same = encodings == {tensor.name: tensor.encoding for tensor in job.plan.tensors}
    if there.manifest["tokenizer"] != tok.manifest_entry(job.files):
        raise UsageError(f"{job.vault} exists, made with another tokenizer or template", hint)
    if there.manifest.get("calibration") != _calibration(job.options).get("calibration"):
        raise UsageError(f"{job.vault} exists, calibrated with another text, or without one", hint)
    if not same or there.manifest["arch"] != arch_json(job.plan.arch, job.plan.encodings()):
        raise UsageError(f"{job.vault} exists, made with other encodings", hint)


def require_target(job: Job) -> None:
    """The target folder exists, takes files, and has room unless the vault is there already."""
    folder = job.options.out_dir
    probe = folder / f".{job.stem}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SmoeError(
            f"{folder} cannot be written to: {error.strerror}", "choose another folder with --out"
        ) from error
    if job.options.fresh or not job.vault.exists():
        _require_room(job)


def _require_room(job: Job) -> None:
    """Room for what is not there yet: the writer reserves its part files, and what they hold is not asked for twice."""
    parts = [job.vault.with_name(job.vault.name + ".part")]
    parts.append(job.vault.with_name(f"{job.stem}{registry.SCOUT_SUFFIX}.part"))
    held = sum(part.stat().st_blocks * 512 for part in parts if part.exists())
    needed = max(job.output_bytes - held, 0) + HEADROOM_BYTES
    free = shutil.disk_usage(job.options.out_dir).free
    if free < needed:
        raise ResourceError(
            f"{job.options.out_dir} has {show(free)} free, the vault needs {show(needed)}",
            "free some space, choose another folder with --out, or a smaller --quant",
        )
