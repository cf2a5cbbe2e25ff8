"""Moved to smoe_cli.bench.machine."""

from smoe_cli.bench.machine import *  # noqa: F403
