"""--state: what was appended is there at the next open, whatever happened to the end of the file."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from smoe_cli.errors import ResourceError, UsageError
from smoe_cli.serve import state
from smoe_cli.serve.state import HEADER, NAME, ConversationLog, vault_digest


def held(folder: Path, vault: str = "v") -> dict[str, list[int]]:
    log = ConversationLog(folder)
    found = {one.session: one.ids for one in log.conversations(vault)}
    log.close()
    return found


def written(folder: Path) -> list[tuple[int, dict[str, list[int]]]]:
    """A log of several turns; the file's size after each, and what it holds then."""
    log = ConversationLog(folder)
    steps: list[tuple[int, dict[str, list[int]]]] = [(len(HEADER), {})]
    now: dict[str, list[int]] = {}
    for session, ids in [("", [1, 2, 3]), ("", [1, 2, 3, 4, 5]), ("s1", [9] * 40), ("", [1, 2, 7]), ("s1", [])]:
        log.append(session, "v", ids)
        now = {**now, session: ids}
        steps.append(((folder / NAME).stat().st_size, {key: value for key, value in now.items() if value}))
    log.close()
    return steps


def test_conversations_come_back_the_last_one_first(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path)
    log.append("", "v", [1, 2, 3])
    log.append("s1", "v", [4])
    log.append("", "v", [1, 2, 3, 5])
    log.append("s2", "other", [6])
    log.close()
    again = ConversationLog(tmp_path)
    assert [(one.session, one.ids) for one in again.conversations("v")] == [("", [1, 2, 3, 5]), ("s1", [4])]
    assert [one.ids for one in again.conversations("other")] == [[6]]
    assert again.conversations("third") == []
    again.append("", "v", [1, 2])
    again.close()
    assert held(tmp_path) == {"": [1, 2], "s1": [4]}


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path)
    log.append("", "v", list(range(10_000)))
    size = (tmp_path / NAME).stat().st_size
    log.append("", "v", [*range(10_000), 1, 2])
    assert (tmp_path / NAME).stat().st_size < size + 100
    log.append("", "another vault", [*range(10_000), 1, 2])  # other ids, though they read the same
    log.close()
    assert held(tmp_path, "another vault") == {"": [*range(10_000), 1, 2]} and held(tmp_path) == {}


def test_cut_at_every_byte_the_whole_records_stay(tmp_path: Path) -> None:
    steps = written(tmp_path / "whole")
    content = (tmp_path / "whole" / NAME).read_bytes()
    for size in range(len(content)):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / NAME).write_bytes(content[:size])
        last = [step for step in steps if step[0] <= size][-1:] or [(len(HEADER), {})]
        assert held(folder) == last[0][1], size
        assert (folder / NAME).stat().st_size == last[0][0]  # cut there, so that what is appended is found again
        assert held(folder) == last[0][1]


def test_a_flipped_byte_ends_the_log_before_its_record(tmp_path: Path) -> None:
    steps = written(tmp_path)
    content = (tmp_path / NAME).read_bytes()
    chance = random.Random(1)
    for _ in range(200):
        at = chance.randrange(len(HEADER), len(content))
        damaged = bytearray(content)
        damaged[at] ^= 1 << chance.randrange(8)
        (tmp_path / NAME).write_bytes(bytes(damaged))
        assert held(tmp_path) == [step for step in steps if step[0] <= at][-1][1], at


def test_a_record_that_follows_on_nothing_is_not_believed(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path)
    log.append("", "v", [1, 2])
    log.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(state._record("", "v", 5, [9]) + state._record("s1", "v", 0, [3]))
    assert held(tmp_path) == {"": [1, 2]}


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ConversationLog(tmp_path)
    log.append("", "v", [1, 2])
    size = (tmp_path / NAME).stat().st_size
    real, calls = os.write, 0

    def short(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, bytes(data)[:5])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(ResourceError, match="No space left"):
        log.append("", "v", [1, 2, 3])
    monkeypatch.undo()
    assert (tmp_path / NAME).stat().st_size == size
    log.append("", "v", [1, 2, 4])
    log.close()
    assert held(tmp_path) == {"": [1, 2, 4]}


def test_a_long_log_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_WASTE", 1000)
    log = ConversationLog(tmp_path)
    for turn in range(100):
        log.append("", "v", [turn] * 50)
    log.close()
    assert held(tmp_path) == {"": [99] * 50}
    assert (tmp_path / NAME).stat().st_size < 600
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    log = ConversationLog(tmp_path)
    log.append("", "v", [1])
    log.close()
    assert held(tmp_path) == {"": [1]}


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path)
    with pytest.raises(UsageError, match="in use"):
        ConversationLog(tmp_path)
    log.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / NAME).write_text("my diary")
    with pytest.raises(UsageError, match="not a log"):
        ConversationLog(tmp_path / "other")
    assert (tmp_path / "other" / NAME).read_text() == "my diary"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be opened"):
        ConversationLog(tmp_path / "file")


def test_only_the_owner_may_read_it_and_the_digest_is_of_the_content(tmp_path: Path) -> None:
    ConversationLog(tmp_path / "new").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / NAME).stat().st_mode & 0o777 == 0o600
    assert vault_digest({"a": 1, "b": 2}) == vault_digest({"b": 2, "a": 1}) != vault_digest({"a": 1, "b": 3})
