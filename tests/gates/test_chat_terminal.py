"""``smoe chat`` driven as a person does: in a terminal emulator, and through pipes. The engine is the scripted one.

R9, R14, R15, and point 7 of the first issue: the editor, the live meters, the commands, Ctrl-C, a killed engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gates.terminal import Terminal
from tests.unit import fakes
from tests.unit.fakes import FakeEngineFiles, ids

DRIVER = Path(__file__).with_name("chat_driver.py")


@pytest.fixture
def fake(tmp_path: Path) -> FakeEngineFiles:
    files = FakeEngineFiles(tmp_path / "engine")
    files.write([ids("one"), ids("two")])
    fakes.vault(tmp_path)
    return files


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "SMOE_MODEL", "SMOE_VAULT_DIR")}
    return {
        **kept,
        "SMOE_ENGINE": str(folder / "engine" / "fake-engine"),
        "PYTHONPATH": str(fakes.ROOT),
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(folder / "state"),
    }


def command(folder: Path, *argv: str) -> list[str]:
    return [sys.executable, str(DRIVER), str(folder), "chat", *argv]


@pytest.fixture
def open_chat(fake: FakeEngineFiles, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        terminal = Terminal(command(tmp_path, *argv), environment(tmp_path))
        opened.append(terminal)
        terminal.wait_for("/help lists the commands")
        terminal.wait_for_prompt()
        return terminal

    yield start
    for terminal in opened:
        terminal.child.close(force=True)


def engine_pids(folder: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"smoe_cli.engine.fake --script {folder}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_a_typed_line_a_streamed_reply_and_meters(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂 東京 is **big**.")], token_ms=100, chunk=4, prefill_ms=150)
    terminal = open_chat()
    terminal.enter("What is the capital of Italy?")
    terminal.wait_until_seen("prefill", "Ctrl-C stops", "tok/s", "first token", "context", "RAM")
    terminal.wait_for("Rome 🙂", "東京", "is big.")  # drawn as Markdown
    terminal.wait_for("cache hits 90%", "disk", "GB/s", "prompt", "cached")
    terminal.wait_for_prompt()
    assert "Ctrl-C stops" not in terminal.text  # the live meters are gone
    assert "\ufffd" not in terminal.seen
    prompts = [line.split("prefill ")[1].split()[0] for line in terminal.seen.splitlines() if "prefill " in line]
    sizes = {prompt.split("/")[1] for prompt in prompts}
    assert sizes == {str(len(fake.prompts()[0]))} and len(set(prompts)) > 1


def test_the_second_turn_is_warm(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    terminal = open_chat()
    terminal.enter("first")
    terminal.wait_for("one")
    terminal.wait_for_prompt()
    terminal.enter("second")
    terminal.wait_for("two")
    terminal.wait_for_prompt()
    first, second = fake.prompts()
    assert second[: len(first) + len(ids("one"))] == first + ids("one")
    assert f"{len(first) + len(ids('one'))} cached" in terminal.text


def test_ctrl_c_stops_the_reply_only_and_twice_leaves(
    open_chat: Callable[..., Terminal], fake: FakeEngineFiles
) -> None:
    fake.write([ids("and so on") * 200, ids("still here")], token_ms=20)
    terminal = open_chat()
    terminal.enter("count")
    terminal.wait_for("and so on")
    pid = engine_pids(fake.folder)
    terminal.ctrl_c()
    terminal.wait_for("stopped")
    terminal.wait_for_prompt()
    terminal.enter("are you there?")
    terminal.wait_for("still here")
    terminal.wait_for_prompt()
    assert engine_pids(fake.folder) == pid and len(pid) == 1
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.ctrl_c()
    terminal.wait_for("Ctrl-C again to leave")
    terminal.wait_for_prompt()
    assert len(fake.requests()) == 2  # the half line was cleared, not sent
    terminal.ctrl_c()
    assert terminal.exit_code() == 130
    assert engine_pids(fake.folder) == []


def test_ctrl_c_during_prefill(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    fake.write([ids("one"), ids("two")], chunk=1, prefill_ms=200)
    terminal = open_chat()
    terminal.enter("a question of some length, so that it takes its time")
    terminal.wait_until_seen("prefill")
    terminal.ctrl_c()
    terminal.wait_for("stopped")
    terminal.wait_for_prompt()
    terminal.enter(f"/save {fake.folder}/talk.json")
    terminal.wait_for("saved 0 messages")


def test_one_ctrl_c_at_the_prompt_does_not_count_with_a_later_one(open_chat: Callable[..., Terminal]) -> None:
    terminal = open_chat()
    terminal.ctrl_c()
    terminal.wait_for("again to leave")
    terminal.wait_for_prompt()
    terminal.enter("hello")
    terminal.wait_for("one")
    terminal.wait_for_prompt()
    terminal.ctrl_c()
    terminal.wait_for_prompt()
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_a_killed_engine_is_named_restarted_and_retried(
    open_chat: Callable[..., Terminal], fake: FakeEngineFiles
) -> None:
    fake.write([ids("The capital is Rome.")], token_ms=150)
    terminal = open_chat()
    terminal.enter("Italy?")
    terminal.wait_for("The")
    os.kill(engine_pids(fake.folder)[0], signal.SIGKILL)
    terminal.wait_for("SIGKILL", "out-of-memory", "started again")
    terminal.wait_for("The capital is Rome.")
    terminal.wait_for_prompt()
    assert terminal.text.count("The capital is Rome.") == 1
    assert len(fake.requests()) == 2


def test_what_is_told_during_a_long_paragraph_is_not_drawn_over(
    open_chat: Callable[..., Terminal], fake: FakeEngineFiles
) -> None:
    words = "".join(f"word{n} " for n in range(600))  # more than a screen in one block
    fake.write(
        [ids(words)], token_ms=0, ctx=32768, faults=[{"reply": 0, "after": len(ids(words)) - 200, "kind": "signal"}]
    )
    terminal = open_chat()
    terminal.enter("go")
    terminal.wait_for("SIGKILL", "word599")
    terminal.wait_for_prompt()
    assert "started again" in " ".join(terminal.text.split())
    assert [terminal.text.count(f"word{n} ") + terminal.text.count(f"word{n}\n") for n in range(600)] == [1] * 600


def test_a_turn_that_fails_twice_leaves_the_history_and_the_next_works(
    open_chat: Callable[..., Terminal], fake: FakeEngineFiles
) -> None:
    fault = {"reply": 0, "after": 1, "kind": "signal", "times": 2, "stderr": "last words"}
    fake.write([ids("one"), ids("two")], faults=[fault])
    terminal = open_chat()
    terminal.enter("doomed")
    terminal.wait_for("error:", "SIGKILL", "tried 2 times", "last words")
    terminal.wait_for_prompt()
    terminal.enter("next")
    terminal.wait_for_prompt()
    terminal.wait_for("one")
    assert "doomed" not in made_text(fake.prompts()[-1])


def made_text(prompt: list[int]) -> str:
    from tests.unit import tokenizers_made

    return str(tokenizers_made.byte_level().decode(prompt))


def test_the_commands(open_chat: Callable[..., Terminal], fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("one"), ids("two"), ids("three"), ids("four")])
    terminal = open_chat("--system", "Be brief.")

    def do(line: str, *words: str) -> None:
        terminal.enter(line)
        terminal.wait_for(*words)
        terminal.wait_for_prompt()

    do("/help", *["/model", "/system", "/reset", "/regen", "/edit", "/save", "/load", "/stats", "/quit"])
    do("/system", "system: Be brief.")
    do("hello", "one")
    do("/regen", "two")
    assert fake.prompts()[0] == fake.prompts()[1]
    assert "system\nBe brief." in made_text(fake.prompts()[0])
    do("/stats", "last turn:", "engine: fake")
    saved = tmp_path / "talk.json"
    do(f"/save {saved}", "saved 2 messages")
    do("/reset", "forgotten")
    do(f"/load {saved}", "loaded 2 messages")
    terminal.enter("/edit")
    terminal.wait_for_prompt()
    terminal.enter(" again")  # appended to what is in the editor: hello
    terminal.wait_for("three")
    terminal.wait_for_prompt()
    assert made_text(fake.prompts()[-1]).count("user\n") == 1
    assert "user\nhello again" in made_text(fake.prompts()[-1])
    do("/system Be long.", "system: Be long.")
    do("/nonsense", "no command /nonsense")
    do("/save", "which file?")
    do("/load /nowhere.json", "cannot be read")
    assert len(fake.requests()) == 3
    do(" /etc is a folder", "four")
    terminal.enter("/quit")
    assert terminal.exit_code() == 0


def test_switching_the_model(open_chat: Callable[..., Terminal], fake: FakeEngineFiles, tmp_path: Path) -> None:
    other = fakes.vault(tmp_path / "more", id="other")
    for part in other.parent.iterdir():
        part.rename(tmp_path / part.name.replace("tiny", "other"))
    terminal = open_chat()
    terminal.enter("hello")
    terminal.wait_for("one")
    terminal.wait_for_prompt()
    terminal.enter("/model other")
    terminal.wait_for("now talking to other")
    terminal.wait_for_prompt()
    terminal.enter("more")
    terminal.wait_for("two")
    argv = [entry["argv"][3] for entry in fake.requests()]
    assert [Path(path).stem for path in argv] == ["tiny", "other"]


def test_several_lines_and_history_over_runs(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    terminal = open_chat()
    terminal.type("first line\x1b\rsecond line")
    terminal.wait_for("second line")
    assert fake.requests() == []
    terminal.enter("")
    terminal.wait_for("one")
    terminal.wait_for_prompt()
    assert "user\nfirst line\nsecond line<" in made_text_with_specials(fake.prompts()[0])
    terminal.enter("/quit")
    assert terminal.exit_code() == 0
    again = open_chat()
    again.type("\x1b[A\x1b[A")  # up: /quit; up: the two lines
    again.wait_for("first line", "second line")


def made_text_with_specials(prompt: list[int]) -> str:
    from tests.unit import tokenizers_made

    return str(tokenizers_made.byte_level().decode(prompt, skip_special_tokens=False))


def test_keys_typed_during_a_reply_do_not_disturb_it_and_are_not_lost(
    open_chat: Callable[..., Terminal], fake: FakeEngineFiles
) -> None:
    fake.write([ids("a reply of some length"), ids("two")], token_ms=80)
    terminal = open_chat()
    terminal.enter("hello")
    terminal.wait_for("a reply")
    terminal.type("typed ahead")
    terminal.wait_for("a reply of some length")
    terminal.wait_for("> typed ahead")
    assert terminal.text.count("typed ahead") == 1


def test_long_code_and_html_are_shown_whole(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    code = (
        "```python\n" + "".join(f"line_{n} = {n}\n" for n in range(60)) + "```\n\nand <b>not bold</b>.\n\n<div>a</div>"
    )
    fake.write([ids(code)], token_ms=0)
    terminal = open_chat()
    terminal.enter("code")
    terminal.wait_for_prompt()
    terminal.wait_for("line_0 = 0", "line_59 = 59", "<b>not bold</b>", "<div>a</div>")
    for n in range(60):
        assert terminal.text.count(f"line_{n} = {n}\n") + terminal.text.count(f"line_{n} = {n} ") == 1


# -- pipes --


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
