from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer

from smoe_cli.commands.options import engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError


def run(*argv: str) -> tuple[str | None, int, EngineFlags]:
    got: list[Any] = []

    @engine_flags
    def command(
        model: Annotated[str | None, typer.Argument()] = None,
        count: Annotated[int, typer.Option("-n")] = 3,
        engine: EngineFlags = EngineFlags(),
    ) -> None:
        got.append((model, count, engine))

    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app)(list(argv), standalone_mode=False)
    result: tuple[str | None, int, EngineFlags] = got[0]
    return result


def test_nothing_given_leaves_the_engines_defaults() -> None:
    assert run() == (None, 3, EngineFlags())
    assert EngineFlags().argv() == []


def test_every_flag_reaches_the_engine() -> None:
    given = ["--budget", "8G", "--ctx", "512", "--threads", "2", "--io", "pread", "--buffered", "--isa", "avx2"]
    given += ["--verify-reads", "--spec", "4", "--activations", "float", "--kv", "f32", "--experts-per-token", "2"]
    given += ["--sessions", "3", "--instrument"]
    model, count, engine = run("m", "-n", "5", *given)
    assert (model, count) == ("m", 5)
    assert engine.argv() == [str(8 << 30) if word == "8G" else word for word in given]


def test_ring_zero_and_direct_are_passed_on() -> None:
    assert run("--ring", "0", "--direct")[2].argv() == ["--ring", "0", "--direct"]
    assert run("--workers", "4")[2].argv() == ["--workers", "4"]


@pytest.mark.parametrize("ctx", ["many", "0", "-4", "1.5"])
def test_a_window_is_a_number_or_max(ctx: str) -> None:
    assert run("--ctx", "max")[2].argv() == ["--ctx", "max"]
    with pytest.raises(UsageError, match="ctx"):
        run("--ctx", ctx)


def test_budget_and_ring_together_are_refused() -> None:
    with pytest.raises(UsageError, match="budget"):
        run("--budget", "8G", "--ring", "4")
