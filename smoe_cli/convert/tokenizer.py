"""What a vault needs of a checkpoint besides weights: tokenizer files, chat template, end-of-sequence ids, generation
defaults."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoe_cli.convert.checkpoint import parse_json
from smoe_cli.convert.template_check import Rows, check_template, fits
from smoe_cli.errors import CorruptError, UsageError

MAIN, SETTINGS, GENERATION, TEMPLATE = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
COPIED = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")
# Sampling defaults that a vault carries: type, least and largest value.
GENERATION_KEYS = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, 0, 1 << 20),
    "repetition_penalty": (float, 0.01, 100.0),
}
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass
class TokenizerFiles:
    """Everything that goes into ``<stem>.tokenizer/`` (by file name) and what the manifest says of it."""

    contents: dict[str, bytes] = field(default_factory=dict)
    eos_ids: list[int] = field(default_factory=list)
    bos_id: int | None = None
    generation: dict[str, float | int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def template(self) -> str | None:
        return self.contents[TEMPLATE].decode() if TEMPLATE in self.contents else None


def read_folder(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint folder, by name."""
    names = (MAIN, GENERATION, TEMPLATE, *COPIED)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def collect(
    folder: Path, config: dict[str, Any], default_template: Path | None, texts: dict[str, bytes] | None = None
) -> TokenizerFiles:
    """The tokenizer side of a checkpoint, from the files of its folder, or from ``texts`` where they are not files.
    Without any, the vault works on ids only."""
    texts = read_folder(folder) if texts is None else texts
    files = TokenizerFiles({name: data for name, data in texts.items() if name != TEMPLATE})
    settings, generation = _json_of(texts, SETTINGS), _json_of(texts, GENERATION)
    if MAIN not in files.contents:
        _build_main(folder, files)
    template = _template(texts, settings, default_template, files)
    if template is not None:
        files.contents[TEMPLATE] = template.encode()
    ids = _token_ids(files)
    nested = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    files.eos_ids = _eos_union([config, nested or {}, generation], settings, ids)
    files.bos_id = _bos(config, settings, ids)
    files.generation = _generation(generation, files.notices)
    return files


def check(files: TokenizerFiles, vocab: int, rows: Rows) -> None:
    """Refuse a tokenizer or a template of another model. ``rows`` reads embedding rows of token ids."""
    ids = _token_ids(files)
    if beyond := sorted((token, content) for content, token in ids.items() if token >= vocab):
        some = ", ".join(f"{content!r} is {token}" for token, content in beyond[:4])
        raise CorruptError(
            f"tokenizer.json has {len(beyond)} tokens beyond the model's vocabulary of {vocab}: {some}",
            "the tokenizer belongs to another model",
        )
    if files.template is not None and MAIN in files.contents:
        settings = json.loads(files.contents.get(SETTINGS, b"{}"))
        special = {key: text for key in SPECIAL if (text := content_of(settings.get(key)))}
        files.notices += check_template(files.template, special, files.contents[MAIN], vocab, rows)


def _build_main(folder: Path, files: TokenizerFiles) -> None:
    """tokenizer.json from older files (tokenizer.model, or vocab.json and merges.txt), made by transformers."""
    if not {"tokenizer.model", "vocab.json"} & set(files.contents):
        files.notices.append("no tokenizer: the vault works on token ids only, it cannot chat")
        return
    try:
        from transformers import AutoTokenizer

        built = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str()
    except Exception as error:  # whatever the conversion needs and does not find
        raise UsageError(
            f"{folder} has no tokenizer.json, and its older tokenizer files cannot be converted: {error}",
            "save the tokenizer with transformers (AutoTokenizer ... save_pretrained) to get tokenizer.json",
        ) from error
    files.contents[MAIN] = built.encode()
    files.notices.append("no tokenizer.json: it was made from the older tokenizer files")


def _json_of(texts: dict[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(texts[name], name) if name in texts else {}


def _template(
    texts: dict[str, bytes], settings: dict[str, Any], default: Path | None, files: TokenizerFiles
) -> str | None:
    """The chat template: chat_template.jinja, then tokenizer_config.json, then the family's own in chat_templates/."""
    if TEMPLATE in texts:
        return texts[TEMPLATE].decode("utf-8", "replace")
    stated = settings.get("chat_template")
    if isinstance(stated, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, dict)}
        stated = named.get("default")
    if isinstance(stated, str) and stated.strip():
        return stated
    if default is not None and MAIN in files.contents and fits(default, files.contents[MAIN]):
        files.notices.append(f"the checkpoint ships no chat template: {default.name} is used")
        return default.read_text("utf-8")
    if MAIN in files.contents:
        files.notices.append("the checkpoint ships no chat template: chat completes plain text")
    return None


def _token_ids(files: TokenizerFiles) -> dict[str, int]:
    """Ids of tokens by content."""
    if MAIN not in files.contents:
        return {}
    try:
        tokenizer = json.loads(files.contents[MAIN])
        added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or []}
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        # A unigram model lists [token, score] pairs in id order; the others map tokens to ids.
        pairs = ((entry[0], token) for token, entry in enumerate(vocab)) if isinstance(vocab, list) else vocab.items()
        return {str(text): int(token) for text, token in pairs} | added
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptError(f"tokenizer.json cannot be read: {error}", "download it again") from error


def content_of(token: Any) -> str | None:
    """A special token's text, of either spelling in tokenizer_config.json."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _eos_union(configs: list[dict[str, Any]], settings: dict[str, Any], ids: dict[str, int]) -> list[int]:
    """End-of-sequence ids of every source, the first stated first."""
    found: list[int] = []
    for config in configs:
        stated = config.get("eos_token_id")
        for value in stated if isinstance(stated, list) else [stated]:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CorruptError(f"eos_token_id is {stated!r}, expected a token id or a list of them")
            found.append(value)
    token = content_of(settings.get("eos_token"))
    if token in ids:
        found.append(ids[token])
    return list(dict.fromkeys(found))


def _bos(config: dict[str, Any], settings: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The begin-of-sequence id: the tokenizer's word, which may be "none", before the config's."""
    if "bos_token" in settings:
        return ids.get(content_of(settings["bos_token"]) or "")
    value = config.get("bos_token_id")
    return value if isinstance(value, int) else None


def _generation(stated: dict[str, Any], notices: list[str]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for key, (kind, least, largest) in GENERATION_KEYS.items():
        value = stated.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= largest:
            notices.append(f"generation_config.json: {key} is {value!r}, which is left out")
            continue
        found[key] = kind(value)
    return found


def manifest_entry(files: TokenizerFiles) -> dict[str, Any]:
    """The manifest's ``tokenizer``: size and sha256 of each file, sha256 of the template."""
    entries = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(files.contents.items())
    }
    template = files.contents.get(TEMPLATE)
    return {"files": entries, "template_sha256": hashlib.sha256(template).hexdigest() if template is not None else None}


def write_files(files: TokenizerFiles, out_dir: Path, stem: str) -> Path:
    """Write the files to a part folder, which the writer's ``finish`` renames."""
    part = out_dir / f"{stem}.tokenizer.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, data in files.contents.items():
        (part / name).write_bytes(data)
        _fsync(part / name)
    _fsync(part)
    return part


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
