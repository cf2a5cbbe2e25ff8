"""smoe-engine, the executable: flags, exit codes, the wire protocol over real pipes, with a small vault of its own."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smoe_cli

_core = pytest.importorskip("smoe_cli._core", reason="the engine module is not built")

from tests.unit.tiny_vault import TinyVault  # noqa: E402
from tests.unit.working_vault import WorkingVault  # noqa: E402

ENGINE = Path(smoe_cli.__file__).parent / "smoe-engine"
VOCAB = 96
PROMPT = [5, 17, 33, 4]
GREEDY = "t=0 r=1 bias=2:-1000"  # id 2 is the vault's EOS: these replies run to their length

pytestmark = pytest.mark.skipif(not ENGINE.is_file(), reason="smoe-engine is not built: make build")


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WorkingVault().make(tmp_path_factory.mktemp("vault"))


def run(*flags: str, stdin: bytes = b"", timeout_s: float = 60) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([ENGINE, *flags], input=stdin, capture_output=True, timeout=timeout_s, check=False)


def serve(vault: Path, requests: str | bytes, *flags: str) -> str:
    """What the engine answers to all of ``requests`` at once; it must end well and say nothing it should not."""
    stdin = requests if isinstance(requests, bytes) else requests.encode()
    done = run("--vault", str(vault), "--serve", "--ctx", "256", "--raw-ids", *flags, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("ascii")


class Client:
    """A running engine, spoken to by hand."""

    def __init__(self, vault: Path, *flags: str) -> None:
        argv = [ENGINE, "--vault", str(vault), "--serve", "--ctx", "256", *flags]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.text = ""
        self.at = 0

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def read_until(self, what: str, timeout_s: float = 20) -> str:
        """The output since the last call, up to and with ``what``."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(timeout_s, self.process.kill)
        watchdog.start()
        try:
            while (end := self.text.find(what, self.at)) < 0:
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"the engine ended before {what!r}: {self.text[self.at :]!r}"
                self.text += data.decode("ascii")
        finally:
            watchdog.cancel()
        start, self.at = self.at, end + len(what)
        return self.text[start : self.at]


@contextlib.contextmanager
def client(vault: Path, *flags: str) -> Iterator[Client]:
    it = Client(vault, *flags)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()


def ids_of(reply: str) -> list[int]:
    """The reply as a client sees it that knows only numbers and sentinels."""
    return [int(word) for word in reply.split() if word.isdecimal()]


def field(reply: str, name: str) -> str:
    return next(word for word in reply.split() if word.startswith(name + "=")).partition("=")[2]


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def gen(ids: list[int], max_tokens: int = 8, keys: str = GREEDY) -> str:
    return f"GEN {max_tokens} {keys} {joined(ids)}\n"


# -- starting ---------------------------------------------------------------------------------------------------------


def test_help_and_version_answer_on_stdout() -> None:
    assert b"--rep-penalty F" in run("--help").stdout
    assert run("--version").stdout == f"smoe-engine {smoe_cli.__version__}\n".encode()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--vault", "{}", "--serve", "--bogus"], 2, "--bogus"),
        (["--vault", "{}", "--serve", "--temperature", "nan"], 2, "--temperature"),
        (["--vault", "{}", "--serve", "--ctx"], 2, "--ctx"),
        (["--vault", "{}", "--serve", "--budget", "1G", "--ring", "8"], 2, "--budget"),
        (["--vault", "{}", "--serve", "--isa", "sse9"], 2, "sse9"),
        (["--vault", "{}", "--serve", "--budget", "1K"], 3, "budget"),
        (["--vault", "{}"], 2, "--serve"),
        (["--serve"], 2, "--vault"),
        (["--vault", "no/such.smoe", "--serve"], 2, "no/such.smoe"),
        (["--vault", "{}", "--tokens-in", "no/such.ids"], 2, "no/such.ids"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(vault: Path, flags: list[str], code: int, words: str) -> None:
    done = run(*(flag.format(vault) for flag in flags))
    assert (done.returncode, done.stdout) == (code, b"")
    errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0], done.stderr


