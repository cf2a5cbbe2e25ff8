#!/usr/bin/env python3
"""How fast a checkpoint converts, beside what the disk and the quantiser alone give in the same run.

    scripts/bench_convert.py FOLDER --layers 48 [--quant q4] [--jobs N] [--json]     61 GB of bf16, 23 GB of disk
    scripts/bench_convert.py FOLDER --layers 4 --kill                                 killed in the middle, continued

The checkpoint has the geometry of Qwen3-30B-A3B, one shard a layer and one for the rest. A shard is a header and a hole
until the conversion comes near it: then the converter is stopped (SIGSTOP, which is taken off its time), the shard's
data are written past the page cache, and shards that were read become holes again. So what is read is read from the
disk, and the disk holds a few shards at a time. With --kill all shards are written first and stay.

Floors: the source at the rate of plain sequential reads (buffered, cold), the target at that of plain sequential writes
with a flush, and the source at the rate at which --jobs threads encode from memory. The ratio is the slowest floor of
the first two over the time. A disk that has one queue for reads and writes does both in the time that they take
together, and copy is that: nothing but reads and writes, directly, in the proportion of source and target. bound is the
slowest of all floors over the time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from make_bench_model import HIDDEN, WIDTH, Shapes, config, layer_shapes, shards

from smoe_cli import _core

ALIGNMENT, PIECE = 4096, 16 << 20
AHEAD = 1  # shards that are filled before the one that is read
KEEP_FREE = 4 * 10**9  # of the disk, whatever is filled
PUNCH_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Shard:
    """A safetensors file whose data begin at a multiple of ALIGNMENT."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        entries, end = {}, 0
        for name, shape in shapes.items():
            size = 2 * int(np.prod(shape))
            entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        header = json.dumps(entries).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        self.path, self.start, self.nbytes = path, 8 + len(header), end
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(self.start + end)

    def fill(self, pattern: mmap.mmap) -> None:
        if shutil.disk_usage(self.path).free < KEEP_FREE + self.nbytes:
            raise SystemExit(f"{self.path}: less than {KEEP_FREE // 10**9} GB would stay free")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_DIRECT)
        for offset in range(0, self.nbytes // ALIGNMENT * ALIGNMENT, PIECE):
            count = min(PIECE, self.nbytes // ALIGNMENT * ALIGNMENT - offset)
            os.pwrite(descriptor, memoryview(pattern)[:count], self.start + offset)
        os.fsync(descriptor)
        os.close(descriptor)
        with self.path.open("r+b") as file:  # what is left of a page
            rest = self.nbytes % ALIGNMENT
            os.pwrite(file.fileno(), pattern[:rest], self.start + self.nbytes - rest)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def empty(self) -> None:
        with self.path.open("r+b") as file:
            size = ctypes.c_long(self.nbytes)
            if _libc.fallocate(file.fileno(), PUNCH_KEEP_SIZE, ctypes.c_long(self.start), size) != 0:
                raise OSError(ctypes.get_errno(), "no holes in files", str(self.path))


def make_pattern() -> mmap.mmap:
    """PIECE bytes of normal bf16 numbers, aligned."""
    values = (np.random.default_rng(0).standard_normal(PIECE // 2) * 0.02).astype(np.float32)
    pattern = mmap.mmap(-1, PIECE)
    pattern.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return pattern


def make_checkpoint(folder: Path, layers: int) -> list[Shard]:
    """The rest first: a conversion reads the trunk before the experts."""
    folder.mkdir(parents=True)
    experts = [{n: s for n, s in layer_shapes(i).items() if ".experts." in n} for i in range(layers)]
    rest: Shapes = {}
    for shapes in shards(layers):
        rest |= {name: shape for name, shape in shapes.items() if ".experts." not in name}
    parts = [rest, *experts]
    found: list[Shard] = []
    where: dict[str, str] = {}
    for index, shapes in enumerate(parts):
        name = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
        found.append(Shard(folder / name, shapes))
        where |= dict.fromkeys(shapes, name)
    (folder / "config.json").write_text(json.dumps(config(layers)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return found


class Conversion:
    """A ``smoe convert`` in a process of its own, watched: its time without stops, its peak memory, its reads."""

    def __init__(self, source: Path, out: Path, quant: str, jobs: int) -> None:
        command = [sys.executable, "-m", "smoe_cli", "convert", str(source), "--out", str(out), "--name", "m"]
        command += ["--quant", quant, "--jobs", str(jobs), "--json"]
        self.stopped_s, self.peak_bytes = 0.0, 0
        self.start = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def running(self) -> bool:
        return self.process.poll() is None

    def _of(self, file: str, key: str) -> int:
        try:
            text = Path(f"/proc/{self.process.pid}/{file}").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)

    def look(self) -> int:
        """Bytes read so far."""
        self.peak_bytes = max(self.peak_bytes, self._of("status", "VmHWM:") << 10)
        return self._of("io", "rchar:")

    def pause(self, work: Callable[[], None]) -> None:
        begin = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        try:
            work()
        except BaseException:
            self.process.kill()  # stopped, it would hold its files for ever
            raise
        self.process.send_signal(signal.SIGCONT)
        self.stopped_s += time.monotonic() - begin

    def finish(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        if self.process.wait() != 0:
            raise SystemExit(f"convert failed with {self.process.returncode}")
        seconds = time.monotonic() - self.start - self.stopped_s
        return {"seconds": seconds, "peak_bytes": self.peak_bytes, "report": json.loads(text)}


def convert_streamed(parts: list[Shard], out: Path, quant: str, jobs: int, pattern: mmap.mmap) -> dict[str, Any]:
    """Shards are filled just ahead of the reading and emptied behind it."""
    ends = np.cumsum([part.nbytes for part in parts])
    filled = emptied = 0
    for part in parts[: AHEAD + 1]:
        part.fill(pattern)
        filled += 1
    run = Conversion(parts[0].path.parent, out, quant, jobs)
    while run.running():
        reading = int(np.searchsorted(ends, run.look()))  # the shard, or one too far: other files are read too

        def work(first: int = filled, reading: int = reading) -> None:
            for part in parts[first : reading + AHEAD + 1]:
                part.fill(pattern)

        if reading + AHEAD >= filled and filled < len(parts):
            run.pause(work)
            filled = min(len(parts), reading + AHEAD + 1)
        for part in parts[emptied : max(emptied, reading - 1)]:
            part.empty()
            emptied += 1
        time.sleep(0.02)
    found = run.finish()
    errors = [error["error"] for error in found["report"]["worst_errors"]]
    if not errors or min(errors) == 0:
        raise SystemExit("a hole was converted: the filling came too late")
    return found


def rate(seconds: float, nbytes: int) -> float:
    return nbytes / seconds


def read_through(descriptor: int, step: int) -> int:
    """Reads a file to its end, ``step`` bytes at once; how many there were."""
    buffer = mmap.mmap(-1, step)
    done = 0
    while count := os.preadv(descriptor, [buffer], done):
        done += count
        if count % ALIGNMENT:
            break
    return done


def sequential_read(part: Shard) -> dict[str, float]:
    """Bytes a second of a cold file: buffered in pieces of 8 MiB, and direct in PIECEs."""
    found = {}
    for name, flags, step in (("buffered", 0, 8 << 20), ("direct", os.O_DIRECT, PIECE)):
        descriptor = os.open(part.path, os.O_RDONLY | flags)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.monotonic()
        done = read_through(descriptor, step)
        found[name] = rate(time.monotonic() - begin, done)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return found


def sequential_write(folder: Path, pattern: mmap.mmap, nbytes: int = 1 << 30) -> float:
    path = folder / "write.probe"
    with path.open("wb", buffering=0) as file:
        begin = time.monotonic()
        for _ in range(nbytes // PIECE):
            file.write(pattern)
        os.fsync(file.fileno())
        seconds = time.monotonic() - begin
    path.unlink()
    return rate(seconds, nbytes)


def copy_rate(parts: list[Shard], folder: Path, pattern: mmap.mmap, share: float) -> float:
    """Bytes a second read directly, a thread a file, while ``share`` as many are written directly beside it, and
    flushed: a conversion without its encoder."""
    nbytes = sum(part.nbytes for part in parts)
    path = folder / "copy.probe"

    def read(part: Shard) -> None:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_DIRECT)
        read_through(descriptor, PIECE)
        os.close(descriptor)

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for at in range(int(share * nbytes) // PIECE):
            os.pwrite(descriptor, pattern, PIECE * at)
        os.fsync(descriptor)
        os.close(descriptor)

    threads = [threading.Thread(target=read, args=(part,)) for part in parts] + [threading.Thread(target=write)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    path.unlink()
    return rate(seconds, nbytes)


def encoder_rate(encoding: str, jobs: int, seconds: float = 3.0) -> float:
    """Source bytes a second of ``jobs`` threads that encode one expert's matrix from memory."""
    rng = np.random.default_rng(0)
    raw = ((rng.standard_normal((WIDTH, HIDDEN)) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    size = int(_core.stored_bytes(encoding, "panel16", WIDTH, HIDDEN))
    done = [0] * jobs
    end = time.monotonic() + seconds

    def work(index: int) -> None:
        out = np.empty(size, np.uint8)
        while time.monotonic() < end:
            _core.store("bf16", raw, WIDTH, HIDDEN, encoding, "panel16", out, 0)
            done[index] += raw.nbytes

    threads = [threading.Thread(target=work, args=(index,)) for index in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rate(seconds, sum(done))


def digests(out: Path) -> dict[str, str]:
    found = {}
    for path in sorted(out.glob("m*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def kill_and_continue(source: Path, out: Path, quant: str, jobs: int, whole_s: float) -> dict[str, Any]:
    """Killed at a third and at two thirds of the time; the bytes are those of the conversion that was left alone."""
    want = digests(out)
    shutil.rmtree(out)
    for _ in range(2):
        run = Conversion(source, out, quant, jobs)
        time.sleep(whole_s / 3)
        run.process.kill()
        run.process.wait()
        if (out / "m.smoe").exists():
            raise SystemExit("nothing was killed: the checkpoint is too small")
    found = Conversion(source, out, quant, jobs).finish()
    return {"same": digests(out) == want, "resumed": found["report"]["resumed"], "files": len(want)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder, pattern = Path(arguments.folder), make_pattern()
    source, out = folder / "source", folder / "out"
    parts = make_checkpoint(source, arguments.layers)
    nbytes = sum(part.nbytes for part in parts)
    if arguments.kill:
        for part in parts:
            part.fill(pattern)
        run = Conversion(source, out, arguments.quant, arguments.jobs)
        while run.running():
            run.look()
            time.sleep(0.05)
        found = run.finish()
        killed = kill_and_continue(source, out, arguments.quant, arguments.jobs, found["seconds"])
    else:
        found = convert_streamed(parts, out, arguments.quant, arguments.jobs, pattern)
        killed = None
    for part in parts[-2:]:
        part.fill(pattern)
    reads, write = sequential_read(parts[-1]), sequential_write(folder, pattern)
    encoder = encoder_rate(arguments.encoder, arguments.jobs)
    target = found["report"]["output_bytes"]
    copy = copy_rate(parts[-2:], folder, pattern, target / nbytes)
    floors = {
        "read_s": nbytes / reads["buffered"],
        "read_direct_s": nbytes / reads["direct"],
        "write_s": target / write,
        "copy_s": nbytes / copy,
        "encode_s": nbytes / encoder,
    }
    seconds = found["seconds"]
    return {
        "source_bytes": nbytes,
        "target_bytes": target,
        "jobs": arguments.jobs,
        "seconds": seconds,
        "peak_bytes": found["peak_bytes"],
        "source_bytes_s": nbytes / seconds,
        "read_bytes_s": reads["buffered"],
        "read_direct_bytes_s": reads["direct"],
        "write_bytes_s": write,
        "copy_bytes_s": copy,
        "encoder_bytes_s": encoder,
        **floors,
        "of_copy": floors["copy_s"] / seconds,
        "of_disk": max(floors["read_s"], floors["write_s"]) / seconds,
        "of_direct_disk": max(floors["read_direct_s"], floors["write_s"]) / seconds,
        "of_bound": max(floors.values()) / seconds,
        "killed": killed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="made, and removed at the end")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--encoder", default="q4_k", help="what the encoder alone is measured with")
    parser.add_argument("--jobs", type=int, default=int(_core.usable_threads()))
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if Path(arguments.folder).exists():
        parser.error(f"{arguments.folder} is there already")
    try:
        found = measure(arguments)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:20} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
