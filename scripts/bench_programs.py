"""Moved to smoe_cli.bench.programs."""

from smoe_cli.bench.programs import *  # noqa: F403
