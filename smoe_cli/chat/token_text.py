"""A single token as text and bytes, for those who look at tokens one by one."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

from smoe_cli.chat.detokenize import BYTE_OF

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """``bytes_of(id)``: what the token adds to a text in which it is not the first; control tokens as they are written.
    The bytes of tokens joined are the text, where a single token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        stages = spec.get("decoders", [spec])
        self._kinds = {stage.get("type") for stage in stages}
        self._space = next((stage["replacement"] for stage in stages if stage.get("type") == "Metaspace"), "\u2581")

    def bytes_of(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._kinds:
            return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()
        if "ByteFallback" in self._kinds and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(self._space, " ").encode()

    def text_of(self, token: int) -> str:
        """Bytes that are no whole characters come as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", errors="replace")
