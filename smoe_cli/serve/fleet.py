"""The models a server may run: what is in the vault folder, which one is loaded, and the switch from one to another."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smoe_cli import __version__, registry
from smoe_cli.chat.launch import CHAT_WINDOW, ChatRequest, engine_spec, window_of
from smoe_cli.chat.model import ChatModel, open_model
from smoe_cli.chat.token_text import TokenText
from smoe_cli.engine.manager import EngineManager
from smoe_cli.errors import SmoeError, UsageError
from smoe_cli.registry import Vault

log = logging.getLogger("smoe")

_OPEN_MODELS = 3  # a tokenizer of a large vocabulary takes a hundred megabytes
_Key = tuple[Path, int, int]


@dataclass(frozen=True)
class Loaded:
    """A model opened for requests. ``name`` is what the API calls it, ``window`` what its engine is started with."""

    name: str
    model: ChatModel
    window: int

    @property
    def vocab(self) -> int:
        """Ids that the engine knows: the embedding may have more rows than the tokenizer has tokens."""
        rows = self.model.manifest.get("arch", {}).get("vocab")
        return int(rows) if rows else self.model.tokenizer.backend.get_vocab_size()

    @cached_property
    def thinking_switch(self) -> bool:
        return self.model.template.has_thinking_switch()

    @cached_property
    def capabilities(self) -> tuple[str, ...]:
        """In Ollama's words."""
        try:
            template = self.model.template
        except UsageError:
            return ("completion",)
        thinks = ["thinking"] if template.reasoning_tags else []
        try:
            template.for_tools()
        except UsageError:
            return ("completion", *thinks)
        return ("completion", "tools", *thinks)

    @cached_property
    def token_text(self) -> TokenText:
        return TokenText(self.model.tokenizer.backend)

    @cached_property
    def fingerprint(self) -> str:
        """Differs when another reply to the same seed is to be expected: another vault, or another smoe."""
        made = self.model.manifest.get("scout", {}), self.model.manifest.get("quant"), __version__
        return "smoe_" + hashlib.sha256(repr((self.model.id, made)).encode()).hexdigest()[:10]


class Fleet:
    """``request`` is what was asked for on the command line: model, vault folder, flags, template. Discovery and
    opening may happen in any thread; ``activate`` only where no request runs."""

    def __init__(
        self,
        request: ChatRequest,
        folder: Path,
        model_id: str | None = None,
        tokenizer: Path | None = None,
        on_switch: Callable[[], None] = lambda: None,
    ) -> None:
        self._request, self._folder, self._model_id = request, folder, model_id
        self._on_switch = on_switch
        self._lock = threading.Lock()
        self._seen: dict[_Key, Vault] = {}
        self._open: OrderedDict[_Key, Loaded] = OrderedDict()
        self._refused: set[str] = set()
        model = open_model(request.model, folder, request.template_file, tokenizer)
        self.first = model  # its path may lie anywhere: the operator named it
        self.engine = EngineManager(engine_spec(request, model))
        self._home = self.active = self._loaded(model)
        self.target = self.active  # what will be loaded when all that wait have been answered

    # -- what there is --

    def vaults(self) -> list[Vault]:
        """Those of the folder, and the one the server was started with, each read again only when its file changes."""
        with self._lock:
            found = {vault.id: vault for path in self._paths() if (vault := self._look(path)) is not None}
            named = self._look(self.first.vault)
            if named is not None and named.path != getattr(found.get(named.id), "path", None):
                found[named.id] = named
            return [found[name] for name in sorted(found)]

    def name_of(self, vault_id: str) -> str:
        """``--model-id`` renames the model the server was started with."""
        return self._model_id if self._model_id and vault_id == self.first.id else vault_id

    def find(self, label: str) -> Vault | None:
        """The vault that a request's model field means; None for one that is not there. A label is looked up in the
        list, never in the file system."""
        wanted = label.removesuffix(":latest")
        return next((v for v in self.vaults() if wanted in (v.id, self.name_of(v.id))), None)

    def open(self, label: str) -> Loaded:
        """The model that a request with this label gets: a known one, else what will be loaded when its turn comes.
        Raises what is wrong with a damaged one."""
        vault = self.find(label) if label else None
        if vault is None or vault.path == self.target.model.vault:
            return self.target
        if vault.error is not None:
            raise vault.error
        return self.load(vault)

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [path for path in sorted(self._folder.glob(f"*{registry.SUFFIX}")) if self._inside(path)]

    def _inside(self, path: Path) -> bool:
        """Whether it and what belongs to it lie in the folder, links followed."""
        stem = path.name.removesuffix(registry.SUFFIX)
        parts = [path, path.with_name(f"{stem}{registry.SCOUT_SUFFIX}"), path.with_name(f"{stem}.tokenizer")]
        linked = [part for part in parts if part.is_symlink()]
        if all(part.resolve().is_relative_to(self._folder.resolve()) for part in linked) and path.is_file():
            return True
        if path.name not in self._refused:
            self._refused.add(path.name)
            log.warning("%s leads outside the vault folder and is not offered", path.name)
        return False

    def _look(self, path: Path) -> Vault | None:
        try:
            key = _key(path)
        except OSError:
            return None
        if key not in self._seen:
            self._seen = {other: vault for other, vault in self._seen.items() if other[0] != path}
            self._seen[key] = registry.open_vault(path)
        return self._seen[key]

    # -- what is loaded --

    def activate(self, wanted: Loaded) -> None:
        """Run this model's engine from now on. When it does not start, the one before is put back and what was wrong
        is raised. Takes as long as an engine takes to start."""
        if wanted.model.vault == self.active.model.vault:
            self.engine.start()
            return
        before = self.active
        log.info("switching from %s to %s", before.name, wanted.name)
        self.engine.switch(engine_spec(self._request, wanted.model))
        self._on_switch()
        self.active = wanted
        try:
            self.engine.start()
        except SmoeError:
            self.active = before
            self.engine.switch(engine_spec(self._request, before.model))
            raise

    def check(self, name: str) -> Vault:
        """The vault for ``/admin/reload``: an id, or a path that resolves to inside the folder. UsageError
        otherwise."""
        path = Path(name)
        if path.name == name and not name.endswith(registry.SUFFIX):
            path = self._folder / f"{name}{registry.SUFFIX}"
        elif not path.is_absolute():
            path = self._folder / path
        known = {vault.path.resolve(): vault for vault in self.vaults()}
        try:
            vault = known.get(path.resolve())
        except (OSError, ValueError):  # a name too long, a loop of links, a byte that no name may hold
            vault = None
        if vault is None:
            raise UsageError(f"there is no vault {name!r} in the vault folder", param="model")
        if vault.error is not None:
            raise vault.error
        return vault

    def load(self, vault: Vault) -> Loaded:
        """Its tokenizer is checked against what the vault was made with. The last few stay open."""
        if vault.path == self.first.vault:
            return self._home
        key = _key(vault.path)
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        loaded = self._loaded(open_model(str(vault.path), self._folder))
        with self._lock:
            self._open[key] = loaded
            while len(self._open) > _OPEN_MODELS:
                self._open.popitem(last=False)
        return loaded

    def _loaded(self, model: ChatModel) -> Loaded:
        ctx = window_of(self._request, model)
        limit: Any = model.manifest.get("arch", {}).get("max_positions", CHAT_WINDOW)
        return Loaded(self.name_of(model.id), model, int(ctx) if isinstance(ctx, int) else int(limit))


def _key(path: Path) -> _Key:
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size
