"""``--state DIR``: the conversations that the engine held are there again after a restart.

One file, ``conversations.log``, that is only ever appended to: a header line, then records of eight bytes, the length
and the CRC-32 of what follows, and a JSON object: {"session", "vault", "keep", "ids"}: the session's ids are the first
``keep`` of those it had, then these. ``vault`` is the digest of what the ids mean something to. At open the file is
read up to the first record that is not whole, and cut there. It holds what people wrote, as ids: it is the owner's
alone to read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoe_cli.errors import ResourceError, UsageError

log = logging.getLogger("smoe")

NAME = "conversations.log"
HEADER = b"smoe conversations 1\n"
_HEAD = struct.Struct("<II")
_LONGEST = 64 << 20
_WASTE = 4 << 20  # a log that holds more than this beside what is alive is written anew at open


@dataclass
class Conversation:
    """``ids`` in the order they were computed; ``vault`` is what they were computed with."""

    session: str
    vault: str
    ids: list[int] = field(default_factory=list)


class ConversationLog:
    """One process at a time has it open; one thread at a time calls it. UsageError when it cannot be had."""

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"--state: {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise UsageError(f"--state: {path} is in use by another server", "give each its own folder") from error
        self.path = path
        self._last: dict[str, Conversation] = {}  # by session, the one spoken to last at the end
        self._read()

    def conversations(self, vault: str) -> list[Conversation]:
        """Those of this vault, the one spoken to last first."""
        return [one for one in reversed(self._last.values()) if one.vault == vault and one.ids]

    def append(self, session: str, vault: str, ids: Sequence[int]) -> None:
        """Remember that the session holds these ids now. ResourceError when the disk does not take it; the log is then
        as it was before."""
        before = self._last.get(session)
        known = before.ids if before is not None and before.vault == vault else []
        keep = _common(known, ids)
        self._write(_record(session, vault, keep, list(ids[keep:])))
        self._set(session, vault, list(ids))

    def close(self) -> None:
        os.close(self._file)

    def _set(self, session: str, vault: str, ids: list[int]) -> None:
        self._last.pop(session, None)
        self._last[session] = Conversation(session, vault, ids)

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise ResourceError(f"{self.path} cannot be written: {error.strerror}", "make room on the disk") from error

    def _read(self) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not content.startswith(HEADER):
            if content and not HEADER.startswith(content):
                os.close(self._file)
                raise UsageError(f"--state: {self.path} is not a log of conversations", "give another folder")
            os.ftruncate(self._file, 0)
            self._write(HEADER)
            return
        at = len(HEADER)
        while (record := _whole(content, at)) is not None:
            length, found = record
            if not self._replay(found):
                break
            at += length
        if at < len(content):
            log.warning("%s: the last %d bytes are not whole records, and are cut off", self.path, len(content) - at)
            os.ftruncate(self._file, at)
        self._compact(at)

    def _replay(self, record: Any) -> bool:
        """Whether the record makes sense after those before it."""
        try:
            session, vault, keep, ids = record["session"], record["vault"], record["keep"], record["ids"]
        except (TypeError, KeyError):
            return False
        before = self._last.get(session)
        known = before.ids if before is not None and before.vault == vault else []
        if not isinstance(keep, int) or not 0 <= keep <= len(known) or not isinstance(ids, list):
            return False
        self._set(session, vault, known[:keep] + ids)
        return True

    def _compact(self, size: int) -> None:
        records = [_record(one.session, one.vault, 0, one.ids) for one in self._last.values()]
        if size <= len(HEADER) + sum(map(len, records)) + _WASTE:
            return
        fresh = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the long log serves as well
            with open(fresh, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(HEADER + b"".join(records))
                file.flush()
                os.fsync(file.fileno())
            replacement = os.open(fresh, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            fcntl.flock(replacement, fcntl.LOCK_EX)
            os.replace(fresh, self.path)
            os.close(self._file)
            self._file = replacement


def vault_digest(manifest: dict[str, Any]) -> str:
    """What ids mean something to: the model's bytes, as far as the manifest names them, and its tokenizer."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _record(session: str, vault: str, keep: int, ids: list[int]) -> bytes:
    content = {"session": session, "vault": vault, "keep": keep, "ids": ids}
    body = json.dumps(content, separators=(",", ":")).encode()
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _whole(content: bytes, at: int) -> tuple[int, Any] | None:
    """The record at a place, with its length; None if it is not whole."""
    if len(content) < at + _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(content, at)
    body = content[at + _HEAD.size : at + _HEAD.size + length]
    if length > _LONGEST or len(body) != length or zlib.crc32(body) != checksum:
        return None
    try:
        return _HEAD.size + length, json.loads(body)
    except ValueError:
        return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
