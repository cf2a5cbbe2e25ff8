"""What a measurement must know of its machine: disk, memory bandwidth, read-ahead, load, and what a process read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DRAM_BYTES = 1 << 30


def disk_bytes_per_second(path: Path, record_bytes: int, total_bytes: int = 256 << 20, seed: int = 1) -> float:
    """Direct reads of whole records at random places of ``path``, one at a time. 0 where direct reads are refused."""
    size = record_bytes // 4096 * 4096
    places = os.path.getsize(path) // size
    rng = random.Random(seed)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    try:
        with mmap.mmap(-1, size) as buffer:
            count = max(1, total_bytes // size)
            start = time.perf_counter()
            for _ in range(count):
                os.preadv(descriptor, [buffer], rng.randrange(places) * size)
            return count * size / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def dram_bytes_per_second(threads: int) -> float:
    """The rate at which ``threads`` threads read memory: the C library's search for a byte that is not there."""
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memchr.restype = ctypes.c_void_p
    part = DRAM_BYTES // threads
    with mmap.mmap(-1, DRAM_BYTES) as buffer:
        with contextlib.suppress(AttributeError, OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * DRAM_BYTES).from_buffer(buffer)
        base = ctypes.addressof(view)
        ctypes.memset(base, 1, DRAM_BYTES)  # untouched pages would all be one zero page
        best = 0.0
        for _ in range(5):
            readers = [threading.Thread(target=libc.memchr, args=(base + i * part, 0, part)) for i in range(threads)]
            start = time.perf_counter()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            best = max(best, threads * part / (time.perf_counter() - start))
        del view
    return best


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
