"""The cgroup helper of the measurements: finds either version, limits a child for real where the system lets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smoe_cli.bench import cgroup

HUNGRY = "x = bytearray({} << 20); print(len(x))"


def write_mounts(folder: Path, *kinds: str) -> Path:
    lines = []
    for kind in kinds:
        point = folder / kind
        point.mkdir()
        (point / "cgroup.controllers").write_text("cpu memory pids" if kind == "cgroup2" else "")
        lines.append(f"none {point} {kind.removesuffix('-cpu')} rw,{'cpu' if kind.endswith('-cpu') else 'memory'} 0 0")
    file = folder / "mounts"
    file.write_text("\n".join(["proc /proc proc rw 0 0", *lines]) + "\n")
    return file


def test_version_one_group_is_made_inside_the_own_group(tmp_path: Path) -> None:
    mounts = write_mounts(tmp_path, "cgroup")
    (tmp_path / "cgroup" / "job" / "x").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("5:cpu:/\n4:memory,other:/job/x\n0::/\n")
    assert cgroup.find_parent(mounts, own) == (1, tmp_path / "cgroup" / "job" / "x")


def test_version_two_group_is_made_at_the_root(tmp_path: Path) -> None:
    mounts = write_mounts(tmp_path, "cgroup2")
    own = tmp_path / "own"
    own.write_text("0::/user.slice\n")
    assert cgroup.find_parent(mounts, own) == (2, tmp_path / "cgroup2")


def test_without_a_memory_controller_the_reason_is_said(tmp_path: Path) -> None:
    mounts = write_mounts(tmp_path, "cgroup-cpu")
    own = tmp_path / "own"
    own.write_text("")
    with pytest.raises(cgroup.CgroupUnavailable, match="memory controller"):
        cgroup.find_parent(mounts, own)


def test_a_child_is_limited_and_its_peak_is_read() -> None:
    try:
        group = cgroup.MemoryCgroup(64 << 20)
        group.__enter__()
    except (cgroup.CgroupUnavailable, OSError) as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        small = subprocess.run(group.command([sys.executable, "-c", HUNGRY.format(20)]), capture_output=True, text=True)
        assert (small.returncode, small.stdout) == (0, f"{20 << 20}\n")
        assert 20 << 20 < group.peak_bytes() <= 64 << 20
        large = subprocess.run(group.command([sys.executable, "-c", HUNGRY.format(100)]), capture_output=True)
        assert large.returncode == -9
        group.set_limit(256 << 20)
        assert subprocess.run(group.command([sys.executable, "-c", HUNGRY.format(100)])).returncode == 0
        group.set_limit(32 << 20)
        assert subprocess.run(group.command([sys.executable, "-c", HUNGRY.format(60)])).returncode == -9
        assert group.oom_kills() in (0, 2)  # older version 1 kernels do not count them
    finally:
        group.__exit__(None, None, None)
    assert not group.path.exists()


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("1536M", 1536 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert cgroup.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "2T", "G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        cgroup.parse_size(text)
