"""The Typer app. Commands are imported when they run; the one place where an error becomes an exit code."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from smoe_cli import __version__
from smoe_cli.errors import EngineError, ResourceError, SmoeError

# name -> (module, one line of help). A command module defines ``app``, a function typed for Typer, called ``command``.
COMMANDS = {
    "convert": ("smoe_cli.commands.convert", "Turn a checkpoint into a vault."),
    "export": ("smoe_cli.commands.export", "Write a vault as GGUF, MLX or safetensors."),
    "plan": ("smoe_cli.commands.plan", "Show the memory plan of a model on this machine."),
    "chat": ("smoe_cli.commands.chat", "Talk to a model in the terminal."),
    "serve": ("smoe_cli.commands.serve", "Answer OpenAI, Anthropic and Ollama clients over HTTP."),
    "list": ("smoe_cli.commands.list", "List the vaults found."),
    "verify": ("smoe_cli.commands.verify", "Check every byte of a vault."),
    "bench": ("smoe_cli.commands.bench", "Measure a model's speed on this machine."),
    "sweep": ("smoe_cli.commands.sweep", "Compare engine settings, and keep the best."),
    "replay": ("smoe_cli.commands.replay", "Try cache policies and sizes on a recorded routing trace."),
    "eval": ("smoe_cli.commands.eval", "Measure a model's quality on a text."),
}


# Some releases of Typer carry a Click of their own, so Click's classes are reached through Typer only.
ClickException: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class LazyGroup(TyperGroup):
    """Imports a command's module only when that command is run or completed: ``smoe --help`` answers at once."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command's name and help line only: what a list of commands shows."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        return (name, load(name), args[1:]) if name in COMMANDS else super().resolve_command(ctx, args)


def load(name: str) -> Any:
    """The whole command, its module imported."""
    module, help_line = COMMANDS[name]
    sub = typer.Typer(add_completion=False)
    sub.command(name=name, help=help_line)(importlib.import_module(module).command)
    command = typer.main.get_command(sub)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Mixture-of-experts models larger than memory, from disk.",
)


def _version(value: bool) -> None:
    if value:
        print(f"smoe {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def fail(error: SmoeError) -> int:
    """Print an error for a person, on stderr, and return its exit code."""
    from smoe_cli import console

    console.error(error)
    return error.exit_code


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what it came from: a compiled module that is stopped while it loads says ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def main(argv: list[str] | None = None) -> Any:
    """Run the command line; every outcome is an exit code."""
    try:
        code = app(args=argv, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except SmoeError as error:
        sys.exit(fail(error))
    except ImportError as error:
        if _interrupted(error):
            sys.exit(130)
        if "_core" not in str(error):
            raise
        sys.exit(fail(EngineError(f"the compiled part of smoe does not load: {error.msg}", "build it: make build")))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a file or folder that a command was given, and that the system refuses
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = f"{where}{error.strerror or error}"
        sys.exit(fail(ResourceError(text, "free some space") if full else SmoeError(text)))


if __name__ == "__main__":
    main()
