"""The only reader of environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def model() -> str | None:
    """SMOE_MODEL: the vault a command uses when none is named."""
    return os.environ.get("SMOE_MODEL") or None


def vault_dir() -> Path:
    """SMOE_VAULT_DIR: the folder of vaults, ``vault/`` by default."""
    return Path(os.environ.get("SMOE_VAULT_DIR") or "vault")
