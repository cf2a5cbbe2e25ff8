"""Gate: the engine built for 64-bit Arm, under emulation, says what this machine's own says, to the bit of each
log-probability. Run by scripts/check_arm.sh, which builds it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from smoe_cli import _core
from smoe_cli.engine.process import engine_path

pytestmark = pytest.mark.arm

ARM = Path(__file__).parents[2] / "build-arm" / "smoe-engine"
NATIVE = [name for name in _core.isas() if name != "scalar"][-1:]


def ask(argv: list[str], vault: Path, isa: str, *flags: str) -> list[str]:
    """The words of a reply: greedy tokens with their log-probabilities, without the counters."""
    ids = ",".join(str(i) for i in np.random.default_rng(1).integers(3, 320, 70))
    command = [*argv, "--vault", str(vault), "--serve", "--isa", isa, "--ctx", "256", "--threads", "2", *flags]
    request = f"GEN 24 t=0 r=1 lp=2 {ids}\n"
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "<<DONE>>" in done.stdout, done.stderr
    words = done.stdout.split()
    return [word for word in words if word.isdecimal() or word.startswith(("lp=", "top="))]


@pytest.fixture(scope="module", params=["q8_0", "q4_0", "q4_k", "q5_1", "mxfp4", "iq4_nl", "mlx3_g32_f16"])
def vault(request: pytest.FixtureRequest, tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    roles = ("expert.down=q8_0",) if request.param == "q4_k" else ()
    return tiny_vault("qwen3_moe", request.param, roles, seed=11, layers=3, **every_layer)[1]


@pytest.mark.parametrize(("isa", "cpu"), [("neon", "cortex-a53"), ("neon-dot", "max")])
def test_arm_says_what_this_machine_says(vault: Path, isa: str, cpu: str) -> None:
    emulated = ["qemu-aarch64", "-cpu", cpu, str(ARM)]
    expected = ask([str(engine_path())], vault, NATIVE[0])
    assert len(expected) >= 10 * 3
    assert ask(emulated, vault, isa) == expected
    assert ask(emulated, vault, isa, "--ring", "6", "--chunk", "32", "--threads", "3") == expected
    assert ask(emulated, vault, isa, "--draft", "ngram:8") == expected


def test_a_processor_without_dot_products_refuses_them(vault: Path) -> None:
    emulated = ["qemu-aarch64", "-cpu", "cortex-a53", str(ARM), "--vault", str(vault), "--serve", "--isa", "neon-dot"]
    done = subprocess.run(emulated, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "neon-dot" in done.stderr
