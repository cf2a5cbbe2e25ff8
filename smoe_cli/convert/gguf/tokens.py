"""A vault's tokenizer as the metadata of a GGUF: the reverse of tokenizer.py."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from smoe_cli.convert.gguf.file import STRING
from smoe_cli.convert.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    rules,
)
from smoe_cli.convert.gguf.write import BOOL, F32, I32, U8, U32, Typed
from smoe_cli.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from smoe_cli.convert.export.vault import VaultReader

IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(vault: VaultReader) -> dict[str, Typed]:
    """UnsupportedError where llama.cpp has no such tokenizer. A vault without one gives model "none"."""
    text = vault.text("tokenizer.json")
    if text is None:
        return {"tokenizer.ggml.model": Typed(STRING, "none")}
    tokenizer = json.loads(text)
    settings = json.loads(vault.text("tokenizer_config.json") or "{}")
    model = tokenizer["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        raise UnsupportedError(f"export to GGUF of a {model.get('type')} tokenizer is not supported")
    found = _pieces(tokenizer, vault.arch["vocab"])
    if model["type"] == "Unigram":
        found |= _unigram(tokenizer)
    else:
        found |= _sentencepiece(tokenizer) if model.get("byte_fallback") else _byte_level(tokenizer)
    texts: list[str] = found["tokenizer.ggml.tokens"].value
    if "tokenizer.ggml.scores" in found:
        found["tokenizer.ggml.scores"].value.extend([0.0] * (len(texts) - len(found["tokenizer.ggml.scores"].value)))
    if (unknown := _unknown(model)) is not None:
        found["tokenizer.ggml.unknown_token_id"] = Typed(U32, unknown)
    for key, name in IDS.items():
        content = settings.get(key)
        content = content.get("content") if isinstance(content, dict) else content
        if isinstance(content, str) and content in texts:
            found[f"tokenizer.ggml.{name}_token_id"] = Typed(U32, texts.index(content))
    ends = vault.manifest["eos_ids"]
    if ends:
        found["tokenizer.ggml.eos_token_id"] = Typed(U32, ends[0])
    if len(ends) > 1:
        found["tokenizer.ggml.eot_token_id"] = Typed(U32, ends[1])
    single = (tokenizer.get("post_processor") or {}).get("single") or []
    found["tokenizer.ggml.add_bos_token"] = Typed(BOOL, bool(single) and "SpecialToken" in single[0])
    template = vault.text("chat_template.jinja")
    if template:
        found["tokenizer.chat_template"] = Typed(STRING, template)
    return found


def _pieces(tokenizer: dict[str, Any], vocab: int) -> dict[str, Typed]:
    """Every row of the embedding has a token; those that the tokenizer does not have are unused."""
    texts = [f"[PAD{token}]" for token in range(vocab)]
    types = [UNUSED] * vocab
    fallback = tokenizer["model"].get("byte_fallback", False)
    for text, token in _vocab(tokenizer["model"]).items():
        is_byte = fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[token], types[token] = text, BYTE if is_byte else NORMAL
    if (unknown := _unknown(tokenizer["model"])) is not None:
        types[unknown] = UNKNOWN
    for added in tokenizer.get("added_tokens") or []:
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return {"tokenizer.ggml.tokens": Typed(STRING, texts), "tokenizer.ggml.token_type": Typed(I32, types)}


def _vocab(model: dict[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    return vocab if isinstance(vocab, dict) else {text: token for token, (text, _) in enumerate(vocab)}


def _unknown(model: dict[str, Any]) -> int | None:
    """The piece that stands for what no piece is."""
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return _vocab(model).get(model.get("unk_token") or "")


def _merges(tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for merge in tokenizer["model"]["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        found.append((left, right))
    return found


def _regexes(step: Any) -> list[str] | None:
    """The rule of a pre-tokenizer; None where it is not one of regular expressions before bytes."""
    steps = step.get("pretokenizers", [step]) if isinstance(step, dict) else []
    found: list[str] = []
    gpt2 = rules()["gpt-2"]["split"][0]
    for each in steps:
        if each["type"] == "Split" and each.get("behavior") == "Isolated" and "Regex" in each.get("pattern", {}):
            found.append(each["pattern"]["Regex"])
        elif each["type"] == "Digits" and each.get("individual_digits"):
            found.append(r"\p{N}")
        elif each["type"] == "ByteLevel":
            found += [gpt2] if each.get("use_regex", True) else []
        else:
            return None
    return found


def _byte_level(tokenizer: dict[str, Any]) -> dict[str, Typed]:
    stated = _regexes(tokenizer.get("pre_tokenizer"))
    ignore = bool(tokenizer["model"].get("ignore_merges", False))
    fitting = [
        name for name, rule in rules().items() if rule["split"] == stated and rule.get("ignore_merges", False) == ignore
    ] or [name for name, rule in rules().items() if rule["split"] == stated]
    if not fitting:
        raise UnsupportedError("the tokenizer cuts a text by a rule that llama.cpp has no name for")
    nfc = (tokenizer.get("normalizer") or {}).get("type") == "NFC"
    name = next((name for name in fitting if rules()[name].get("nfc", False) == nfc), fitting[0])
    merges = [f"{left} {right}" for left, right in _merges(tokenizer)]
    return {
        "tokenizer.ggml.model": Typed(STRING, "gpt2"),
        "tokenizer.ggml.pre": Typed(STRING, name),
        "tokenizer.ggml.merges": Typed(STRING, merges),
    }


def _unigram(tokenizer: dict[str, Any]) -> dict[str, Typed]:
    """Pieces with their own scores, and the normaliser's table where there is one."""
    if tokenizer["model"].get("byte_fallback"):
        raise UnsupportedError("the tokenizer is a unigram one with byte fallback, which llama.cpp does not have")
    normalizer, cut = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    known = {"Precompiled", "Strip", "Replace"}
    if cut.get("type") != "Metaspace" or cut.get("replacement") != SPACE or {step["type"] for step in steps} - known:
        raise UnsupportedError("the tokenizer prepares a text by a rule that llama.cpp does not have")
    found = {
        "tokenizer.ggml.model": Typed(STRING, "t5"),
        "tokenizer.ggml.pre": Typed(STRING, "default"),
        "tokenizer.ggml.scores": Typed(F32, [float(score) for _, score in tokenizer["model"]["vocab"]]),
        "tokenizer.ggml.add_space_prefix": Typed(BOOL, cut.get("prepend_scheme", "always") != "never"),
        "tokenizer.ggml.remove_extra_whitespaces": Typed(BOOL, any(step["type"] == "Replace" for step in steps)),
    }
    for step in steps:
        if step["type"] == "Precompiled":
            table = base64.b64decode(step["precompiled_charsmap"])
            found["tokenizer.ggml.precompiled_charsmap"] = Typed(U8, list(table))
    return found


def _sentencepiece(tokenizer: dict[str, Any]) -> dict[str, Typed]:
    """Scores in the order of the merges: the piece that is made first has the highest."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if not any(step.get("type") == "Replace" and step.get("content") == SPACE for step in steps):
        raise UnsupportedError("the tokenizer has byte fallback without SentencePiece's spaces, which is not supported")
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    size = max([*vocab.values(), *(added["id"] for added in tokenizer.get("added_tokens") or [])]) + 1
    ranks: dict[str, int] = {}
    for left, right in _merges(tokenizer):
        ranks.setdefault(left + right, len(ranks))
    scores = [0.0] * size
    for text, token in vocab.items():
        if token >= size:
            raise CorruptError("tokenizer.json has tokens beyond its vocabulary")
        scores[token] = -float(ranks.get(text, len(ranks)))
    prefix = any(step.get("type") == "Prepend" for step in steps)
    return {
        "tokenizer.ggml.model": Typed(STRING, "llama"),
        "tokenizer.ggml.pre": Typed(STRING, "default"),
        "tokenizer.ggml.scores": Typed(F32, scores),
        "tokenizer.ggml.add_space_prefix": Typed(BOOL, prefix),
    }
