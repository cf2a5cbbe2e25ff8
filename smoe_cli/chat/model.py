"""A vault opened for conversation: its name, tokenizer, chat template and generation defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smoe_cli.chat.detokenize import Detokenizer
from smoe_cli.chat.grammar import Vocabulary
from smoe_cli.chat.template import REASONING_TAGS, ChatTemplate, load_template
from smoe_cli.chat.tokenizer import TextTokenizer, check_lineage
from smoe_cli.chat.tools import harmony
from smoe_cli.chat.tools.choose import KINDS
from smoe_cli.errors import UsageError


@dataclass(frozen=True)
class ChatModel:
    """``manifest`` is the vault's own (see vault/FORMAT.md); the tokenizer folder lies beside the ``.smoe``."""

    id: str
    vault: Path
    manifest: dict[str, Any]
    tokenizer: TextTokenizer
    template_file: Path | None = None

    @cached_property
    def template(self) -> ChatTemplate:
        """Loaded when it is first asked for: a model without one still answers bare text."""
        return load_template(self.tokenizer, self.template_file)

    @property
    def template_source(self) -> str:
        """Empty for a model without one, and for one that cannot be used."""
        try:
            return self.template.source
        except UsageError:
            return ""

    @property
    def eos_ids(self) -> list[int]:
        return list(self.manifest.get("eos_ids", []))

    @property
    def generation(self) -> dict[str, Any]:
        return dict(self.manifest.get("generation") or {})

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as grammars need them. Made when the first constrained reply is asked for, which takes a second or
        more."""
        size = self.manifest.get("arch", {}).get("vocab", self.tokenizer.backend.get_vocab_size())
        markers = {*harmony.MARKERS, *(marker for kind in KINDS for marker in kind.markers)}
        markers |= {tag for tags in REASONING_TAGS for tag in tags}
        markup = (self.tokenizer.marker_id(marker) for marker in markers)
        ends = [*self.eos_ids, *self.template.turn_end_ids]
        return Vocabulary(self.tokenizer, size, ends, (token for token in markup if token is not None))

    def detokenizer(self, keep: tuple[str, ...] = ()) -> Detokenizer:
        """Special tokens leave no text, but for those in ``keep``, which a parser looks for; of these the ones that
        are a token come with ``CONTROL`` before them."""
        ids = (self.tokenizer.id_of(token) for token in keep if token in self.tokenizer.added)
        kept = frozenset(token for token in ids if token is not None)
        return Detokenizer(self.tokenizer.backend, self.tokenizer.special_ids - kept, kept)


def open_model(
    model: str | None,
    folder: Path | None = None,
    template_file: Path | None = None,
    tokenizer_dir: Path | None = None,
) -> ChatModel:
    """Find the vault, check that it is whole, read its tokenizer, which is the one beside it unless another folder is
    given. Raises UsageError for a name that is none, and CorruptError for a vault or a tokenizer that is not what it
    was when the vault was made."""
    from smoe_cli import registry

    vault = registry.resolve(model, folder)
    tokenizer_dir = tokenizer_dir or vault.tokenizer_dir
    check_lineage(tokenizer_dir, vault.manifest)
    return ChatModel(vault.id, vault.path, vault.manifest, TextTokenizer(tokenizer_dir), template_file)
