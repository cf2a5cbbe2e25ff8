"""``smoe eval``: the arithmetic on a scripted scorer, and the verb on tiny vaults."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import main
from smoe_cli.bench import quality
from smoe_cli.errors import CorruptError, UsageError

VOCAB = 7


class Table:
    """Logits that follow from the token before and how many stand before it in the window."""

    def __init__(self, seed: int) -> None:
        self.table = np.random.default_rng(seed).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)

    def logits(self, ids: Sequence[int], prefill: int | None = None) -> Any:
        depth = np.arange(len(ids), dtype=np.float32)[:, None] * np.arange(VOCAB, dtype=np.float32) * 0.01
        return self.table[list(ids)] + depth

    def score(self, ids: Sequence[int]) -> Any:
        rows = quality.log_probabilities(self.logits(ids))[:-1]
        return rows[np.arange(len(rows)), list(ids[1:])]


def quiet(total: int) -> quality.Progress:
    return quality.Progress(total, lambda text: None, "x")


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 12, 13, 40])
def test_windows_score_every_token_but_the_first_once(tokens: int) -> None:
    cut = list(quality.windows(tokens, 8))
    counted = [token for window in cut for token in range(window.first, window.end)]
    assert counted == list(range(1, tokens))
    assert all(window.end - window.start <= 8 for window in cut)
    assert all(window.first - window.start == 4 for window in cut[1:])


def test_perplexity_is_that_of_the_scores() -> None:
    ids = [1, 4, 2, 6, 0, 3, 3]
    model = Table(1)
    rows = quality.log_probabilities(model.logits(ids))
    expected = np.exp(-np.mean([rows[i, ids[i + 1]] for i in range(6)]))
    assert quality.perplexity(model, ids, 8, quiet(7)) == {"tokens": 6, "perplexity": pytest.approx(expected)}


def test_against_itself_nothing_differs_and_against_another_the_formula_holds(tmp_path: Path) -> None:
    ids = list(np.random.default_rng(3).integers(0, VOCAB, 90))
    ids = [int(token) for token in ids]
    model, other = Table(1), Table(2)
    reference = quality.Recording.record(tmp_path, model, ids, 16, quiet(90))
    same = quality.compare(model, reference, quiet(90))
    assert same["kl_mean"] == pytest.approx(0, abs=1e-3) and same["top1_agreement"] == 1
    assert same["perplexity"] == pytest.approx(quality.perplexity(model, ids, 16, quiet(90))["perplexity"])
    result = quality.compare(other, quality.Recording(tmp_path, ids, 16), quiet(90))
    p, q = (
        quality.log_probabilities(np.concatenate([quality.distributions(m, ids, w) for w in quality.windows(90, 16)]))
        for m in (model, other)
    )
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert result["kl_mean"] == pytest.approx(kl.mean(), rel=2e-3)
    assert result["kl_p99"] == pytest.approx(np.percentile(kl, 99), rel=2e-3)
    assert result["top1_agreement"] == (p.argmax(1) == q.argmax(1)).mean()
    assert result["tokens"] == 89
    said = np.arange(89), np.asarray(ids[1:])
    assert result["perplexity_ratio"] == pytest.approx(np.exp((p[said] - q[said]).mean()), rel=2e-3)
    assert (result["kl_error"], result["perplexity_ratio_error"]) == (None, None)  # two blocks of 32 cannot say


def test_the_error_of_a_mean_is_right_for_neighbours_that_are_alike() -> None:
    """Values in runs of eight: the interval holds the truth about as often as it says, where one of single values,
    a third as wide, holds it in about half of the cases."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        values = np.repeat(rng.normal(5, 1, 128), 8)
        error = quality.half_interval(list(values))
        assert error is not None
        held += abs(values.mean() - 5) <= error
    assert 0.88 * 300 < held < 0.99 * 300
    assert quality.half_interval([1.0] * 127) is None and quality.half_interval([1.0] * 128) == 0


def test_a_recording_of_something_else_is_refused(tmp_path: Path) -> None:
    ids = [1, 2, 3, 4]
    with pytest.raises(CorruptError):
        quality.Recording(tmp_path, ids, 8)
    quality.Recording.record(tmp_path, Table(1), ids, 8, quiet(4))
    for other, size in (([1, 2, 3, 5], 8), (ids, 6)):
        with pytest.raises(UsageError, match="another text or window"):
            quality.Recording(tmp_path, other, size)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(CorruptError):
        quality.Recording(tmp_path, ids, 8)


# -- the verb ---------------------------------------------------------------------------------------------------------


def smoe_eval(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", "eval", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def vaults(tiny_vault: Callable[..., tuple[Path, Path]]) -> tuple[str, str]:
    return str(tiny_vault("qwen3_moe", "f32")[1]), str(tiny_vault("qwen3_moe", "q8")[1])


def test_a_vault_against_another_and_against_a_recording(vaults: tuple[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    common = ["--text", str(text), "--window", "32"]
    plain = smoe_eval(vaults[1], *common, "--json")
    assert plain.returncode == 0, plain.stderr
    assert plain.stderr == ""
    compared = smoe_eval(vaults[1], *common, "--against", vaults[0], "--json")
    assert compared.returncode == 0, compared.stderr
    result = json.loads(compared.stdout)
    assert result["perplexity"] == pytest.approx(json.loads(plain.stdout)["perplexity"], rel=1e-5)
    assert 0 <= result["kl_mean"] < 0.1 and result["kl_mean"] <= result["kl_p99"] and result["top1_agreement"] > 0.5
    record = smoe_eval(vaults[0], *common, "--record", str(tmp_path / "reference"))
    assert record.returncode == 0 and "recorded" in record.stdout, record.stderr
    again = smoe_eval(vaults[1], *common, "--against", str(tmp_path / "reference"), "--json")
    assert json.loads(again.stdout)["kl_mean"] == pytest.approx(result["kl_mean"], abs=1e-6)


def test_refused(vaults: tuple[str, str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for argv, code, said in (
        (["--text", str(empty)], 2, "no text"),
        (["--text", str(binary)], 2, "cannot be read as text"),
        (["--against", "x", "--record", "y"], 2, "--record"),
        (["--against", "nowhere"], 2, "nowhere"),
        (["--window", "1"], 2, "--window"),
    ):
        done = smoe_eval(vaults[0], *argv)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr


def test_what_the_system_refuses_is_an_error_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(number: int) -> None:
        def run(**_: object) -> None:
            raise OSError(number, os.strerror(number), str(tmp_path))

        monkeypatch.setattr(main, "app", run)

    for number, code in ((errno.EEXIST, 1), (errno.ENOSPC, 3)):
        refuse(number)
        with pytest.raises(SystemExit) as stop:
            main.main([])
        said = capsys.readouterr()
        assert stop.value.code == code and not said.out
        assert os.strerror(number) in said.err and str(tmp_path) in said.err.replace("\n", "")
