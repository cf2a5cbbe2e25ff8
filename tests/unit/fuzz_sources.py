"""Sources damaged in every way: convert answers with an error of its own or converts, at once and in little memory.

    python tests/unit/fuzz_sources.py FOLDER --seconds 300 [--seed N]

Text is changed as the values it says, files as bytes, counts and lengths become giants, parts are cut off, left out or
taken from elsewhere. A case is repeated by its format and seed, which a finding names.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints import write_tokenizer
from formats import FOLDERS, FORMATS, write

from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import SmoeError

CASE_S = 10
CONVERTED_BYTES = 32 << 20  # of what is small enough to be converted, too
MOST_GROWTH_BYTES = 512 << 20
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 2**70, 1.5, -0.0, 1e400, float("nan"), "", "x", "8", "BF16",
    "F8_E4M3", "U32", "I32", "F4", "mlx", "gptq", "awq", "affine", "mxfp4", [], [1], [-1], [2**40, 2**40], ["x"],
    [None], [[]], {}, {"a": 1}, {"bits": 4, "group_size": 64},
]  # fmt: skip
GIANTS = [0, 1, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def change_value(value: Any, rng: random.Random) -> Any:
    """One thing in it gone, odd, a neighbour's, or under another name."""
    value = copy.deepcopy(value)
    every = places(value)
    if not every:
        return rng.choice(ODD)
    path = rng.choice(every)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    how = rng.randrange(6)
    if how == 0:
        del holder[path[-1]]
    elif how == 1 and isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[path[-1]], holder[other] = holder[other], holder[path[-1]]
    elif how == 2 and isinstance(holder, dict):
        holder[f"{path[-1]}{rng.choice(['.weight', 'x', '_scale', '.scales', ''])}"] = holder.pop(path[-1])
    elif how == 3 and isinstance(holder[path[-1]], int):
        holder[path[-1]] += rng.choice([-1, 1, 8, -64, 1 << 20, 1 << 40])
    elif how == 4:
        for _ in range(rng.choice([3, 2000])):
            holder[path[-1]] = [holder[path[-1]]]
    else:
        holder[path[-1]] = rng.choice(ODD)
    return value


def dump(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 100_000


def change_bytes(data: bytes, head: int, rng: random.Random) -> bytes:
    """Of the first ``head`` bytes: some others, a giant number, a part left out or twice; or the file cut off."""
    if len(data) < 16:
        return data * 2 + b"{"
    changed, how = bytearray(data), rng.randrange(6)
    head = max(9, min(head, len(data)))
    if how == 0:
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(head)] = rng.randrange(256)
    elif how == 1:
        at = rng.randrange(head - 8)
        size, code = rng.choice([(8, "<Q"), (4, "<I")])
        changed[at : at + size] = struct.pack(code, rng.choice(GIANTS) % (1 << 8 * size))
    elif how == 2:
        del changed[rng.randrange(len(changed)) :]
    elif how in (3, 4):
        begin, end = sorted(rng.randrange(head) for _ in range(2))
        changed[begin:end] = changed[begin:end] * (2 if how == 3 else 0)
    else:
        changed[rng.randrange(head)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_json(data: bytes, rng: random.Random) -> bytes:
    try:
        return dump(change_value(json.loads(data), rng))
    except (ValueError, RecursionError):  # damaged before
        return change_bytes(data, 1 << 16, rng)


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4 or length > len(data):
        return change_bytes(data, 8 + length, rng)
    header = change_json(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def change_file(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if path.suffix == ".json":
        changed = change_json(data, rng) if rng.random() < 0.85 else change_bytes(data, 1 << 16, rng)
    elif path.suffix == ".safetensors":
        changed = change_safetensors(data, rng)
    else:
        changed = change_bytes(data, 1 << 14, rng)
    path.write_bytes(changed)


def with_settings(folder: Path) -> Path:
    """Adds what real folders have beside the weights."""
    write_tokenizer(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "temperature": 0.7}))
    return folder


class SlowError(Exception):
    """Not a TimeoutError, which is an OSError and so has an answer of its own."""


def too_long(number: int, frame: FrameType | None) -> None:
    raise SlowError(f"a case took more than {CASE_S} s of processor time")


def try_source(source: Path, out: Path) -> bool:
    """Whether it is taken; anything but an error of the tree goes through."""
    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, CASE_S)
    try:
        job = prepare(Options(source, out, name="m", jobs=1), Quiet())
        if job.output_bytes < CONVERTED_BYTES:
            convert(job, Quiet())
        return True
    except SmoeError as error:
        assert error.text and "Traceback" not in error.text
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Fuzzer:
    """Cases of one format in a folder of its own."""

    def __init__(self, form: str, folder: Path) -> None:
        self.form, self.folder = form, folder
        self.source = write(form, folder / "whole")
        if form in FOLDERS:
            with_settings(self.source)
        self.root = self.source if self.source.is_dir() else self.source.parent

    def run(self, seed: int) -> bool:
        rng = random.Random(f"{self.form} {seed}")
        broken = self.folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(self.root, broken)
        files = sorted(path for path in broken.iterdir() if path.is_file())
        for _ in range(rng.choice([1, 1, 1, 2])):
            path = rng.choice(files)
            if rng.random() < 0.03:
                path.unlink(missing_ok=True)
            elif path.exists():
                change_file(path, rng)
        source = broken if self.source.is_dir() else broken / self.source.name
        try:
            return try_source(source, self.folder / "out")
        except Exception as error:
            raise AssertionError(f"format {self.form}, seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(self.folder / "out", ignore_errors=True)


def fuzz(folder: Path, go_on: Callable[[int], bool], first: int = 0) -> tuple[int, int]:
    """(cases, taken), as long as ``go_on`` says so of the number of rounds; a round is a case of each format."""
    fuzzers = [Fuzzer(form, folder / form) for form in FORMATS]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    cases = taken = 0
    for number in itertools.count():
        if not go_on(number):
            break
        for fuzzer in fuzzers:
            taken += fuzzer.run(first + number)
            cases += 1
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - begin
    assert growth < MOST_GROWTH_BYTES, f"memory grew by {growth >> 20} MiB"
    return cases, taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    print(fuzz(arguments.folder, lambda _: time.monotonic() < end, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
