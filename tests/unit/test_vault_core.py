"""The vault writer: resumed after a kill at any moment, atomic, refusing what does not fit; inspect and verify."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from tiny_vault import TOKENIZER, TinyVault

from smoe_cli import _core
from smoe_cli.convert.write import zeros


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def core_error(code: str, call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(_core.CoreError) as caught:
        call(*args)
    assert caught.value.code == code, caught.value
    return str(caught.value) + " " + caught.value.hint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    TinyVault().make(folder)
    return contents(folder)


def convert(folder: Path, pause: float = 0) -> None:
    """What a conversion does: take over what is there, write the rest, finish."""
    tiny = TinyVault()
    writer = tiny.open(folder)
    tiny.fill(writer, pause)
    tiny.finish(writer, folder)


def start_child(folder: Path, pause: float = 0) -> int:
    """A conversion in a forked process; its id."""
    child = os.fork()
    if child == 0:
        try:
            convert(folder, pause)
        finally:
            os._exit(0)
    return child


def kill_child(child: int) -> bool:
    """Kill it; False if it had already ended."""
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_names_and_contents(tmp_path: Path, whole: dict[str, bytes]) -> None:
    tokenizer = {f"tiny.tokenizer/{name}" for name in TOKENIZER}
    assert set(whole) == {"tiny.smoe", "tiny.scout.safetensors"} | tokenizer
    tiny = TinyVault()
    for (layer, expert), data in tiny.records.items():
        offset = 16384 + sum(n * size for _, n, size in tiny.layers[:layer]) + expert * tiny.layers[layer][2]
        assert whole["tiny.smoe"][offset : offset + len(data)] == data
    scout_file = tmp_path / "scout"
    scout_file.write_bytes(whole["tiny.scout.safetensors"])
    with safetensors.safe_open(scout_file, "np") as scout:
        for name, dtype, shape, _ in tiny.trunk:
            if dtype != "BF16":  # NumPy has none
                assert scout.get_tensor(name).tobytes() == tiny.tensors[name]
            assert scout.get_slice(name).get_shape() == shape


def test_inspect(tmp_path: Path) -> None:
    path = TinyVault().make(tmp_path)
    info = _core.inspect(str(path))
    assert info["records"] == 8
    assert info["record_bytes"] == [size for _, _, size in TinyVault().layers]
    assert info["file_bytes"] == path.stat().st_size
    assert info["total_bytes"] == path.stat().st_size + (tmp_path / "tiny.scout.safetensors").stat().st_size
    assert '"id": "tiny"' in info["manifest"]
    elsewhere = (tmp_path / "tiny.scout.safetensors").rename(tmp_path / "other")
    assert "missing" in core_error("corrupt", _core.inspect, str(path))
    assert _core.inspect(str(path), str(elsewhere))["scout_path"] == str(elsewhere)
    assert "no such vault" in core_error("usage", _core.inspect, str(tmp_path / "none.smoe"))


def test_verify_reports_progress_and_stops(tmp_path: Path) -> None:
    path = TinyVault().make(tmp_path)
    seen: list[tuple[int, int]] = []
    report = _core.verify(str(path), lambda done, total: seen.append((done, total)))
    everything = sum(len(data) for data in contents(tmp_path).values())
    assert report == {"ok": True, "checked_bytes": everything, "errors": []}
    assert seen[-1] == (everything, everything)
    assert not _core.verify(str(path), lambda done, total: False)["ok"]

    def broken(done: int, total: int) -> bool:
        raise ValueError("from the callback")

    with pytest.raises(ValueError, match="from the callback"):
        _core.verify(str(path), broken)


def kill_at_random(folder: Path, whole: dict[str, bytes], trials: int, seed: int) -> None:
    """Kill a conversion somewhere between its first and last moment, now and then the resumed one too, finish, compare.
    A trial counts once a kill has landed: the window the moment is drawn from shrinks when a conversion was faster than
    the kill and grows when it was not, so it settles at the length of a conversion on any machine, however loaded."""
    rng = random.Random(seed)
    window, landed = 0.05, 0
    for trial in range(trials * 20):
        here, hit = folder / str(trial), False
        for _ in range(rng.choice([1, 1, 2, 4])):
            child = start_child(here)
            time.sleep(rng.uniform(0, window))
            killed = kill_child(child)
            window *= 1.1 if killed else 0.8
            hit |= killed
            if (here / "tiny.smoe").exists():
                assert _core.verify(str(here / "tiny.smoe"))["ok"]
        convert(here)
        assert contents(here) == whole
        shutil.rmtree(here)
        landed += hit
        if landed == trials:
            return
    raise AssertionError(f"only {landed} conversions were still running when they were killed")


def test_killed_at_random_and_resumed_is_the_same_vault(tmp_path: Path, whole: dict[str, bytes]) -> None:
    kill_at_random(tmp_path, whole, trials=15, seed=1)


@pytest.mark.slow
def test_killed_at_random_many_times(tmp_path: Path, whole: dict[str, bytes]) -> None:
    kill_at_random(tmp_path, whole, trials=500, seed=2)


def test_resume_skips_what_is_done_and_only_that(tmp_path: Path) -> None:
    tiny = TinyVault()
    writer = tiny.open(tmp_path)
    writer.write_record(1, 3, tiny.records[1, 3])
    writer.write_record(0, 0, tiny.records[0, 0])
    writer.write_tensor("embed.weight", tiny.tensors["embed.weight"])
    writer.abort()
    writer = tiny.open(tmp_path)
    assert writer.done_records() == [(0, 0), (1, 3)]
    assert writer.done_tensors() == ["embed.weight"]
    assert writer.tensor_crc("embed.weight") == _core.crc32c(tiny.tensors["embed.weight"])
    writer.abort()
    with (tmp_path / "tiny.smoe.part").open("r+b") as part:  # one byte of record (0, 0) is lost
        part.seek(16384 + 100)
        byte = part.read(1)[0]
        part.seek(16384 + 100)
        part.write(bytes([byte ^ 1]))
    writer = tiny.open(tmp_path)
    assert writer.done_records() == [(1, 3)]
    writer.abort()
    assert tiny.open(tmp_path, resume=False).done_records() == []


def test_a_part_file_damaged_outside_its_items_is_made_right(tmp_path: Path, whole: dict[str, bytes]) -> None:
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    writer.abort()
    with (tmp_path / "tiny.smoe.part").open("r+b") as part:
        part.write(b"x" * 16384)  # header and gap
        part.seek(0, os.SEEK_END)
        part.write(b"more")
    with (tmp_path / "tiny.scout.safetensors.part").open("r+b") as part:
        part.write(b"x" * 100)
        part.seek(0, os.SEEK_END)
        part.write(b"more")
    writer = tiny.open(tmp_path)
    assert tiny.fill(writer) == 0
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("cut", [1, 9, 30, 200])
def test_a_torn_journal_counts_up_to_its_last_whole_line(tmp_path: Path, whole: dict[str, bytes], cut: int) -> None:
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    writer.abort()
    journal = tmp_path / "tiny.convert.part"
    journal.write_bytes(journal.read_bytes()[:-cut])
    writer = tiny.open(tmp_path)
    lost = tiny.fill(writer)
    assert 1 <= lost <= 12
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("junk", [b"", b"\0" * 4096, b"smoe-conversion 1 00000000\n", b"x" * 100])
def test_a_useless_journal_begins_again(tmp_path: Path, whole: dict[str, bytes], junk: bytes) -> None:
    (tmp_path / "tiny.convert.part").write_bytes(junk)
    (tmp_path / "tiny.smoe.part").write_bytes(b"old" * 99999)
    tiny = TinyVault()
    writer = tiny.open(tmp_path)
    assert writer.done_records() == []
    tiny.fill(writer)
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


def test_another_source_or_geometry_is_refused(tmp_path: Path) -> None:
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    writer.abort()
    tiny.fingerprint = "sha256:changed"
    said = core_error("usage", tiny.open, tmp_path)
    assert "sha256:source" in said and "sha256:changed" in said and "--fresh" in said
    tiny = TinyVault()
    tiny.layers[0] = (1, 4, 16384)
    assert "--fresh" in core_error("usage", tiny.open, tmp_path)
    assert len(TinyVault().open(tmp_path).done_records()) == 8  # nothing was lost by asking


def test_one_conversion_at_a_time(tmp_path: Path) -> None:
    child = start_child(tmp_path, pause=5)
    while not (tmp_path / "tiny.smoe.part").exists():
        time.sleep(0.01)
    assert "another conversion" in core_error("usage", TinyVault().open, tmp_path)
    assert "another conversion" in core_error("usage", _core.discard_parts, str(tmp_path), "tiny")
    assert kill_child(child)
    TinyVault().open(tmp_path).abort()
    _core.discard_parts(str(tmp_path), "tiny")
    assert contents(tmp_path) == {}


def test_an_older_vault_stays_until_the_new_one_is_whole(tmp_path: Path, whole: dict[str, bytes]) -> None:
    TinyVault(seed=1).make(tmp_path)
    before = contents(tmp_path)
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    assert {name: data for name, data in contents(tmp_path).items() if ".part" not in name} == before
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("taken", ["scout", "both"])
def test_killed_while_it_takes_the_names(tmp_path: Path, whole: dict[str, bytes], taken: str) -> None:
    """The state between two renames, made by hand: the finished vault with its journal still there."""
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    journal = (tmp_path / "tiny.convert.part").read_bytes()
    tiny.finish(writer, tmp_path)
    smoe = tmp_path / "tiny.smoe"
    fact = f"F {_core.crc32c(smoe.read_bytes()[:4096]):08x}".encode()
    (tmp_path / "tiny.convert.part").write_bytes(journal + fact + f" {_core.crc32c(fact):08x}\n".encode())
    if taken == "scout":
        smoe.rename(tmp_path / "tiny.smoe.part")
    writer = tiny.open(tmp_path)
    assert len(writer.done_records()) == 8 and len(writer.done_tensors()) == len(tiny.tensors)
    assert not smoe.exists()
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


def test_a_stale_journal_never_takes_another_vaults_file(tmp_path: Path) -> None:
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(tmp_path))
    writer.abort()
    journal = (tmp_path / "tiny.convert.part").read_bytes()
    _core.discard_parts(str(tmp_path), "tiny")
    TinyVault(seed=1).make(tmp_path)
    before = contents(tmp_path)
    fact = b"F 12345678"
    (tmp_path / "tiny.convert.part").write_bytes(journal + fact + f" {_core.crc32c(fact):08x}\n".encode())
    writer = tiny.open(tmp_path)
    assert writer.done_records() == []
    assert {name: data for name, data in contents(tmp_path).items() if ".part" not in name} == before


def test_finish_refuses_what_does_not_fit(tmp_path: Path) -> None:
    tiny = TinyVault()
    writer = tiny.open(tmp_path)
    assert "not written yet" in core_error("usage", writer.tensor_crc, "embed.weight")
    assert "8 records and 43 tensors" in core_error("usage", writer.finish, "{}")
    tiny.fill(writer)
    assert "manifest" in core_error("corrupt", writer.finish, "{}")
    good = tiny.manifest_json(writer)
    core_error("corrupt", writer.finish, good.replace('"hidden": 64', '"hidden": 32'))
    crc = f'"crc32c": {writer.tensor_crc("embed.weight")}'
    assert "embed.weight" in core_error("corrupt", writer.finish, good.replace(crc, '"crc32c": 1'))
    assert not (tmp_path / "tiny.smoe").exists()
    tiny.finish(writer, tmp_path)
    assert _core.verify(str(tmp_path / "tiny.smoe"))["ok"]
    assert "closed" in core_error("usage", writer.write_record, 0, 0, tiny.records[0, 0])


def test_write_refuses_what_does_not_fit(tmp_path: Path) -> None:
    tiny = TinyVault()
    writer = tiny.open(tmp_path)
    core_error("usage", writer.write_record, 2, 0, tiny.records[0, 0])
    core_error("usage", writer.write_record, 0, 4, tiny.records[0, 0])
    core_error("usage", writer.write_record, 0, 0, bytes(tiny.layers[0][2] + 1))
    core_error("usage", writer.write_record, 0, 0, b"short")
    core_error("usage", writer.write_tensor, "none", b"")
    core_error("usage", writer.write_tensor, "embed.weight", b"short")
    with pytest.raises((BufferError, ValueError)):
        writer.write_tensor("final_norm.weight", np.zeros((128, 2), np.float32)[:, 0])
    with pytest.raises(TypeError):
        writer.write_tensor("final_norm.weight", "text")
    writer.write_tensor("final_norm.weight", np.zeros(64, np.float32))
    assert writer.done_tensors() == ["final_norm.weight"]
    for stem in ["", "a/b", "..", ".x"]:
        core_error("usage", _core.VaultWriter, str(tmp_path), stem, "f", [], [])
    core_error("usage", _core.VaultWriter, str(tmp_path), "x", "f", [(0, 1, 100)], [])
    core_error("usage", _core.VaultWriter, str(tmp_path), "x", "f", [], [("a", "F32", [2], 4)])
    core_error("usage", _core.VaultWriter, str(tmp_path), "x", "f", [], [("a", "I64", [2], 16)])
    core_error("usage", _core.VaultWriter, str(tmp_path), "x", "f", [], [("a", "U8", [2], 2)] * 2)


def test_written_from_many_threads(tmp_path: Path, whole: dict[str, bytes]) -> None:
    tiny = TinyVault()
    writer = tiny.open(tmp_path)
    jobs = [lambda k=k, v=v: writer.write_record(*k, v) for k, v in tiny.records.items()]
    jobs += [lambda k=k, v=v: writer.write_tensor(k, v) for k, v in tiny.tensors.items()]
    threads = [threading.Thread(target=lambda i=i: [job() for job in jobs[i::4]]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


def aligned(data: bytes, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The record in whole, at an address that direct writes take."""
    buffer = zeros(length)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


