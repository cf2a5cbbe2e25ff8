"""A vault's tokenizer: text to ids, with people's text kept apart from control tokens.

``tokenizer.json`` is the truth, read by the tokenizers library itself: importing transformers takes most of a second.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from smoe_cli.errors import CorruptError, UnsupportedError

# Left alone by the repetition penalty: a text without them is not a text. Newline and end tokens come on top.
PUNCTUATION = [*".,!?;:'\"()[]{}<>/-*#`_=+|&%$@~^\\", "\u2019", "\u201c", "\u201d", "\u2014", "\u2013", "\u2026"]
NEWLINES = ["\n", "\n\n", "\r\n", "\t"]

_ANCHOR = "\U0010fffd"  # a stand-in control token, so that a piece is encoded as one that follows a control token


class TextTokenizer:
    """``folder`` holds tokenizer.json and, usually, tokenizer_config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedError(f"there is no tokenizer.json in {folder}", "convert the checkpoint again with one")
        try:
            self.backend: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CorruptError(f"{path} cannot be read: {error}", "convert the checkpoint again") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.config = _read_json(folder / "tokenizer_config.json")
        # "<|im_end|>" -> AddedToken; special or not, these are matched in a text before anything else
        self.added: dict[str, AddedToken] = {
            token.content: token for token in self.backend.get_added_tokens_decoder().values()
        }
        self.special_tokens = self._special_tokens()

    def id_of(self, token: str) -> int | None:
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    def marker_id(self, text: str) -> int | None:
        """The id of a text that is an added token: it is matched before anything else, and is never spelled."""
        return self.id_of(text) if text in self.added else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        ids = (self.id_of(content) for content, token in self.added.items() if token.special)
        return frozenset(token for token in ids if token is not None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which control tokens count as such; nothing is put before or after it."""
        return _ids(self.backend, text)

    def encode_document(self, text: str) -> list[int]:
        """Ids of a bare text, with what the tokenizer itself puts around it, and one BOS at most."""
        ids = _ids(self.backend, text, special=True)
        bos = self.id_of(self.special_tokens.get("bos_token", ""))
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def encode_marked(self, text: str, marker: str, control: ControlTokens) -> list[int]:
        """Ids of a rendered chat in which people's control tokens carry ``marker`` inside and so match nothing.

        The text is cut at the template's own control tokens; each piece that holds a marker is encoded, without it, by
        a tokenizer that knows no control tokens.
        """
        if marker not in text:
            return self.encode(text)
        ids: list[int] = []
        at = 0
        for match in control.pattern.finditer(text):
            ids += self._piece(text[at : match.start()], marker, control, at > 0)
            ids.append(control.ids[match[match.lastindex or 0]])
            at = match.end()
        return ids + self._piece(text[at:], marker, control, at > 0)

    def _piece(self, piece: str, marker: str, control: ControlTokens, follows_control: bool) -> list[int]:
        if not piece:
            return []
        if marker not in piece:
            before = self._anchor if follows_control else ""
            return self.encode(before + piece)[1 if before else 0 :]
        ids = control.encode_plain(piece.replace(marker, ""), follows_control)
        if control.id_set.isdisjoint(ids):
            return ids
        # A vocabulary that holds its control tokens as ordinary pieces: only cutting them keeps them apart.
        parts = [control.encode_plain(part, True) for part in piece.split(marker) if part]
        return [token for part in parts for token in part]

    @cached_property
    def _anchor(self) -> str:
        """Any special token: put before a piece and cut off again, it makes the piece one that is not at the start."""
        return next((content for content, token in self.added.items() if token.special and not token.rstrip), "")

    def exempt_ids(self, eos_ids: list[int]) -> list[int]:
        """Ids the repetition penalty leaves alone: common punctuation and newlines that are one token, end tokens."""
        exempt = set(eos_ids)
        for text in [*PUNCTUATION, *NEWLINES]:
            for variant in (text, " " + text):
                ids = self.encode(variant)
                exempt.update(ids if len(ids) == 1 else [])
            token = self.id_of(text)  # SentencePiece gives "▁." for a lone "."; the bare piece is another token
            exempt.update([] if token is None else [token])
        return sorted(exempt)

    def _special_tokens(self) -> dict[str, str]:
        """``bos_token`` and the like, as templates see them."""
        named = {**_read_json(self.folder / "special_tokens_map.json"), **self.config}
        plain = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return {key: value for key, value in plain.items() if key.endswith("_token") and isinstance(value, str)}


class ControlTokens:
    """The added tokens that a chat template may write and people may not, and a tokenizer that does not know them."""

    def __init__(self, tokenizer: TextTokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        tokens = {
            content: token
            for content, token in tokenizer.added.items()
            if _is_control(content, token.special, template)
        }
        self.ids: dict[str, int] = {content: tokenizer.id_of(content) or 0 for content in tokens}
        self.id_set = frozenset(self.ids.values())
        longest_first = sorted(tokens.values(), key=lambda token: len(token.content), reverse=True)
        pattern = "|".join(_with_strips(token) for token in longest_first)
        self.pattern = re.compile(pattern or "(?!)")
        self._beginnings = {content[:n] for content in tokens for n in range(1, len(content))}
        self._longest = max(map(len, self._beginnings), default=0)
        self.bare = re.compile("|".join(re.escape(token.content) for token in longest_first) or "(?!)")

    def mark(self, text: str, marker: str) -> str:
        """``text`` with ``marker`` put inside every control token, and after a tail that a template could complete."""
        marked = text
        while self.bare.search(marked):  # tokens may overlap: breaking one can leave another
            marked = self.bare.sub(lambda match: match[0][0] + marker + match[0][1:], marked)
        body = marked.rstrip()
        unfinished = any(body[-n:] in self._beginnings for n in range(1, min(self._longest, len(body)) + 1))
        return body + marker + marked[len(body) :] if unfinished else marked

    def encode_plain(self, text: str, follows_control: bool) -> list[int]:
        plain, renumber = self._plain
        start = [plain.token_to_id(_ANCHOR)] if follows_control else []
        ids = _ids(plain, (_ANCHOR if follows_control else "") + text)
        return [renumber.get(token, token) for token in ids[len(start) :]]

    @cached_property
    def _plain(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer without its control tokens, and how its ids of the other added tokens map to the real ones."""
        spec = json.loads(self._tokenizer.backend.to_str())
        kept = [token for token in spec["added_tokens"] if token["content"] not in self.ids]
        spec.update(added_tokens=kept, post_processor=None)
        plain = Tokenizer.from_str(json.dumps(spec))
        plain.add_special_tokens([AddedToken(_ANCHOR, normalized=False)])
        return plain, {int(plain.token_to_id(token["content"]) or 0): int(token["id"]) for token in kept}


def _is_control(content: str, special: bool, template: str) -> bool:
    """Special tokens, and others that look like markup or that the template writes; never a run of spaces or a word."""
    looks = len(content) > 2 and (content[0], content[-1]) in (("<", ">"), ("[", "]"), ("|", "|"))
    return len(content) > 1 and (special or (not content.isspace() and (looks or content in template)))


def _with_strips(token: AddedToken) -> str:
    """A token that swallows white space beside it does so here too; the group holds the token itself."""
    return (r"\s*" if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")


def check_lineage(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse a tokenizer that is not the one the vault was made with. Raises CorruptError, naming the file."""
    for name, recorded in manifest.get("tokenizer", {}).get("files", {}).items():
        path = folder / name
        if not path.is_file():
            raise CorruptError(f"{path} is missing, which the vault was made with", "convert the checkpoint again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != recorded["sha256"]:
            raise CorruptError(
                f"{path} is not the file the vault was made with", "put the original back, or convert again"
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptError(f"{path} is not JSON: {error}", "convert the checkpoint again") from error
    return content if isinstance(content, dict) else {}


def _ids(backend: Tokenizer, text: str, special: bool = False) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=special).ids)
    except TypeError:  # which is what it makes of half a surrogate pair
        text.encode()  # UnicodeEncodeError
        raise
