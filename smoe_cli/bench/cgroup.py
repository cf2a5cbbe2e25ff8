"""A memory cgroup for one measurement: make it, run a child in it, read its peak, remove it.

Versions 1 and 2 are found by what is mounted. The page cache a child fills is charged to its group, so a limit makes a
small machine out of a large one. Needs the right to write to the cgroup tree (root, or a delegated subtree).

    python -m smoe_cli.bench.cgroup --limit 1536M -- command arg ...

As a library:

    with MemoryCgroup(limit_bytes=3 << 29) as group:
        subprocess.run(group.command(["program", "arg"]))
        print(group.peak_bytes())
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# version -> (limit, swap limit, peak); a group whose pages may go to swap would hide the limit it runs into
_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.swap.max", "memory.peak"),
}


class CgroupUnavailable(RuntimeError):
    """No memory cgroup can be made here; the text says why."""


def _own_group(version: int, proc: Path) -> str:
    """This process's path in the memory hierarchy of ``version``. Source: /proc/self/cgroup, see cgroups(7)."""
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (version == 1 and "memory" in controllers.split(",")) or (version == 2 and not controllers):
            return path
    return "/"


def _mounts(proc: Path) -> list[tuple[int, Path]]:
    """(version, mount point) of each hierarchy that may hold a memory controller, version 1 first."""
    found = []
    for line in proc.read_text().splitlines():
        _, point, kind, options = line.split(" ")[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            found.append((1, Path(point)))
        elif kind == "cgroup2":
            found.append((2, Path(point)))
    return sorted(found)


def find_parent(mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, Path]:
    """(version, folder) in which a memory group can be made. Raises CgroupUnavailable."""
    reasons = []
    for version, point in _mounts(mounts):
        if version == 2 and "memory" not in (point / "cgroup.controllers").read_text().split():
            reasons.append(f"{point}: version 2 without the memory controller")
            continue
        # In version 1 any group may have children; in version 2 only one that holds no processes itself: the root may.
        inside = point / _own_group(version, own).lstrip("/")
        for folder in (inside, point) if version == 1 else (point,):
            if folder.is_dir() and os.access(folder, os.W_OK):
                return version, folder
            reasons.append(f"{folder}: not writable")
    raise CgroupUnavailable("; ".join(reasons) or "no cgroup file system with a memory controller is mounted")


class MemoryCgroup:
    """A group limited to ``limit_bytes`` of memory, page cache included. Removed on exit, once its processes ended."""

    def __init__(self, limit_bytes: int, name: str = "smoe-bench") -> None:
        self.limit_bytes = limit_bytes
        self.version, parent = find_parent()
        self.path = parent / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        self._limit, self._swap, self._peak = _FILES[self.version]

    def __enter__(self) -> Self:
        if self.version == 2:
            control = self.path.parent / "cgroup.subtree_control"
            if "memory" not in control.read_text().split():
                control.write_text("+memory")
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(self.limit_bytes))
            if (self.path / self._swap).exists():
                (self.path / self._swap).write_text(str(self.limit_bytes) if self.version == 1 else "0")
        except OSError:
            self.path.rmdir()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(100):  # a group stays busy for a moment after its last process was reaped
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        raise CgroupUnavailable(f"{self.path} is still in use and was not removed")

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit from now on, above or below; the kernel first reclaims what is over it."""
        self.limit_bytes = limit_bytes
        swap = self.path / self._swap
        files = [self.path / self._limit, swap] if self.version == 1 and swap.exists() else [self.path / self._limit]
        if limit_bytes > int(files[0].read_text()):
            files.reverse()  # version 1 refuses a memory limit above the one for memory and swap together
        for file in files:
            file.write_text(str(limit_bytes))

    def command(self, argv: list[str]) -> list[str]:
        """``argv`` behind a shell that enters the group and becomes the command, so that every page counts."""
        return ["/bin/sh", "-c", f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"', "sh", *argv]

    def peak_bytes(self) -> int:
        """The most memory the group has held, page cache included; 0 where the kernel does not say."""
        file = self.path / self._peak
        return int(file.read_text()) if file.exists() else 0

    def oom_kills(self) -> int:
        """Processes of the group the kernel has killed for memory."""
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(match[1]) if match else 0


def parse_size(text: str) -> int:
    """Bytes of ``1536M``, ``2G``, ``4096``. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 1536M")
    return int(match[1]) * _UNITS[match[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command in a memory cgroup of its own.")
    parser.add_argument("--limit", type=parse_size, required=True, help="bytes, or with K, M, G (powers of 1024)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        parser.error("which command?")
    try:
        with MemoryCgroup(options.limit) as group:
            code = subprocess.run(group.command(argv)).returncode
            print(f"cgroup: peak {group.peak_bytes()} of {group.limit_bytes} bytes", file=sys.stderr)
    except (CgroupUnavailable, OSError) as error:
        print(f"error: no memory cgroup: {error}", file=sys.stderr)
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
