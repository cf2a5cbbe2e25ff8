"""What a measurement must know of its machine: disk, read-ahead, load, and what a process read."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def disk_bytes_per_second(path: Path, record_bytes: int, offsets: Sequence[int], depth: int = 4) -> float:
    """Direct reads of the records at ``offsets`` in their order, ``depth`` at a time. 0 where direct reads are refused.

    The order matters: a virtual disk's host may hold what was read a moment ago, so records that come again and again,
    as a cache misses them, arrive faster than those of a walk over the whole file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    buffers = threading.local()

    def read(offset: int) -> int:
        if not hasattr(buffers, "mine"):
            buffers.mine = mmap.mmap(-1, record_bytes)
        return os.preadv(descriptor, [buffers.mine], offset)

    try:
        with ThreadPoolExecutor(depth) as pool:
            start = time.perf_counter()
            total = sum(pool.map(read, offsets))
            return total / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def drop_caches() -> None:
    """Forget every clean page of the page cache. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def block_queue(path: Path) -> Path | None:
    """/sys/.../queue of the block device that holds ``path``; None where there is none (overlays, network)."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for candidate in (folder, folder.parent):  # a partition's queue is its disk's
        if (candidate / "queue" / "read_ahead_kb").is_file():
            return candidate / "queue"
    return None


def read_ahead_kib(path: Path) -> int | None:
    queue = block_queue(path)
    return int((queue / "read_ahead_kb").read_text()) if queue else None


@contextlib.contextmanager
def read_ahead(path: Path, kib: int) -> Iterator[None]:
    """Sets the device's read-ahead for files opened meanwhile, and puts back what was there. Needs root."""
    queue = block_queue(path)
    if queue is None:
        raise OSError(f"{path} is on no block device whose read-ahead can be set")
    file = queue / "read_ahead_kb"
    before = file.read_text()
    file.write_text(str(kib))
    try:
        yield
    finally:
        file.write_text(before)


def io_read_bytes(pid: int) -> int:
    """Bytes process ``pid`` has caused to be read from storage. Source: /proc/PID/io, see proc(5)."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def load_average() -> float:
    return os.getloadavg()[0]


def describe() -> dict[str, str | int]:
    """The machine in words: CPU, cores, memory, kernel."""
    info: dict[str, str | int] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().partition("-")[0],
    }
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            info["cpu"] = value.strip()
        elif name.strip() == "flags":
            flags = set(value.split())
            info["isa"] = " ".join(f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16") if f in flags)
    return info


def commit() -> str:
    """The commit under test, with a mark if the tree differs from it."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"
