"""Moved to smoe_cli.bench.cgroup."""

import sys

from smoe_cli.bench.cgroup import *  # noqa: F403
from smoe_cli.bench.cgroup import main

if __name__ == "__main__":
    sys.exit(main())
