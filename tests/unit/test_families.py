"""Family files and what they resolve to. Against transformers itself: test_convert_oracle.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import CONFIGS, config_of

from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError
from smoe_cli.families.arch import arch_json, resolve, trunk_tensors
from smoe_cli.families.spec import FOLDER, load_families, match_family, parse_family


def arch_of(family: str, drop: tuple[str, ...] = (), **more: Any) -> Any:
    config = config_of(family, **more)
    for key in drop:
        del config[key]
    return resolve(match_family(config), config)


def test_the_families_of_first_light_are_there() -> None:
    names = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}
    assert {family.name for family in load_families()} == names


def test_unknown_family_lists_what_there_is() -> None:
    with pytest.raises(UnsupportedError, match="'gpt_oss'") as caught:
        match_family({"model_type": "gpt_oss"})
    assert "qwen3_moe" in caught.value.hint


def test_architectures_decide_where_model_type_is_missing() -> None:
    assert match_family({"architectures": ["OlmoeForCausalLM"]}).name == "olmoe"


@pytest.mark.parametrize(
    ("find", "put", "message"),
    [
        ('hidden = "hidden_size"', "", "missing hidden"),
        ('block = "gqa"', 'block = "mamba"', "'mamba' is not one of"),
        ('hidden = "hidden_size"', 'hidden = { kee = "hidden_size" }', "expected a config key"),
        ('name = "llama"', 'name = "llama"\nnmae = 1', "unknown keys nmae"),
        ('default_from = "heads"', 'default_from = "tails"', "unknown default_from"),
        ("[config]", "[config", "llama.toml"),
    ],
)
def test_a_wrong_family_file_says_what_and_where(find: str, put: str, message: str) -> None:
    text = (FOLDER / "llama.toml").read_text()
    assert find in text
    with pytest.raises(SmoeError, match=r"llama\.toml") as caught:
        parse_family(text.replace(find, put, 1), "llama.toml")
    assert message in caught.value.text


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", -5), ("num_hidden_layers", 1 << 40), ("vocab_size", "96"), ("hidden_size", 1.5),
     ("hidden_size", True), ("num_key_value_heads", 3), ("rms_norm_eps", "small")],
)  # fmt: skip
def test_absurd_numbers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(CorruptError, match=r"config\.json"):
        arch_of("llama", **{key: value})


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_a_missing_number_is_named(key: str) -> None:
    with pytest.raises(CorruptError, match=key):
        arch_of("llama", drop=(key,))


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(CorruptError, match="5 experts per token of 4"):
        arch_of("mixtral", num_experts_per_tok=5)


def test_what_no_block_computes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mlp_bias"):
        arch_of("llama", mlp_bias=True)
    with pytest.raises(UnsupportedError, match="gelu"):
        arch_of("llama", hidden_act="gelu")


def test_a_dense_layer_in_a_family_without_one() -> None:
    with pytest.raises(CorruptError, match="layer 0 dense"):
        arch_of("olmoe", num_experts=0)


def test_head_dim_is_stated_or_follows() -> None:
    assert arch_of("llama").layers[0].attention.head_dim == 16
    assert arch_of("llama", head_dim=24).layers[0].attention.head_dim == 24
    assert arch_of("mixtral", head_dim=None).layers[0].attention.head_dim == 16
    assert arch_of("llama", num_key_value_heads=None).layers[0].attention.kv_heads == 4


def test_either_name_of_the_expert_count() -> None:
    config = config_of("qwen3_moe", num_local_experts=4)
    del config["num_experts"]
    assert resolve(match_family(config), config).layers[0].ffn.experts == 4


# -- layers -----------------------------------------------------------------------------------------------------------


def windows(family: str, **more: Any) -> list[int]:
    return [layer.attention.window for layer in arch_of(family, num_hidden_layers=4, **more).layers]


def test_sliding_windows_per_layer() -> None:
    assert windows("mistral") == [16] * 4
    assert windows("mistral", sliding_window=None) == [0] * 4
    assert windows("mixtral") == [0] * 4
    assert windows("mixtral", sliding_window=9) == [9] * 4
    assert windows("llama", sliding_window=9) == [0] * 4
    on = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    assert windows("qwen2", **on) == [0, 0, 9, 9]
    assert windows("qwen2", **{**on, "use_sliding_window": False}) == [0] * 4
    assert windows("qwen2_moe", **on) == [9, 0, 0, 0]
    assert windows("qwen3_moe", **on) == [9] * 4
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows("qwen3", layer_types=types, **on) == [0, 9, 9, 0]
    with pytest.raises(UnsupportedError, match="chunked"):
        windows("qwen3", layer_types=["chunked_attention"] * 4, **on)


def test_mistral_takes_its_documented_window_where_the_key_is_missing() -> None:
    config = config_of("mistral")
    del config["sliding_window"]
    assert resolve(match_family(config), config).layers[0].attention.window == 4096


def test_dense_layers_between_routed_ones() -> None:
    assert arch_of("qwen2_moe").moe_layers() == [0, 2]
    assert arch_of("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2).moe_layers() == [1, 3, 5]
    assert arch_of("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).moe_layers() == [1, 5]
    assert arch_of("qwen3_moe", num_experts=0).moe_layers() == []


def test_router_weights_are_normalised_as_the_family_says() -> None:
    assert arch_of("mixtral").layers[0].ffn.normalize
    assert not arch_of("olmoe").layers[0].ffn.normalize
    assert arch_of("olmoe", norm_topk_prob=True).layers[0].ffn.normalize


def test_biases_where_the_family_has_them() -> None:
    def biases(family: str, **more: Any) -> set[str]:
        names = [tensor.name for tensor in trunk_tensors(arch_of(family, **more))]
        return {name.split(".")[3] for name in names if name.endswith(".bias")}

    assert biases("llama") == {"q", "k", "v", "o"}
    assert biases("llama", attention_bias=False) == set()
    assert biases("qwen2") == {"q", "k", "v"}
    assert biases("qwen2_moe", qkv_bias=False) == set()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_needed_tensor_has_a_source_name(family: str) -> None:
    arch = arch_of(family)
    names = [match_family(config_of(family)).source_name(tensor.name) for tensor in trunk_tensors(arch)]
    assert len(set(names)) == len(names) > 20


# -- rope (C9) --------------------------------------------------------------------------------------------------------


def test_theta_inside_rope_parameters_is_found() -> None:
    plain = arch_of("llama", rope_theta=5e5).rope
    nested = arch_of("llama", drop=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope
    assert nested == plain
    assert plain.inv_freq[0] == 1.0 and np.isclose(plain.inv_freq[1], 5e5 ** (-1 / 8))


def test_theta_is_never_defaulted_silently() -> None:
    with pytest.raises(CorruptError, match="rope_theta"):
        arch_of("qwen3", drop=("rope_theta",))
    arch = arch_of("mixtral", drop=("rope_theta",))
    assert any("1e+06" in notice for notice in arch.notices)
    assert arch.rope == arch_of("mixtral", rope_theta=1e6).rope
    assert arch_of("mixtral").notices == ()


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_both_spellings_of_the_type(place: str, spelling: str) -> None:
    linear = arch_of("llama", **{place: {spelling: "linear", "factor": 4.0}}).rope
    plain = arch_of("llama").rope
    assert np.allclose(np.array(linear.inv_freq) * 4, plain.inv_freq)


def test_unsupported_rope_types_are_named() -> None:
    with pytest.raises(UnsupportedError, match="'longrope'"):
        arch_of("llama", rope_scaling={"type": "longrope", "factor": 4.0})
    with pytest.raises(UnsupportedError, match="per layer type"):
        arch_of("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e4}})
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        arch_of("llama", partial_rotary_factor=0.5)
    with pytest.raises(CorruptError, match="'factor'"):
        arch_of("llama", rope_scaling={"type": "linear"})


def test_dynamic_equals_default_up_to_the_original_length() -> None:
    assert arch_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}).rope == arch_of("llama").rope


def test_yarn_stretches_the_positions_and_scales_attention() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    rope = arch_of("llama", rope_scaling=yarn).rope
    assert rope.max_positions == 1024
    assert np.isclose(rope.scale, 0.1 * np.log(4) + 1)
    assert rope.inv_freq[-1] < arch_of("llama").rope.inv_freq[-1]


# -- manifest ---------------------------------------------------------------------------------------------------------


def test_floats_come_back_as_the_same_float32() -> None:
    arch = arch_of("qwen3_moe", rms_norm_eps=1e-5)
    layers = {index: {"gate": "q8_0", "up": "q8_0", "down": "q8_0"} for index in arch.moe_layers()}
    stated = arch_json(arch, layers)
    assert np.float32(stated["norm_eps"]) == np.float32(1e-5)
    assert stated["layers"][0]["attention"]["scale"] == float(str(np.float32(32**-0.5)))
    frequencies = stated["ropes"][0]["inv_freq"]
    assert len(frequencies) == 16 and all(float(str(np.float32(value))) == value for value in frequencies)


# -- tied heads (C8) --------------------------------------------------------------------------------------------------


def test_tied_heads_also_in_a_nested_config() -> None:
    assert not arch_of("llama").tied_head
    assert arch_of("llama", tie_word_embeddings=True).tied_head
    assert arch_of("llama", text_config={"tie_word_embeddings": True}).tied_head
    assert "head.weight" not in {tensor.name for tensor in trunk_tensors(arch_of("llama", tie_word_embeddings=True))}