def test_a_damaged_vault_is_exit_code_4(tmp_path: Path) -> None:
    path = WorkingVault().make(tmp_path)
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    done = run("--vault", str(path), "--serve")
    assert (done.returncode, done.stdout) == (4, b"") and done.stderr.startswith(b"error: ")


def test_silent_until_asked_and_ends_with_its_input(vault: Path) -> None:
    assert serve(vault, "") == ""
    assert serve(vault, "CANCEL\n") == ""
    with client(vault) as it:
        time.sleep(0.2)
        assert it.process.poll() is None
        out, _ = it.process.communicate()  # closes its stdin
        assert (out, it.process.returncode) == (b"", 0)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_the_old_grammar(vault: Path) -> None:
    engine = _core.Engine(str(vault), ctx=256)
    want, _ = engine.generate(PROMPT, 6, temperature=0.0)
    follow = [*PROMPT, *want, 9]
    want_more, _ = engine.generate(follow, 6, temperature=0.0)
    sampling = ["--temperature", "0", "--top-p", "0.95", "--top-k", "50", "--rep-penalty", "1"]
    text = f"GEN 6 {joined(PROMPT)}\nGEN 6 t=0 k=20 {joined(follow)}\nRESET\nGEN 6 {PROMPT[0]}\n"
    lines = serve(vault, text, "--ring", "0", "--workers", "4", *sampling).splitlines()
    assert [ids_of(line) for line in lines[:3]] == [want, want_more, []]
    assert all(line.endswith("<<DONE>>") for line in lines) and len(lines) == 4
    assert lines[2] == "<<DONE>>"
    assert field(lines[1], "cached") == str(len(PROMPT) + len(want) - 1)


def test_info_is_one_line_of_json(vault: Path) -> None:
    lines = serve(vault, "INFO\nINFO\n").splitlines()
    info = [json.loads(line) for line in lines]
    assert info[0] == info[1] and info[0]["vocab"] == VOCAB and info[0]["ctx"] == 256


def test_garbage_is_refused_and_changes_nothing(vault: Path) -> None:
    noise = np.random.default_rng(3).bytes(20_000).replace(b"\n", b"").replace(b"\r", b"")
    long = b"GEN 5 " + b"1" * 9_000_000
    fields = [b"GEN", b"GEN 0 1", b"GEN 5 t=nan 1", b"GEN 5 96", b"GEN 5 -1", b"GEN 99999999999999 1", b"SAVE x"]
    lines = [b"", noise, long, *fields]
    out = serve(vault, b"\n".join([*lines, b"GEN 5 t=0", gen(PROMPT).encode()])).splitlines()
    assert out[:-2] == ["<<ERR bad_request>>"] * len(lines)
    assert out[-2] == "<<ERR empty_suffix>>"
    assert out[-1].endswith("fin=length <<DONE>>")


def test_overflow_has_both_numbers_or_slides(vault: Path) -> None:
    long = [int(i) for i in np.random.default_rng(4).integers(3, VOCAB, 300)]
    strict, sliding = serve(vault, gen(long, 4, GREEDY + " slide=0") + gen(long, 4)).splitlines()
    assert strict == "prompt=300 ctx=256 <<ERR ctx_overflow>>"
    assert len(ids_of(sliding)) == 4


def test_a_seed_gives_the_same_reply_whatever_ran_before(vault: Path) -> None:
    def line(seed: int) -> str:
        return gen(PROMPT, 20, f"t=1 r=1.1 seed={seed} bias=2:-1000")

    first, other, again = (ids_of(x) for x in serve(vault, line(1) + line(2) + line(1)).splitlines())
    assert first == again and first != other
    assert ids_of(serve(vault, "GEN 3 5,6\n" + line(1)).splitlines()[1]) == first
    resumed = serve(vault, gen(PROMPT + first[:7], 13, "t=1 r=1.1 seed=1 bias=2:-1000"))
    assert ids_of(resumed) == first[7:]


