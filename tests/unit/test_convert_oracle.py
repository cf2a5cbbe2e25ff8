"""What transformers itself saves, converted: names, shapes, windows, dense layers and rope against the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of

from smoe_cli.convert.checkpoint import open_checkpoint
from smoe_cli.convert.encodings import choose_roles
from smoe_cli.convert.plan import make_plan
from smoe_cli.errors import CorruptError
from smoe_cli.families.arch import resolve
from smoe_cli.families.spec import load_families, match_family

FAMILIES = [family.name for family in load_families()]
NEVER_TIED = ("kimi_linear",)  # whose head is its own whatever the config says
pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_that_transformers_saves_has_its_place(
    family: str, tied: bool, tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family, tied=tied, layers=4))
    plan = make_plan(checkpoint, "q8", choose_roles("q8"))
    if tied and family in NEVER_TIED:
        assert not plan.arch.tied_head and "the stored head is used" in plan.notices[0]
    else:
        assert plan.arch.tied_head == tied and plan.notices == []


def reference(family: str, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    return transformers.AutoConfig.for_model(family, **settings)


def ours(config: Any) -> Any:
    """The architecture of a config as transformers writes it."""
    stated = json.loads(config.to_json_string(use_diff=False))
    return resolve(match_family(stated), stated)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize("first", [0, 2, 9])
def test_windows_of_layers(family: str, first: int) -> None:
    config = reference(family, **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=first)
    expected = [7 if kind == "sliding_attention" else 0 for kind in config.layer_types]
    assert [layer.attention.window for layer in ours(config).layers] == expected
    bare = json.loads(config.to_json_string(use_diff=False))
    del bare["layer_types"]  # as written before transformers 4.53
    assert [layer.attention.window for layer in resolve(match_family(bare), bare).layers] == expected


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (3, [2]), (1, [0, 5])])
def test_dense_layers(family: str, step: int, dense: list[int]) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    torch = pytest.importorskip("torch", reason="the reference implementation")
    small = {
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "vocab_size": 8,
    }
    config = reference(family, **SIZES, **small, decoder_sparse_step=step, mlp_only_layers=dense)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert ours(config).moe_layers() == expected


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 512, "beta_fast": 24.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.25},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (1e6, 128), (500000.0, 48)])
def test_rope_frequencies_are_those_of_transformers(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    """Within two units in the last place: torch's vectorised pow is not correctly rounded, ours is."""
    pytest.importorskip("torch", reason="the reference implementation")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**rope, "rope_theta": theta}
    config = reference("llama", **SIZES, head_dim=head_dim, max_position_embeddings=1024, rope_parameters=rope)
    if rope["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        frequencies, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    found = ours(config).rope
    expected = frequencies.numpy()
    assert len(found.inv_freq) == head_dim // 2
    units = np.abs(np.array(found.inv_freq, np.float32) - expected) / np.spacing(expected)
    assert units.max() <= 2, units.max()
    assert found.scale == pytest.approx(float(scale), rel=1e-7)


def test_older_tokenizer_files_become_tokenizer_json(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """vocab.json and merges.txt only, as Qwen2 once shipped: transformers builds the same tokenizer from them."""
    from tokenizers import Tokenizer

    from smoe_cli.convert.tokenizer import MAIN, collect

    source = tiny_checkpoint("qwen2")
    stated = json.loads((source / MAIN).read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(stated["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stated["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    files = collect(tmp_path, {}, None)
    assert any("older tokenizer files" in notice for notice in files.notices)
    text = (
        "The quick brown fox, twice."  # no digits: Qwen2 takes them one by one, the tiny tokenizer was not trained so
    )
    built = Tokenizer.from_str(files.contents[MAIN].decode())
    assert built.encode(text).ids == Tokenizer.from_file(str(source / MAIN)).encode(text).ids


def test_mxfp4_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """gpt-oss as it is published: blocks and scales; gate and up every other row. Every code, many exponents."""
    torch = pytest.importorskip("torch", reason="the reference implementation")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = config_of("gpt_oss", quantization_config={"quant_method": "mxfp4"}, intermediate_size=64)
    fake, rng, packed = FakeCheckpoint(config), np.random.default_rng(0), {}
    for name in [name for name in fake.tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, cols, rows = fake.tensors.pop(name)[1]
        blocks = rng.integers(0, 256, (experts, rows, cols // 32, 16), np.uint8)
        scales = rng.integers(110, 140, (experts, rows, cols // 32), np.uint8)
        fake.tensors[f"{name}_blocks"] = ("U8", blocks.shape, blocks.tobytes())
        fake.tensors[f"{name}_scales"] = ("U8", scales.shape, scales.tobytes())
        unpacked = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        packed[name] = unpacked.numpy()  # [experts, in, out]
    plan = make_plan(open_checkpoint(fake.write(tmp_path)), "source", choose_roles("source"))
    reader = open_checkpoint(tmp_path).reader
    for record in plan.experts:
        assert set(record.encodings) == {"mxfp4"}
        layer = f"model.layers.{record.layer}.mlp.experts."
        gate_up, down = packed[layer + "gate_up_proj"][record.expert], packed[layer + "down_proj"][record.expert]
        expected = (gate_up[:, 0::2].T, gate_up[:, 1::2].T, down.T)
        for part, want in zip(record.parts, expected, strict=True):
            assert (part.read(reader, 0, part.rows) == want).all()
            assert (part.read(reader, 16, 33) == want[16:33]).all()
    del fake.tensors["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(CorruptError, match="down_proj_blocks has no scales"):
        open_checkpoint(fake.write(tmp_path))
