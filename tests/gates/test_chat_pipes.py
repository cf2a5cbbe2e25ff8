"""``smoe chat`` through pipes: one question, one answer, and what goes wrong. The engine is the scripted one.

R9, R11, R14, R15: stdout is the reply and nothing else, every failure has its exit code.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gates.chat_cli import command, engine_pids, environment, made_text
from tests.gates.terminal import Terminal
from tests.unit.fakes import FakeEngineFiles, ids


def run(folder: Path, *argv: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    more: dict[str, Any] = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        command(folder, *argv), env=environment(folder), capture_output=True, text=True, timeout=60, **more
    )


def test_one_shot_prints_only_the_reply(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("Rome 🙂 is **big**.\n")])
    done = run(tmp_path, "-p", "Italy?")
    assert (done.stdout, done.stderr, done.returncode) == ("Rome 🙂 is **big**.\n", "", 0)
    assert "\x1b" not in done.stdout


def test_a_pipe_on_stdin_is_the_question(fake: FakeEngineFiles, tmp_path: Path) -> None:
    done = run(tmp_path, stdin="What is\nthis?\n")
    assert (done.stdout, done.returncode) == ("one\n", 0)
    assert "user\nWhat is\nthis?" in made_text(fake.prompts()[0])
    assert run(tmp_path, "-p", "-", stdin="x").stdout == "two\n"
    assert run(tmp_path, stdin="").returncode == 2


def test_json_is_one_value_with_the_agreed_keys(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("Rome")], faults=[{"reply": 0, "after": 1, "kind": "signal"}])
    done = run(tmp_path, "-p", "Italy?", "--json")
    report = json.loads(done.stdout)
    keys = (
        "text reasoning finish_reason prompt_tokens cached_tokens completion_tokens ttft_ms prefill_tok_s decode_tok_s"
    )
    assert set(report) == {*keys.split(), "model"}
    assert (report["text"], report["finish_reason"], report["model"]) == ("Rome", "stop", "tiny")
    assert report["completion_tokens"] == len(ids("Rome"))
    assert "SIGKILL" in done.stderr and "\x1b" not in done.stderr


def test_what_the_engine_tells_people_goes_to_stderr(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("x")], notices=["notice: reads go through the page cache", "debug: x"])
    done = run(tmp_path, "-p", "x")
    assert (done.stdout, done.stderr) == ("x\n", "notice: reads go through the page cache\n")


def test_flags_reach_the_engine(fake: FakeEngineFiles, tmp_path: Path) -> None:
    sampling = "-n 7 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --rep-penalty 1 --seed 9"
    argv = [*sampling.split(), "--budget", "8G", "--ctx", "99"]
    assert run(tmp_path, "-p", "x", *argv).returncode == 0
    request = fake.requests()[0]
    assert request["request"].startswith("7 t=0.0 p=0.5 k=3 min_p=0.1 r=1.0 seed=9 ")
    assert ["--budget", str(8 << 30), "--ctx", "99"] == request["argv"][6:10]


def test_stop_and_raw(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("one two three")])
    assert run(tmp_path, "-p", "x", "--stop", "two").stdout == "one \n"
    assert run(tmp_path, "-p", "Once", "--raw").stdout == "one two three\n"
    assert fake.prompts()[-1] == ids("Once")
    assert run(tmp_path, "-p", "Once", "--raw", "--system", "x").returncode == 2


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--temperature", "-1"], 2),
        (["--temperature", "nan"], 2),
        (["--rep-penalty", "0"], 2),
        (["--budget", "much"], 2),
        (["--budget", "1G", "--ring", "4"], 2),
        (["--chat-template", "/nowhere.jinja"], 2),
        (["--top-p", "2"], 2),
    ],
)
def test_usage_errors_are_exit_2_and_one_line(
    fake: FakeEngineFiles, tmp_path: Path, argv: list[str], code: int
) -> None:
    done = run(tmp_path, "-p", "x", *argv)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("exit_code", "code"), [(3, 3), (4, 4), (1, 1)])
def test_an_engine_that_does_not_start_passes_its_reason_on(
    fake: FakeEngineFiles, tmp_path: Path, exit_code: int, code: int
) -> None:
    fake.write([[1]], start={"exit": exit_code, "stderr": "error: the budget is under the floor\n  give 2.0 GB"})
    done = run(tmp_path, "-p", "x")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "error: the budget is under the floor\n  give 2.0 GB\n"


def test_another_tokenizer_is_exit_4(fake: FakeEngineFiles, tmp_path: Path) -> None:
    manifest = tmp_path / "tiny.manifest.json"
    content = json.loads(manifest.read_text())
    content["tokenizer"]["files"] = {"tokenizer.json": {"bytes": 1, "sha256": "0" * 64}}
    manifest.write_text(json.dumps(content))
    done = run(tmp_path, "-p", "x")
    assert done.returncode == 4 and "tokenizer.json" in done.stderr and fake.requests() == []


def test_an_engine_that_keeps_dying_is_exit_1_with_nothing_in_the_assistants_mouth(
    fake: FakeEngineFiles, tmp_path: Path
) -> None:
    fake.write([ids("x")], faults=[{"reply": 0, "after": 0, "kind": "exit", "code": 9, "times": 2}])
    done = run(tmp_path, "-p", "x")
    assert done.returncode == 1 and done.stdout == "" and "exit code 9" in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_in_one_shot_is_130_and_leaves_no_process(
    fake: FakeEngineFiles, tmp_path: Path, more: list[str]
) -> None:
    fake.write([ids("and so on ") * 500], token_ms=20)
    child = subprocess.Popen(
        command(tmp_path, "-p", "x", *more), env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    while not fake.requests():
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 130 and "and so on" in out
    assert engine_pids(fake.folder) == []


@pytest.mark.parametrize("more", [["-p", "x"], []])
def test_ctrl_c_while_the_engine_starts_is_130_and_quiet(
    fake: FakeEngineFiles, tmp_path: Path, more: list[str]
) -> None:
    fake.write([ids("x")], start_ms=60000)
    terminal = Terminal(command(tmp_path, *more), environment(tmp_path))
    while not engine_pids(fake.folder):
        terminal.read()
    time.sleep(0.5)
    terminal.ctrl_c()
    assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.seen and engine_pids(fake.folder) == []


def test_a_reader_that_goes_away_is_quiet(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("line\n") * 2000], token_ms=0)
    line = " ".join(f"'{word}'" for word in command(tmp_path, "-p", "x")) + " | head -1"
    done = subprocess.run(["sh", "-c", line], env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("line\n", "")
    assert engine_pids(fake.folder) == []


def test_with_the_screen_redirected_there_are_no_colours_and_no_bars(fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("**one**\n\ntwo")])
    out = tmp_path / "out.txt"
    line = " ".join(f"'{word}'" for word in command(tmp_path)) + f" > {out}"
    terminal = Terminal(["sh", "-c", line], environment(tmp_path))
    terminal.wait_for("/help lists")
    terminal.enter("hello")
    while not out.exists() or "two" not in out.read_text():
        terminal.read()
    terminal.enter("/stats")
    terminal.wait_for("engine: fake")
    terminal.enter("/quit")
    assert terminal.exit_code() == 0
    assert out.read_text() == "**one**\n\ntwo\n"
