"""One engine process: spawn, talk, cancel, stop, kill, reap, and say in words how it died.

Requests with tags may run at once, each in a thread of its own, and one without; ``cancel`` and ``kill`` may come from
any thread. Of the threads that wait for a reply one reads stdout for all, so that a request that runs alone has no
other thread between the engine and itself; stderr has a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from smoe_cli.engine.protocol import (
    Generate,
    Masks,
    Message,
    ProtocolError,
    ReplyParser,
    Router,
    Scored,
    Token,
    cancel_line,
    mask_line,
    score_line,
)
from smoe_cli.errors import CorruptError, EngineError, EngineRefused, ResourceError, SmoeError, UsageError

_START_ERRORS: dict[int, type[SmoeError]] = {2: UsageError, 3: ResourceError, 4: CorruptError}
_LIKELY = {
    "SIGKILL": "most often the kernel's out-of-memory killer",
    "SIGSEGV": "a fault in the engine",
    "SIGBUS": "a file that shrank while it was read, or a failing disk",
    "SIGILL": "an instruction this CPU does not have; try --isa scalar",
    "SIGABRT": "the engine gave up on itself",
    "SIGTERM": "someone asked it to stop",
}


_NOTICES = ("warning: ", "notice: ", "instrument: ")
_REFUSED = "request refused: "
CANCEL_GRACE_S = 120.0  # a prefill chunk of a large model on a slow disk takes this long


class EngineDied(EngineError):
    """The process ended in the middle of a conversation. ``text`` says how."""


def engine_path() -> Path:
    """The engine that was built with this package."""
    from smoe_cli import settings

    path = settings.engine() or Path(__file__).resolve().parent.parent / "smoe-engine"
    if not path.is_file():
        raise EngineError(f"there is no engine at {path}", "build it: make build")
    return path


class EngineProcess:
    """A running ``smoe-engine --serve``. ``argv`` is the whole command."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._oom_kills = _oom_kills()
        # A session of its own: Ctrl-C in the terminal is ours to turn into CANCEL. The engine ends when stdin closes.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        # What was written to each tag and is not read yet. The request without a tag always has its place.
        self._chunks: dict[str, deque[bytes]] = {"": deque()}
        self._arrived = threading.Condition()  # of these, and of the next two
        self._reading = False  # one of those who wait is about to read for all
        self._ended = False  # nothing more comes
        self._router = Router()
        self._stderr: deque[str] = deque(maxlen=200)
        self._notices: deque[str] = deque(maxlen=50)
        self._write_lock = threading.Lock()
        self._patience: dict[str, threading.Timer | None] = {}  # of the exchanges that run; once cancelled, what kills
        self._listener = threading.Thread(target=self._read_stderr, daemon=True)
        self._listener.start()

    # -- talking --

    def generate(self, request: Generate) -> Generator[Message, None, None]:
        """The reply's messages as they come. Raises EngineRefused, EngineDied, ProtocolError.

        A caller that closes the iterator before the end cancels the generation and waits for the engine to be idle.
        """
        masks = request.masks() if request.masks is not None else None
        with self._channel(request.tag):
            yield from self._exchange(request.line(), ReplyParser(request.logprobs), masks, request.tag)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each of ``ids[1:]`` given those before it."""
        return [message.logprob for message in self.scores(ids) if isinstance(message, Scored)]

    def scores(self, ids: Sequence[int], top: int = 0, tag: str = "") -> Generator[Message, None, None]:
        """``Prefilled`` as it goes, then a ``Scored`` for each of ``ids[1:]``, with the ``top`` likeliest in its
        place."""
        with self._channel(tag):
            yield from self._exchange(score_line(ids, top, tag), ReplyParser(score_top=top > 0), tag=tag)

    def reset(self) -> None:
        """Drop every conversation the engine holds."""
        for _ in self._exchange("RESET\n", ReplyParser()):
            pass

    @contextlib.contextmanager
    def _channel(self, tag: str) -> Iterator[None]:
        """As long as the request runs, what is written to its tag is kept for it."""
        if not tag:
            yield
            return
        with self._arrived:
            if tag in self._chunks:
                raise EngineError(f"a request with the tag {tag} is running", "give every request its own")
            self._chunks[tag] = deque()
        try:
            yield
        finally:
            with self._arrived:
                del self._chunks[tag]

    @contextlib.contextmanager
    def _cancellable(self, tag: str) -> Iterator[None]:
        """As long as the exchange runs, ``cancel`` finds it."""
        self._patience[tag] = None
        try:
            yield
        finally:
            with self._arrived:
                timer = self._patience.pop(tag)
            if timer is not None:
                timer.cancel()

    def _exchange(
        self, line: str, parser: ReplyParser, masks: Masks | None = None, tag: str = ""
    ) -> Generator[Message, None, None]:
        with self._cancellable(tag):
            yield from self._converse(line, parser, masks, tag)

    def _converse(
        self, line: str, parser: ReplyParser, masks: Masks | None, tag: str
    ) -> Generator[Message, None, None]:
        refused = len(self._refusals(tag))
        self._send(line)
        messages: Iterator[Message] = iter(())
        try:
            if masks is not None:
                self._send(mask_line(masks.mask(), tag))
            while not parser.finished:
                messages = parser.feed(self._read(tag))
                for message in messages:
                    if masks is not None and isinstance(message, Token):
                        masks.accept(message.id)  # the last mask answers no step, and is dropped
                        self._send(mask_line(masks.mask(), tag))
                    yield message
        except EngineRefused as refusal:
            refusal.hint = refusal.hint or self._why_refused(tag, refused)
            raise
        except EngineError:
            raise
        except BaseException:  # closed by the caller, or no mask could be made
            self._drain(parser, messages, tag)
            raise

    def _drain(self, parser: ReplyParser, messages: Iterator[Message], tag: str) -> None:
        """Cancel, and wait for the engine to be idle. ``messages`` are those already read, the last one perhaps among
        them."""
        self.cancel(tag)
        with contextlib.suppress(EngineError):
            for _ in messages:
                pass
            while not parser.finished:
                for _ in parser.feed(self._read(tag)):
                    pass

    def info(self) -> dict[str, Any]:
        """What the engine says about itself; also the proof that it is up."""
        self._send("INFO\n")
        line = b""
        while not line.endswith(b"\n"):
            line = (line + self._read("")).lstrip()  # a reply before it ends in a newline that may come late
        try:
            answer = json.loads(line)
        except ValueError:
            raise ProtocolError(f"the engine answered INFO with {line[:200]!r}") from None
        return answer if isinstance(answer, dict) else {}

    def cancel(self, tag: str = "", grace_s: float = CANCEL_GRACE_S) -> None:
        """Ask the running generation to end; its reply then finishes with ``cancel``. Harmless when idle or dead.

        An engine that has not ended it within ``grace_s`` is taken to hang, and is killed.
        """
        with self._arrived:
            if tag in self._patience:
                if (timer := self._patience[tag]) is not None:
                    timer.cancel()
                timer = self._patience[tag] = threading.Timer(grace_s, self.kill)
                timer.daemon = True
                timer.start()
        with contextlib.suppress(EngineDied):
            self._send(cancel_line(tag))

    def _send(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with self._write_lock:
            try:
                stdin.write(line.encode("ascii"))
                stdin.flush()
            except (BrokenPipeError, ValueError):
                raise EngineDied(self.obituary(), "smoe starts it again for the next request") from None

    def _read(self, tag: str) -> bytes:
        """The next piece of stdout that is for the tag."""
        chunks = self._chunks[tag]
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: chunks or self._ended or not self._reading)
                if chunks:
                    return chunks.popleft()
                if self._ended:
                    break
                self._reading = True
            self._read_for_all()
        raise EngineDied(self.obituary(), "smoe starts it again for the next request")

    def _read_for_all(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        data = None
        try:
            data = os.read(stdout.fileno(), 65536)
        finally:  # an interrupt of the main thread must not keep the others waiting
            with self._arrived:
                self._reading = False
                self._ended = data == b""
                for name, words in self._router.feed(data or b""):
                    if name in self._chunks:  # nobody waits any more for what was on its way
                        self._chunks[name].append(words)
                self._arrived.notify_all()

    def _read_stderr(self) -> None:
        stderr: IO[bytes] | None = self._process.stderr
        assert stderr is not None
        for line in stderr:
            text = line.decode("utf-8", errors="replace").rstrip()[:1000]
            self._stderr.append(text)
            if text.startswith(_NOTICES):
                self._notices.append(text)

    def _refusals(self, tag: str) -> list[str]:
        start = f"{_REFUSED}@{tag} " if tag else _REFUSED
        lines = [line.removeprefix(start) for line in list(self._stderr) if line.startswith(start)]
        return lines if tag else [line for line in lines if not line.startswith("@")]

    def _why_refused(self, tag: str, before: int) -> str:
        """What the engine said on stderr about the request it just refused; it may come a moment later."""
        for _ in range(20):
            lines = self._refusals(tag)
            if len(lines) > before:
                return lines[-1]
            time.sleep(0.01)
        return ""

    # -- life and death --

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def take_notices(self) -> list[str]:
        """What the engine has told people since the last call: warnings, notices, time by bucket. Bounded."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def start_error(self) -> SmoeError:
        """Why the engine did not come up, as the error its exit code names; its own words when it left some."""
        code = self._wait()
        lines = list(self._stderr)
        at = next((index for index, line in enumerate(lines) if line.startswith("error: ")), None)
        if at is None:
            return EngineError(f"the engine did not start: it {self._exit_in_words(code)}", "; ".join(lines[-3:]))
        hint = " ".join(line.strip() for line in lines[at + 1 :])
        return _START_ERRORS.get(code, EngineError)(lines[at].removeprefix("error: "), hint)

    def obituary(self) -> str:
        """How the process died: signal or exit code, likely cause, last words."""
        code = self._wait()
        last = next((line for line in reversed(self._stderr) if line.strip()), "")
        text = f"the engine {self._exit_in_words(code)}"
        return f'{text}; its last words: "{last}"' if last else text

    def _exit_in_words(self, code: int) -> str:
        return describe_exit(code, _oom_kills() > self._oom_kills)

    def stop(self, grace_s: float = 5.0) -> None:
        """Close its stdin, which ends it; kill it if it does not. Reaps it either way."""
        with contextlib.suppress(BrokenPipeError, OSError), self._write_lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _wait(self) -> int:
        """Reap the process, which has closed its stdout or been told to end. One that lingers is killed."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._listener.join(1)
        return code


def describe_exit(code: int, oom_seen: bool = False) -> str:
    """An exit status as a person would say it. ``oom_seen``: the kernel counted an out-of-memory kill meanwhile."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was ended by signal {-code}"
    if name == "SIGKILL" and oom_seen:
        return "was killed by SIGKILL: the kernel's out-of-memory killer; a smaller --budget or --ctx needs less memory"
    likely = f" (likely: {_LIKELY[name]})" if name in _LIKELY else ""
    return f"was killed by {name}{likely}"


def _oom_kills() -> int:
    """How many out-of-memory kills the kernel has counted since boot; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