def is_cached(path: Path, offset: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def fill_aligned(tiny: TinyVault, writer: Any) -> None:
    for (layer, expert), data in tiny.records.items():
        writer.write_record(layer, expert, aligned(data, tiny.layers[layer][2]))
    for name, data in tiny.tensors.items():
        writer.write_tensor(name, data)


def test_whole_records_are_written_past_the_page_cache(tmp_path: Path, whole: dict[str, bytes]) -> None:
    tiny = TinyVault()
    fill_aligned(tiny, writer := tiny.open(tmp_path))
    part, second = tmp_path / "tiny.smoe.part", 16384 + tiny.layers[0][2]
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_DIRECT))
        assert not is_cached(part, second)
    except OSError as error:
        pytest.skip(f"SKIP: the temporary folder takes no direct writes: {error}")
    finally:
        writer.abort()
    writer = tiny.open(tmp_path)
    assert len(writer.done_records()) == len(tiny.records)  # read back, with the right checksums
    writer.write_record(0, 1, tiny.records[0, 1])  # at any address, through the page cache
    tiny.finish(writer, tmp_path)
    assert contents(tmp_path) == whole


def test_whole_records_on_a_file_system_in_memory(small_disk: Path, whole: dict[str, bytes]) -> None:
    subprocess.run(["mount", "-o", "remount,size=600k", str(small_disk)], check=True)
    tiny = TinyVault()
    fill_aligned(tiny, writer := tiny.open(small_disk))
    tiny.finish(writer, small_disk)
    assert contents(small_disk) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"SKIP: no full-disk test here, a tmpfs cannot be mounted: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_found_at_once_and_left_clean(small_disk: Path) -> None:
    said = core_error("resources", TinyVault().open, small_disk)
    assert "tiny.smoe.part" in said and os.strerror(errno.ENOSPC) in said
    assert contents(small_disk) == {}


