"""``smoe chat`` driven as a person does: in a terminal emulator, and through pipes. The engine is the scripted one.

R9, R14, R15, and point 7 of the first issue: the editor, the live meters, the commands, Ctrl-C, a killed engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gates.chat_cli import command, engine_pids, environment, made_text, made_text_with_specials
from tests.gates.terminal import Terminal
from tests.unit import fakes
from tests.unit.fakes import FakeEngineFiles, ids


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


def test_a_second_ctrl_c_leaves_an_engine_that_hangs(open_chat: Callable[..., Terminal], fake: FakeEngineFiles) -> None:
    fake.write([ids("one two")], faults=[{"reply": 0, "after": 2, "kind": "hang"}])
    terminal = open_chat()
    terminal.enter("hello")
    terminal.wait_for_tokens(2)
    pid = engine_pids(fake.folder)
    terminal.ctrl_c()
    terminal.read(1)
    assert "stopped" not in terminal.text
    terminal.ctrl_c()
    terminal.wait_for("stopped")
    terminal.wait_for_prompt()
    terminal.enter("again")
    terminal.wait_for("one two")
    assert engine_pids(fake.folder) != pid


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
