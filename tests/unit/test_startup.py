"""``smoe --help`` and ``--version`` answer at once: nothing heavy is imported for them, nor for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = (
    "fastapi",
    "uvicorn",
    "starlette",
    "psutil",
    "transformers",
    "torch",
    "numpy",
    "tokenizers",
    "llguidance",
    "gguf",
    "prompt_toolkit",
    "smoe_cli._core",
)


def smoe(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "smoe_cli", *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["--no-such-flag"], ["no-such-verb"]]
    + [[verb, "--help"] for verb in ("chat", "convert", "list", "verify", "bench", "serve")],
)
def test_nothing_heavy_is_imported(argv: list[str]) -> None:
    script = (
        "import sys\nfrom smoe_cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_help_answers_within_0_3_s() -> None:
    def cpu_seconds() -> float:
        before = os.times()
        assert smoe("--help").returncode == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_seconds() for _ in range(5)) <= 0.3  # it waits for nothing, so on an idle machine this is its time


def test_help_lists_the_verbs() -> None:
    help_text = smoe("--help").stdout
    assert all(verb in help_text for verb in ("convert", "plan", "chat", "list", "verify"))


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["no-such-verb"], ["chat", "--ctx", "many"], []])
def test_a_usage_mistake_is_exit_2_without_a_traceback(argv: list[str]) -> None:
    done = smoe(*argv)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_missing_compiled_module_is_named() -> None:
    without = "import sys; sys.modules['smoe_cli._core'] = None; from smoe_cli.main import main; main(['list'])"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "make build" in done.stderr