def test_a_disk_that_fills_up_on_the_way_resumes(small_disk: Path, whole: dict[str, bytes]) -> None:
    subprocess.run(["mount", "-o", "remount,size=560k", str(small_disk)], check=True)
    tiny = TinyVault()
    tiny.fill(writer := tiny.open(small_disk))
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    said = core_error("resources", writer.finish, tiny.manifest_json(writer))
    assert "at byte" in said
    writer.abort()
    assert not (small_disk / "tiny.smoe").exists()
    ballast.unlink()
    writer = tiny.open(small_disk)
    assert len(writer.done_records()) == 8
    tiny.finish(writer, small_disk)
    assert contents(small_disk) == whole


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    core_error("io", TinyVault().open, tmp_path / "file" / "below")


def test_crc32c_and_record_layout() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(b"6789", _core.crc32c(b"12345")) == 0xE3069283
    layout = _core.record_layout(2048, 768, "q4_k", "q4_k", "q6_k")
    assert layout["up"] == 768 * 2048 // 256 * 144
    assert layout["end"] == layout["down"] + 2048 * 768 // 256 * 210
    assert layout["length"] % 16384 == 0 and layout["length"] >= layout["end"]
    assert "q9" in core_error("usage", _core.record_layout, 64, 64, "q9", "f32", "f32")
