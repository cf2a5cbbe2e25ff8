"""One engine process: spawn, talk, cancel, stop, kill, reap, and say in words how it died.

Two threads read its stdout and stderr, so that the caller may wait for a reply with a time limit and the engine never
blocks on a full pipe. One request at a time; ``cancel`` and ``kill`` may come from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
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
    Scored,
    Token,
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
        self._chunks: queue.Queue[bytes] = queue.Queue()  # b"" marks the end of stdout
        self._stderr: deque[str] = deque(maxlen=200)
        self._notices: deque[str] = deque(maxlen=50)
        self._write_lock = threading.Lock()
        self._give_up_at: float | None = None
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_stdout, self._read_stderr)]
        for thread in self._threads:
            thread.start()

    # -- talking --

    def generate(self, request: Generate) -> Generator[Message, None, None]:
        """The reply's messages as they come. Raises EngineRefused, EngineDied, ProtocolError.

        A caller that closes the iterator before the end cancels the generation and waits for the engine to be idle.
        """
        masks = request.masks() if request.masks is not None else None
        yield from self._exchange(request.line(), ReplyParser(request.logprobs), masks)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each of ``ids[1:]`` given those before it."""
        return [message.logprob for message in self.scores(ids) if isinstance(message, Scored)]

    def scores(self, ids: Sequence[int], top: int = 0) -> Generator[Message, None, None]:
        """``Prefilled`` as it goes, then a ``Scored`` for each of ``ids[1:]``, with the ``top`` likeliest in its
        place."""
        yield from self._exchange(score_line(ids, top), ReplyParser(score_top=top > 0))

    def reset(self) -> None:
        """Drop every conversation the engine holds."""
        for _ in self._exchange("RESET\n", ReplyParser()):
            pass

    def _exchange(self, line: str, parser: ReplyParser, masks: Masks | None = None) -> Generator[Message, None, None]:
        self._give_up_at = None
        refused = self._count_refused()
        self._send(line)
        messages: Iterator[Message] = iter(())
        try:
            if masks is not None:
                self._send(mask_line(masks.mask()))
            while not parser.finished:
                messages = parser.feed(self._read())
                for message in messages:
                    if masks is not None and isinstance(message, Token):
                        masks.accept(message.id)  # the last mask answers no step, and is dropped
                        self._send(mask_line(masks.mask()))
                    yield message
        except EngineRefused as refusal:
            refusal.hint = refusal.hint or self._why_refused(refused)
            raise
        except EngineError:
            raise
        except BaseException:  # closed by the caller, or no mask could be made
            self._drain(parser, messages)
            raise

    def _drain(self, parser: ReplyParser, messages: Iterator[Message]) -> None:
        """Cancel, and wait for the engine to be idle. ``messages`` are those already read, the last one perhaps among
        them."""
        self.cancel()
        with contextlib.suppress(EngineError):
            for _ in messages:
                pass
            while not parser.finished:
                for _ in parser.feed(self._read()):
                    pass

    def info(self) -> dict[str, Any]:
        """What the engine says about itself; also the proof that it is up."""
        self._give_up_at = None
        self._send("INFO\n")
        line = b""
        while not line.endswith(b"\n"):
            line = (line + self._read()).lstrip()  # a reply before it ends in a newline that may come late
        try:
            answer = json.loads(line)
        except ValueError:
            raise ProtocolError(f"the engine answered INFO with {line[:200]!r}") from None
        return answer if isinstance(answer, dict) else {}

    def cancel(self, grace_s: float = CANCEL_GRACE_S) -> None:
        """Ask the running generation to end; its reply then finishes with ``cancel``. Harmless when idle or dead.

        An engine that has not ended it within ``grace_s`` is taken to hang, and is killed.
        """
        self._give_up_at = time.monotonic() + grace_s
        with contextlib.suppress(EngineDied):
            self._send("CANCEL\n")

    def _send(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with self._write_lock:
            try:
                stdin.write(line.encode("ascii"))
                stdin.flush()
            except (BrokenPipeError, ValueError):
                raise EngineDied(self.obituary(), "smoe starts it again for the next request") from None

    def _read(self) -> bytes:
        """The next piece of stdout; waits for it as long as nobody cancels."""
        while True:
            try:
                data = self._chunks.get(timeout=0.5)
                break
            except queue.Empty:
                if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    self.kill()
        if not data:
            self._chunks.put(b"")  # whoever reads next sees the end too
            raise EngineDied(self.obituary(), "smoe starts it again for the next request")
        return data

    def _read_stdout(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while data := os.read(stdout.fileno(), 65536):
            self._chunks.put(data)
        self._chunks.put(b"")

    def _read_stderr(self) -> None:
        stderr: IO[bytes] | None = self._process.stderr
        assert stderr is not None
        for line in stderr:
            text = line.decode("utf-8", errors="replace").rstrip()[:1000]
            self._stderr.append(text)
            if text.startswith(_NOTICES):
                self._notices.append(text)

    def _count_refused(self) -> int:
        return sum(line.startswith(_REFUSED) for line in list(self._stderr))

    def _why_refused(self, before: int) -> str:
        """What the engine said on stderr about the request it just refused; it may come a moment later."""
        for _ in range(20):
            lines = [line for line in list(self._stderr) if line.startswith(_REFUSED)]
            if len(lines) > before:
                return lines[-1].removeprefix(_REFUSED)
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
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1)
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
