"""The documents name files that exist, and learned entries that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LEARNED.md", "README.md"]
# Made by a build or a run, or a pattern of names.
NOT_IN_THE_TREE = re.compile(r"^(build/|checkpoints/|\.venv)|[<>]")


def named_paths(text: str) -> list[str]:
    """What stands in back quotes, begins with a folder of the tree and looks like a path."""
    quoted = re.findall(r"`([^`\s]+)`|`[^`\n]*?((?:engine|tests|scripts|smoe_cli|vault)/[^`\s]*)[^`\n]*`", text)
    paths = [a or b for a, b in quoted]
    return [
        p for p in paths if re.match(r"(engine|tests|scripts|smoe_cli|vault)/", p) and not NOT_IN_THE_TREE.search(p)
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_files_exist(name: str) -> None:
    missing = []
    for path in named_paths((ROOT / name).read_text(encoding="utf-8")):
        if path.startswith("vault/") and path != "vault/FORMAT.md":
            continue  # models, which are made
        if not any(ROOT.glob(path.rstrip("/.,"))):
            missing.append(path)
    assert missing == []


def test_a_missing_file_is_noticed() -> None:
    text = "see `engine/core/nothing.h` and `pytest tests/unit/test_docs.py`, `build/smoe-tests x`"
    assert named_paths(text) == ["engine/core/nothing.h", "tests/unit/test_docs.py"]


def test_every_learned_entry_is_in_the_index() -> None:
    text = (ROOT / "LEARNED.md").read_text(encoding="utf-8")
    indexed = re.findall(r"^\| \[(\S+)\]\(#(\S+)\)", text, re.MULTILINE)
    assert [a for a, _ in indexed] == [b for _, b in indexed] == re.findall(r"^## (\S+)$", text, re.MULTILINE)
