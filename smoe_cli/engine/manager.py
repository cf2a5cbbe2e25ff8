"""The engine-process manager that every verb shares: start, hand over, cancel, restart and retry once, stop."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.process import EngineDied, EngineProcess, engine_path
from smoe_cli.engine.protocol import Done, Generate, Message, ProtocolError, Sampling, Token
from smoe_cli.errors import EngineError, SmoeError

FALLBACK = Sampling(temperature=0.6, top_p=0.95, top_k=50, repetition_penalty=1.1)


@dataclass(frozen=True)
class EngineSpec:
    """What to run: a vault, launch flags, and the ids that the repetition penalty leaves alone."""

    vault: Path
    flags: EngineFlags = field(default_factory=EngineFlags)
    exempt_ids: Sequence[int] = ()
    ledger: Path | None = None  # where engines tell each other what memory they take
    history: Path | None = None  # where it keeps how often each expert is used

    def argv(self) -> list[str]:
        exempt = ["--exempt", ",".join(map(str, self.exempt_ids))] if self.exempt_ids else []
        ledger = ["--ledger", str(self.ledger)] if self.ledger else []
        history = ["--history", str(self.history)] if self.history else []
        own = ["--vault", str(self.vault), "--serve", "--raw-ids"]
        return [str(engine_path()), *own, *self.flags.argv(), *exempt, *ledger, *history]


@dataclass(frozen=True)
class Restarted:
    """The engine died in this request and was started again; the request is being retried. ``reason`` says how."""

    reason: str


class _Request:
    """What has been asked of a request that runs, from whatever thread."""

    def __init__(self) -> None:
        self.cancelled = self.aborted = False


class EngineManager:
    """Owns at most one engine process. Requests with tags may run at once, each in a thread of its own; without a tag
    it is one at a time. ``cancel`` and ``abort`` may come from any thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.info: dict[str, Any] = {}
        self._process: EngineProcess | None = None
        self._requests: dict[str, _Request] = {}  # those that run, by tag
        self._changed = threading.Condition()  # of these
        self._life = threading.RLock()  # held while the process is started or buried

    # -- life --

    def start(self) -> None:
        """Start the engine if it is not running and wait until it answers. Raises what its exit code stands for."""
        self._started()

    def _started(self) -> EngineProcess:
        with self._life:
            if self._process is not None and self._process.alive:
                return self._process
            self.stop()
            process = self._process = EngineProcess(self.spec.argv())
            try:
                self.info = process.info()
            except EngineDied:
                failure = process.start_error()
                self._bury(process)
                raise failure from None
            except BaseException:
                self._bury(process)
                raise
            return process

    def stop(self) -> None:
        with self._life:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def switch(self, spec: EngineSpec) -> None:
        """Run another vault from now on; waits for the requests in progress."""
        with self._alone():
            self.stop()
            self.spec = spec

    def __enter__(self) -> EngineManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.alive else None

    def rss_bytes(self) -> int | None:
        """Resident memory of the engine process, None when it is not running."""
        import psutil

        pid = self.pid
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss) if pid else None
        return None

    def read_bytes(self) -> int | None:
        """Bytes the engine process has read from disks since its start, None where the system does not say."""
        pid = self.pid
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    return int(line.split()[1])
        return None

    # -- requests --

    def generate(self, request: Generate, retries: int = 1) -> Iterator[Message | Restarted]:
        """One request from start to end. If the engine dies in it, it is restarted and the request sent again.

        A retry delivers only what is new: the engine repeats itself exactly for the same ids and seed, so the tokens
        that were already delivered are passed over, and one that differs ends the request with EngineError.
        """
        delivered: list[int] = []
        yield from self._retried(lambda process: self._attempt(process, request, delivered), retries, request.tag)

    def score(self, ids: Sequence[int], top: int = 0, retries: int = 1, tag: str = "") -> Iterator[Message | Restarted]:
        """See EngineProcess.scores. After a ``Restarted`` it begins again from the start."""
        yield from self._retried(lambda process: process.scores(ids, top, tag), retries, tag)

    def _retried(
        self, attempt_once: Callable[[EngineProcess], Generator[Message, None, None]], retries: int, tag: str
    ) -> Iterator[Message | Restarted]:
        with self._running(tag) as request:
            for attempt in range(retries + 1):
                process = None
                try:
                    process = self._started()
                    if request.cancelled:  # while it started
                        yield Done("cancel", {})
                        return
                    with contextlib.closing(attempt_once(process)) as messages:
                        yield from messages
                    return
                except (EngineDied, ProtocolError) as death:
                    self._bury(process)
                    if attempt == retries and not request.aborted:
                        raise EngineError(f"{death.text} (tried {attempt + 1} times)", death.hint) from death
                    reason = death.text
                except SmoeError:
                    if not request.aborted:
                        raise
                if request.aborted:
                    yield Done("cancel", {})
                    return
                yield Restarted(reason)

    @contextlib.contextmanager
    def _running(self, tag: str) -> Iterator[_Request]:
        """Waits while another request has the tag."""
        with self._changed:
            self._changed.wait_for(lambda: tag not in self._requests)
            request = self._requests[tag] = _Request()
        try:
            yield request
        finally:
            with self._changed:
                del self._requests[tag]
                self._changed.notify_all()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no request runs, and lets none begin."""
        with self._changed:
            self._changed.wait_for(lambda: not self._requests)
            yield

    def _attempt(
        self, process: EngineProcess, request: Generate, delivered: list[int]
    ) -> Generator[Message, None, None]:
        replay = list(delivered)
        with contextlib.closing(process.generate(request)) as messages:
            for message in messages:
                if isinstance(message, Token):
                    if replay:
                        if message.id != replay.pop(0):
                            raise EngineError("restarted, the engine answered differently", "send the message again")
                        continue
                    delivered.append(message.id)
                yield message

    def _bury(self, process: EngineProcess | None) -> None:
        """Unless another request that it failed has done so, and perhaps started the next one already."""
        with self._life:
            if process is not None and process is self._process:
                process.kill()
                self.stop()

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return bool(self._requests)

    def cancel(self, tag: str = "") -> None:
        """End the running reply (of that tag), which finishes with ``cancel``; the engine stays warm."""
        request, process = self._requests.get(tag), self._process
        if request is not None:
            request.cancelled = True
        if process is not None:
            process.cancel(tag)

    def abort(self) -> None:
        """Kill the engine under the running replies, which finish with ``cancel``; the next request starts it again."""
        for request in list(self._requests.values()):
            request.cancelled = request.aborted = True
        if self._process is not None:
            self._process.kill()

    def take_notices(self) -> list[str]:
        """What the engine has told people since the last call."""
        process = self._process
        return process.take_notices() if process is not None else []

    def reset(self) -> None:
        with self._alone():
            if self._process is not None and self._process.alive:
                self._process.reset()


def resolve_sampling(request: Sampling, flags: Sampling, generation: dict[str, Any]) -> Sampling:
    """Request over flag over the vault's generation config over FALLBACK; a random seed unless one is given."""
    known = {key: value for key, value in generation.items() if key in Sampling.__annotations__ and value is not None}
    resolved = FALLBACK
    for layer in (Sampling(**known), flags, request):
        given = {name: value for name, value in vars(layer).items() if value is not None}
        resolved = replace(resolved, **given)
    return resolved if resolved.seed is not None else replace(resolved, seed=random.SystemRandom().getrandbits(63))


@dataclass(frozen=True)
class Lane:
    """The engine for one request, which runs beside those of other lanes: what a turn needs of a manager."""

    engine: EngineManager
    tag: str

    def generate(self, request: Generate) -> Iterator[Message | Restarted]:
        return self.engine.generate(replace(request, tag=self.tag))

    def score(self, ids: Sequence[int], top: int = 0) -> Iterator[Message | Restarted]:
        return self.engine.score(ids, top, tag=self.tag)

    def cancel(self) -> None:
        self.engine.cancel(self.tag)