def test_log_probabilities_are_those_of_the_logits(vault: Path) -> None:
    engine = _core.Engine(str(vault), ctx=256)
    reply = serve(vault, gen(PROMPT, 3, GREEDY + " lp=2"))
    ids = ids_of(reply)
    logits = engine.logits([*PROMPT, *ids]).astype(np.float64)
    top_logit = logits.max(1, keepdims=True)
    want = logits - top_logit - np.log(np.exp(logits - top_logit).sum(1, keepdims=True))
    words = reply.split()
    got = [float(word[3:]) for word in words if word.startswith("lp=")]
    rows = range(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids))
    np.testing.assert_allclose(got, [want[row, token] for row, token in zip(rows, ids, strict=True)], atol=1e-4)
    tops = [[pair.split(":") for pair in word[4:].split(",")] for word in words if word.startswith("top=")]
    for row, top in zip(rows, tops, strict=True):
        assert [int(token) for token, _ in top] == list(np.argsort(-want[row])[:2])
    score = serve(vault, f"SCORE {joined(PROMPT)}\n")
    got = [float(word[3:]) for word in score.split() if word.startswith("lp=")]
    np.testing.assert_allclose(got, [want[i, token] for i, token in enumerate(PROMPT[1:])], atol=1e-4)
    assert score.endswith(" <<DONE>>\n")


def test_a_model_of_nothing_but_nan_is_an_error_not_token_0(tmp_path: Path) -> None:
    broken = TinyVault().make(tmp_path)  # random bytes where weights should be
    out = serve(broken, gen(PROMPT) + "GEN 3 t=1 7\nINFO\n").splitlines()
    assert [line.split()[-2:] for line in out[:2]] == [["<<ERR", "non_finite>>"]] * 2
    assert ids_of(out[0]) == ids_of(out[1]) == [] and json.loads(out[2])


def test_a_mask_before_each_step_constrains_the_reply(vault: Path) -> None:
    rng = np.random.default_rng(5)
    with client(vault) as it:
        it.send(gen(PROMPT, 10, "t=1 mask=1").strip())
        for _ in range(10):
            allowed = rng.permutation(np.arange(3, VOCAB))[:4]
            bits = np.packbits(np.isin(np.arange(VOCAB), allowed), bitorder="little")
            it.send("MASK " + base64.b64encode(bits.tobytes()).decode())
            reply = ""
            while not ids_of(reply):
                reply += it.read_until(" ")
            assert ids_of(reply)[0] in allowed
        assert it.read_until("<<DONE>>\n").endswith("fin=length <<DONE>>\n")


def test_stop_ids_end_a_reply_unprinted(vault: Path) -> None:
    whole = ids_of(serve(vault, gen(PROMPT)))
    cut = whole.index(whole[4])
    reply = serve(vault, gen(PROMPT, 8, GREEDY + f" stop={whole[4]}"))
    assert ids_of(reply) == whole[:cut] and reply.endswith("fin=stop <<DONE>>\n")


# -- cancelling, ending -----------------------------------------------------------------------------------------------


