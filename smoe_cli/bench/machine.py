"""What a measurement must know of its machine: disk, read-ahead, load, and what a process read."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HUGE_PAGE = 2 << 20


def disk_bytes_per_second(path: Path, record_bytes: int, reads: int = 400, depth: int = 4, seed: int = 1) -> float:
    """Direct reads of whole records at random places of ``path``, ``depth`` at a time. 0 where they are refused.

    Into huge pages, as the engine's slots are: a read into 4 KiB pages is cut into hundreds of segments, and on a
    virtual disk that alone cost two thirds of the speed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    buffers = threading.local()
    rng = random.Random(seed)
    last = (path.stat().st_size - record_bytes) // 4096

    def read(offset: int) -> int:
        if not hasattr(buffers, "mine"):
            buffers.mine = huge_pages(record_bytes)
        return os.preadv(descriptor, [buffers.mine], offset)

    try:
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(read, range(0, depth * record_bytes, record_bytes)))  # the buffers are there now
            start = time.perf_counter()
            total = sum(pool.map(read, [rng.randint(0, last) * 4096 for _ in range(reads)]))
            return total / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def huge_pages(size: int) -> memoryview:
    """Memory of ``size`` bytes of its own, in huge pages where the system has them."""
    whole = (size + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer[:] = bytes(whole)
    return memoryview(buffer)[:size]


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
