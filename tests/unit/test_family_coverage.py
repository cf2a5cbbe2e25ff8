"""Every model type of the installed transformers that has a mixture of experts and generates text is either a family
here or stands in the table of those that are left, with what it lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smoe_cli.families.spec import load_families

ROOT = Path(__file__).parents[2]
MIXTURE = re.compile(r"^class \w*(Experts|SparseMoeBlock|MoE|MoeBlock|TopKGating)\w*\(", re.MULTILINE)
DEFINED = re.compile(r"^class (\w+)\(", re.MULTILINE)


def left() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.split("## Families that are left")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def ours() -> set[str]:
    return {model_type for family in load_families() for model_type in family.model_types}


def mixtures() -> set[str]:
    transformers = pytest.importorskip("transformers", reason="what is counted are the models of transformers")
    from transformers.models.auto import modeling_auto as auto

    known: dict[str, bool] = {}  # class name -> its file has a mixture
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text("utf-8")
        known |= dict.fromkeys(DEFINED.findall(text), MIXTURE.search(text) is not None)
    maps = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    found = {model_type: name for each in maps for model_type, name in each.items()}
    return {t for t, name in found.items() if known[name if isinstance(name, str) else name[0]]}


def test_no_family_is_forgotten() -> None:
    types = mixtures()
    assert len(types) > 80, "the mixtures are recognised"
    assert types - ours() == set(left())


def test_the_table_names_each_once_and_none_that_is_here() -> None:
    names = left()
    assert len(names) == len(set(names))
    assert not set(names) & ours()