def test_cancel_ends_the_reply_at_once_and_leaves_a_valid_prefix(vault: Path) -> None:
    with client(vault, "--ctx", "4096") as it:
        # A short pipe: what is generated before the CANCEL arrives stays far from the window.
        assert it.process.stdout is not None
        fcntl.fcntl(it.process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        it.send("CANCEL")  # idle: must not touch the next request
        it.send(gen(PROMPT, 100_000).strip())
        head = ""
        while len(ids_of(head)) < 20:
            head += it.read_until(" ")
        start = time.monotonic()
        it.send("CANCEL")
        reply = head + it.read_until("fin=cancel <<DONE>>\n")
        assert time.monotonic() - start < 1
        ids = ids_of(reply)
        assert 20 <= len(ids) < 100_000 and field(reply, "gen") == str(len(ids))
        conversation = [*PROMPT, *ids[:15]]
        it.send(gen(conversation).strip())
        warm = it.read_until("<<DONE>>\n")
        assert field(warm, "cached") == str(len(conversation) - 1)
    assert ids_of(serve(vault, gen(conversation), "--ctx", "4096")) == ids_of(warm)


def test_cancel_during_prefill(vault: Path) -> None:
    long = [int(i) for i in np.random.default_rng(6).integers(3, VOCAB, 100_000)]
    with client(vault, "--chunk", "32") as it:
        it.send(gen(long).strip())
        it.read_until("pre=")
        start = time.monotonic()
        it.send("CANCEL")
        reply = it.read_until("<<DONE>>\n")
        assert time.monotonic() - start < 2
        assert "gen=0 " in reply and reply.endswith("fin=cancel <<DONE>>\n")


def test_a_closed_output_ends_the_engine(vault: Path) -> None:
    with client(vault) as it:
        it.send(gen(PROMPT, 1_000_000).strip())
        it.read_until(" ")
        assert it.process.stdout is not None
        it.process.stdout.close()
        assert it.process.wait(20) == 1  # its input is still open


def test_one_request_from_a_file(vault: Path, tmp_path: Path) -> None:
    want = ids_of(serve(vault, gen(PROMPT)))
    file = tmp_path / "prompt.ids"
    file.write_text("\n".join(map(str, PROMPT)) + "\n")
    flags = ["--vault", str(vault), "--ctx", "256", "--temperature", "0", "--rep-penalty", "1", "--max-tokens", "3"]
    done = run(*flags, "--tokens-in", str(file))
    assert done.returncode == 0 and ids_of(done.stdout.decode()) == want[:3]
    done = run(*flags, "--tokens-in", "-", stdin=b"5, 17, 33, 4")
    assert done.returncode == 0 and ids_of(done.stdout.decode()) == want[:3]
    done = run(*flags, "--tokens-in", "-", stdin=b"5, nothing")
    assert done.returncode == 2 and b"error: " in done.stderr


def test_instrument_speaks_on_stderr(vault: Path) -> None:
    done = run("--vault", str(vault), "--serve", "--ctx", "256", "--instrument", stdin=gen(PROMPT).encode())
    line = next(line for line in done.stderr.decode().splitlines() if line.startswith("instrument: "))
    fields = dict(word.split("=") for word in line.split()[1:])
    assert fields["gen"] == "8" and float(fields["expert_compute_ms"]) > 0
    assert b"instrument" not in done.stdout


def test_the_buckets_add_up_to_the_time_of_a_request(vault: Path) -> None:
    """Within 2%: of five requests the best, for the two clocks are read one after the other on a busy machine. With a
    cache that misses, with one that does not, with a prompt in chunks, in decode alone."""
    names = ["attention", "router", "expert_compute", "expert_wait", "head", "sampler", "other"]
    long = [5 + i % 90 for i in range(200)]
    for ring in ("6", "0"):
        for prompt, count in ((long, 1), (PROMPT, 40)):
            line = f"GEN {count} t=0 buckets=1 {','.join(map(str, prompt))}\n"
            flags = ["--vault", str(vault), "--serve", "--ctx", "256", "--chunk", "64", "--ring", ring]
            done = run(*flags, stdin=f"{line}RESET\n".encode() * 5)
            off = []
            for reply in done.stdout.decode().splitlines():
                if "buckets" in reply or "prefill_ms" not in reply:
                    continue
                counters = dict(word.split("=") for word in reply.split() if "=" in word)
                wall = float(counters["prefill_ms"]) + float(counters["decode_ms"])
                parts = [float(counters[f"{name}_ms"]) for name in names]
                assert min(parts) >= 0 and int(counters["guessed"]) >= int(counters["guessed_right"])
                off.append(abs(sum(parts) - wall) / wall)
            assert len(off) == 5 and min(off) < 0.02, off
    assert "buckets" not in done.stdout.decode()
    plain = run(*flags, stdin=gen(PROMPT).encode())
    assert b"head_ms" not in plain.stdout  # only if asked for
