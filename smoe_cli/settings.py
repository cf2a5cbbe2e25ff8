"""The only reader of environment variables."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def model() -> str | None:
    """SMOE_MODEL: the vault a command uses when none is named."""
    return os.environ.get("SMOE_MODEL") or None


def vault_dir() -> Path:
    """SMOE_VAULT_DIR: the folder of vaults, ``vault/`` by default."""
    return Path(os.environ.get("SMOE_VAULT_DIR") or "vault")


def chat_templates() -> Path:
    """smoe's own chat templates: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for base in (package, package.parent) if (folder := base / "chat_templates").is_dir())


def engine() -> Path | None:
    """SMOE_ENGINE: another engine executable than the one built with this package."""
    path = os.environ.get("SMOE_ENGINE")
    return Path(path) if path else None


def api_key() -> str | None:
    """SMOE_API_KEY: the key that clients of ``smoe serve`` must send."""
    return os.environ.get("SMOE_API_KEY") or None


def admin_token() -> str | None:
    """SMOE_ADMIN_TOKEN: what ``smoe serve --admin`` asks of those who switch models by hand."""
    return os.environ.get("SMOE_ADMIN_TOKEN") or None


def ledger() -> Path:
    """The file in which this user's engines tell each other what memory they take: below XDG_RUNTIME_DIR, else in a
    folder of the user's own among the temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "smoe" if runtime else Path(tempfile.gettempdir()) / f"smoe-{os.getuid()}"
    with contextlib.suppress(OSError):  # the engine says what is wrong with it, and plans without
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / "engines"


def history(vault: Path) -> Path:
    """The file in which engines keep how often each expert of a vault is used: beside the vault, or below the state
    folder where its own may not be written."""
    beside = vault.with_suffix(".usage")
    if os.access(beside if beside.exists() else vault.parent, os.W_OK) and os.access(vault.parent, os.W_OK):
        return beside
    folder = state_dir() / "usage"
    with contextlib.suppress(OSError):  # the engine says what is wrong with it, and starts cold the next time
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{vault.stem}-{hashlib.sha256(str(vault.resolve()).encode()).hexdigest()[:16]}.usage"


def state_dir() -> Path:
    """Where smoe remembers things between runs, such as the line history: XDG_STATE_HOME, else ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "smoe"
