"""--guard: a program is asked about each turn; whatever is wrong with it, the turn proceeds."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from smoe_cli.errors import UsageError
from smoe_cli.serve.guard import Guard

ASK = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


def guard(folder: Path, body: str, time_s: float = 20.0) -> Guard:
    script = folder / "guard.py"
    script.write_text("import json, sys\nturn = json.load(sys.stdin)\n" + body)
    return Guard(f"{sys.executable} {script}", time_s)


def answers(folder: Path, answer: object) -> Guard:
    return guard(folder, f"print({json.dumps(json.dumps(answer))})")


def test_it_sees_the_turn_and_may_let_it_proceed(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    asked = guard(tmp_path, f"open({str(seen)!r}, 'w').write(json.dumps(turn))\nprint('{{\"action\": \"proceed\"}}')")
    verdict = asked.ask("tiny", ASK, [{"type": "function"}])
    assert (verdict.messages, verdict.reply) == (ASK, None)
    assert json.loads(seen.read_text()) == {"model": "tiny", "messages": ASK, "tools": [{"type": "function"}]}


def test_rephrase_changes_the_last_message_only(tmp_path: Path) -> None:
    verdict = answers(tmp_path, {"action": "rephrase", "text": "hello"}).ask("tiny", ASK)
    assert verdict.messages == [ASK[0], {"role": "user", "content": "hello"}] and verdict.reply is None
    assert ASK[1]["content"] == "hi"


def test_pause_answers_once_and_end_answers_all_that_follows(tmp_path: Path) -> None:
    paused = answers(tmp_path, {"action": "pause", "message": "A moment."})
    assert (paused.ask("tiny", ASK).reply, paused.ask("tiny", ASK).ended) == ("A moment.", False)
    ending = guard(tmp_path, "print(json.dumps({'action': 'end' if len(turn['messages']) == 2 else 'proceed', "
                   "'message': 'Goodbye.'}))")  # fmt: skip
    first = ending.ask("tiny", ASK)
    assert (first.reply, first.ended) == ("Goodbye.", True)
    more = [*ASK, {"role": "assistant", "content": "Goodbye."}, {"role": "user", "content": "please"}]
    assert (ending.ask("tiny", more).reply, ending.ask("tiny", more).ended) == ("Goodbye.", True)
    another = [ASK[0], {"role": "user", "content": "other"}, *more[2:]]
    assert ending.ask("tiny", another).reply is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("raise ValueError('broken')", "broken"),
        ("print('no JSON')", "not a JSON object"),
        ("print('[1]')", "not a JSON object"),
        ('print(\'{"action": "dance"}\')', "dance"),
        ('print(\'{"action": "rephrase", "text": 3}\')', "rephrase"),
        ("import time; time.sleep(30)", "took longer"),
    ],
)
def test_a_failure_means_proceed_and_is_logged(
    tmp_path: Path, body: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "smoe"):
        verdict = guard(tmp_path, body, 20 if "sleep" not in body else 0.5).ask("tiny", ASK)
    assert (verdict.messages, verdict.reply) == (ASK, None)
    assert words in caplog.text and "the turn proceeds" in caplog.text


@pytest.mark.parametrize("command", ["", "no-such-program --x", "'unclosed"])
def test_a_command_that_cannot_be_run_is_refused_at_the_start(command: str) -> None:
    with pytest.raises(UsageError, match="--guard"):
        Guard(command)
