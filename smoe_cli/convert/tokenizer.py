"""What a vault needs of a checkpoint besides weights: tokenizer files, chat template, end-of-sequence ids, generation
defaults, and the checks that the template and the tokenizer belong together."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoe_cli.convert.checkpoint import read_json
from smoe_cli.errors import UsageError

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
TEMPLATE = "chat_template.jinja"
GENERATION_KEYS = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float}


@dataclass
class TokenizerFiles:
    """Everything that goes into ``<stem>.tokenizer/`` and what the manifest says of it."""

    sources: dict[str, Path] = field(default_factory=dict)
    template: str | None = None
    eos_ids: list[int] = field(default_factory=list)
    bos_id: int | None = None
    generation: dict[str, float | int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.sources


def collect(folder: Path, config: dict[str, Any], default_template: Path | None) -> TokenizerFiles:
    """Read the tokenizer side of a checkpoint folder. Without one, the vault works on ids only."""
    files = TokenizerFiles({name: folder / name for name in COPIED if (folder / name).is_file()})
    settings = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in files.sources else {}
    generation = read_json(folder / "generation_config.json") if "generation_config.json" in files.sources else {}
    if not files.has_tokenizer:
        files.notices.append("no tokenizer.json: the vault works on token ids only, it cannot chat")
    files.template = _template(folder, settings, default_template, files)
    ids = _token_ids(files)
    nested = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    files.eos_ids = _eos_union([config, nested or {}, generation], settings, ids)
    files.bos_id = _bos(config, settings, ids)
    files.generation = _generation(generation)
    return files


def _template(folder: Path, settings: dict[str, Any], default: Path | None, files: TokenizerFiles) -> str | None:
    """The chat template: chat_template.jinja, then tokenizer_config.json, then the family's own in chat_templates/."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text("utf-8")
    stated = settings.get("chat_template")
    if isinstance(stated, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, dict)}
        stated = named.get("default")
    if isinstance(stated, str) and stated.strip():
        return stated
    if default is not None and files.has_tokenizer:
        files.notices.append(f"the checkpoint ships no chat template: {default.name} is used")
        return default.read_text("utf-8")
    return None


def _token_ids(files: TokenizerFiles) -> dict[str, int]:
    """Ids of the added (special) tokens by content."""
    if not files.has_tokenizer:
        return {}
    tokenizer = read_json(files.sources["tokenizer.json"])
    found = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or []}
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict):
        found = {**vocab, **found}
    return found


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _eos_union(configs: list[dict[str, Any]], settings: dict[str, Any], ids: dict[str, int]) -> list[int]:
    """End-of-sequence ids of every source, the first stated first."""
    found: list[int] = []
    for config in configs:
        stated = config.get("eos_token_id")
        for value in stated if isinstance(stated, list) else [stated]:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"eos_token_id is {stated!r}, expected a token id or a list of them")
            found.append(value)
    token = _content(settings.get("eos_token"))
    if token in ids:
        found.append(ids[token])
    return list(dict.fromkeys(found))


def _bos(config: dict[str, Any], settings: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The begin-of-sequence id: the tokenizer's word, which may be "none", before the config's."""
    if "bos_token" in settings:
        return ids.get(_content(settings["bos_token"]) or "")
    value = config.get("bos_token_id")
    return value if isinstance(value, int) else None


def _generation(stated: dict[str, Any]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for key, kind in GENERATION_KEYS.items():
        value = stated.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            found[key] = kind(value)
    return found


def part_dir(out_dir: Path, stem: str) -> Path:
    return out_dir / f"{stem}.tokenizer.part"


def write_files(files: TokenizerFiles, out_dir: Path, stem: str) -> dict[str, Any]:
    """Copy the files to a part folder; the manifest's ``tokenizer`` entry. The writer's ``finish`` renames it."""
    part = part_dir(out_dir, stem)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, source in files.sources.items():
        shutil.copyfile(source, part / name)
    if files.template is not None:
        (part / TEMPLATE).write_text(files.template, "utf-8")
    entries = {}
    for path in sorted(part.iterdir()):
        data = path.read_bytes()
        entries[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        _fsync(path)
    _fsync(part)
    template = hashlib.sha256(files.template.encode()).hexdigest() if files.template is not None else None
    return {"files": entries, "template_sha256": template}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
