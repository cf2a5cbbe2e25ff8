"""Family files and what they resolve to. Against transformers itself: test_convert_oracle.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import CONFIGS, config_of

from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError
from smoe_cli.families.arch import arch_json, resolve, trunk_tensors
from smoe_cli.families.spec import FOLDER, load_families, match_family, parse_family, parse_toml


def arch_of(family: str, drop: tuple[str, ...] = (), **more: Any) -> Any:
    config = config_of(family, **more)
    for key in drop:
        del config[key]
    return resolve(match_family(config), config)


def test_every_file_is_a_family_of_its_name() -> None:
    names = [family.name for family in load_families()]
    assert names == sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"} < set(names)
    types = [model_type for family in load_families() for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_unknown_family_lists_what_there_is() -> None:
    with pytest.raises(UnsupportedError, match="'gpt_neverwas'") as caught:
        match_family({"model_type": "gpt_neverwas"})
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
        ('block = "gqa"', 'block = "gqa"\nsinc = true', "unknown keys sinc"),
        ('"model.norm.weight"', '{ name = "model.norm.weight", take = "third" }', "'third' is not one of"),
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
    assert arch_of("mixtral").layers[0].ffn.router.normalize
    assert not arch_of("olmoe").layers[0].ffn.router.normalize
    assert arch_of("olmoe", norm_topk_prob=True).layers[0].ffn.router.normalize


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
    sources = [match_family(config_of(family)).source(tensor.name) for tensor in trunk_tensors(arch)]
    assert len(set(sources)) == len(sources) > 20


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
    with pytest.raises(UnsupportedError, match="'spiral'"):
        arch_of("llama", rope_scaling={"type": "spiral", "factor": 4.0})
    with pytest.raises(CorruptError, match="short_factor"):
        arch_of("llama", rope_scaling={"type": "longrope", "original_max_position_embeddings": 128})
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


# -- what a family has that its nearest relative has not ---------------------------------------------------------------

PHI_ROPE = {
    "type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1.0 + i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "short_mscale": 1.25, "long_mscale": 1.5,
}  # fmt: skip


def ffn_of(family: str, **more: Any) -> Any:
    return arch_of(family, **more).layers[-1].ffn


def test_a_base_gives_its_tables_and_what_is_stated_comes_on_top() -> None:
    base = 'name = "b"\n[config]\nwidth = "w"\nheads = "h"\n[moe]\nscores = "sigmoid"\n'
    child = 'name = "c"\nbase = "b"\nmodel_types = ["c"]\n[config]\nwidth = ""\nheads = "n"\n'
    merged = parse_toml(child, "c.toml", lambda file: {"b.toml": base}[file])
    assert merged["config"] == {"heads": "n"} and merged["moe"] == {"scores": "sigmoid"} and merged["name"] == "c"
    assert match_family({"model_type": "dots1"}).chat_template == "", "a field of the base is not inherited"


def test_shared_experts_are_a_number_of_experts_or_a_width() -> None:
    assert ffn_of("glm4_moe").shared_width == 2 * 32
    assert ffn_of("glm4_moe", n_shared_experts=None).shared_width == 0
    assert ffn_of("ernie4_5_moe").shared_width == 2 * 32
    assert ffn_of("hunyuan_v1_moe").shared_width == 32
    assert ffn_of("granitemoeshared").shared_width == 48


def test_routers_of_the_sigmoid_families() -> None:
    router = ffn_of("glm4_moe").router
    assert (router.scores, router.correction, router.normalize, router.groups) == ("sigmoid", True, True, 1)
    assert not ffn_of("dots1").router.normalize, "normalised in its relative, not here"
    assert ffn_of("dots1", norm_topk_prob=True).router.normalize
    deep = ffn_of("deepseek_v3").router
    assert (deep.groups, deep.top_groups, deep.group_score, deep.scaling) == (2, 1, "best_two", 2.5)
    assert ffn_of("deepseek_v3", n_group=None, topk_group=None).router.groups == 1
    softmax = ffn_of("deepseek_v2").router
    assert (softmax.scores, softmax.correction, softmax.normalize) == ("softmax", False, False)
    assert softmax.groups == 1, "greedy by default, whatever n_group says"
    assert ffn_of("deepseek_v2", topk_method="group_limited_greedy").router.group_score == "best"
    assert ffn_of("ernie4_5_moe").router.norm_floor == 1e-12
    assert ffn_of("phimoe").router.jitter == 0.01 and ffn_of("phimoe", router_jitter_noise=0.2).router.jitter == 0.2
    with pytest.raises(CorruptError, match="2 of 4 experts from 1 of 4 groups"):
        ffn_of("deepseek_v3", n_group=4)


def test_what_a_family_requires_is_refused_otherwise() -> None:
    with pytest.raises(UnsupportedError, match="scoring_func 'softmax'"):
        arch_of("deepseek_v3", scoring_func="softmax")
    with pytest.raises(UnsupportedError, match="topk_method 'noaux_tc'"):
        arch_of("deepseek_v2", topk_method="noaux_tc")
    with pytest.raises(UnsupportedError, match="use_cla"):
        arch_of("hunyuan_v1_moe", use_cla=True)
    with pytest.raises(UnsupportedError, match="kv_lora_rank is not a multiple of 16"):
        arch_of("deepseek_v3", kv_lora_rank=40)


def test_one_number_for_each_layer() -> None:
    arch = arch_of("hunyuan_v1_moe", moe_topk=[2, 1, 2], moe_intermediate_size=[32, 32, 32], num_shared_expert=[1] * 3)
    assert [layer.ffn.top_k for layer in arch.layers] == [2, 1, 2]
    with pytest.raises(UnsupportedError, match="num_shared_expert"):
        arch_of("hunyuan_v1_moe", num_shared_expert=[1, 2, 1])


def test_dense_layers_first_last_and_by_name() -> None:
    assert arch_of("glm4_moe").moe_layers() == [1, 2]
    assert arch_of("glm4_moe", first_k_dense_replace=0).moe_layers() == [0, 1, 2]
    assert arch_of("ernie4_5_moe", num_hidden_layers=5, moe_layer_end_index=3).moe_layers() == [1, 2, 3]
    assert arch_of("ernie4_5_moe", num_hidden_layers=5, moe_layer_interval=2).moe_layers() == [1, 3]
    assert arch_of("glm4_moe_lite").moe_layers() == [1, 2]
    types = ["sparse", "dense", "sparse"]
    assert arch_of("glm4_moe_lite", mlp_layer_types=types).moe_layers() == [0, 2]


def test_rotation_of_a_part_and_in_pairs() -> None:
    assert len(arch_of("glm4_moe").rope.inv_freq) == 4, "half of sixteen, by default"
    assert len(arch_of("minimax_m2", rotary_dim=12).rope.inv_freq) == 6
    assert len(arch_of("minimax_m2").rope.inv_freq) == 8
    assert arch_of("ernie4_5_moe").rope.interleaved and not arch_of("glm4_moe").rope.interleaved
    assert arch_of("deepseek_v3").rope.interleaved
    assert not arch_of("deepseek_v3", rope_interleave=False).rope.interleaved
    assert len(arch_of("deepseek_v3").rope.inv_freq) == 4, "of the rotated part, not of the head"


def test_norms_of_q_and_k() -> None:
    assert arch_of("glm4_moe").layers[0].attention.qk_norm == "none"
    assert arch_of("glm4_moe", use_qk_norm=True).layers[0].attention.qk_norm == "head"
    assert arch_of("dots1").layers[0].attention.qk_norm == "head"
    assert arch_of("minimax_m2").layers[0].attention.qk_norm == "full"
    assert arch_of("hunyuan_v1_moe").layers[0].attention.norm_after_rope
    assert not arch_of("dots1").layers[0].attention.norm_after_rope


def test_multipliers() -> None:
    more = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8}
    arch = arch_of("granitemoe", **more)
    assert (arch.embed_scale, arch.residual_scale, arch.logit_scale) == (12.0, 0.22, 0.125)
    assert arch.layers[0].attention.scale == 0.1
    assert arch_of("granitemoe").layers[0].attention.scale == 1.0, "not the head's size: the multiplier's default"
    stated = arch_json(arch, {})
    assert stated["logit_scale"] == 0.125 and "norm" not in stated


def test_latent_attention_scales_with_yarn_by_mscale_all_dim() -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain = arch_of("deepseek_v3").layers[0].attention
    scaled = arch_of("deepseek_v3", rope_scaling=yarn)
    assert plain.scale == (16 + 8) ** -0.5
    assert np.isclose(scaled.layers[0].attention.scale, plain.scale * (0.1 * np.log(40) + 1) ** 2)
    assert scaled.rope.scale == 1.0, "mscale over mscale_all_dim"
    assert plain.latent.eps == 1e-6, "whatever the config's rms_norm_eps"


def test_longrope_has_a_second_set_for_long_windows() -> None:
    rope = arch_of("phimoe", rope_scaling=PHI_ROPE).rope
    assert (rope.scale, rope.long_scale, rope.long_from) == (1.25, 1.5, 128)
    assert rope.inv_freq[0] == 1.0 and rope.long_inv_freq[0] == 0.5
    stated = arch_json(arch_of("phimoe", rope_scaling=PHI_ROPE), {})["ropes"][0]
    assert stated["long_from"] == 128 and len(stated["long_inv_freq"]) == 8


def test_layers_with_a_window_may_have_frequencies_of_their_own() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    old = arch_of("gemma3", layer_types=types, rope_theta=1e6, rope_local_base_freq=1e4)
    new = arch_of("gemma3", layer_types=types, rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    assert old.ropes == new.ropes and len(old.ropes) == 2
    assert [layer.attention.rope for layer in old.layers] == [1, 0, 1]
    assert np.isclose(old.ropes[1].inv_freq[1], 1e4 ** (-1 / 8))
    scaled = arch_of("gemma3", rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert np.isclose(scaled.ropes[0].inv_freq[0], 1 / 8) and scaled.ropes[1].inv_freq[0] == 1.0
    pattern = arch_of("gemma3", num_hidden_layers=7, sliding_window_pattern=3)
    assert [layer.attention.window for layer in pattern.layers] == [16, 16, 0, 16, 16, 0, 16]


def test_layers_without_a_window_do_not_rotate_where_others_have_one() -> None:
    arch = arch_of("exaone_moe", num_hidden_layers=4)
    assert [layer.attention.window for layer in arch.layers] == [16, 16, 16, 0]
    assert [len(arch.ropes[layer.attention.rope].inv_freq) for layer in arch.layers] == [8, 8, 8, 0]
    assert [layer.attention.rope for layer in arch_of("exaone_moe", sliding_window=None).layers] == [0] * 3
    with pytest.raises(CorruptError, match="sliding_window_pattern"):
        arch_of("exaone_moe", sliding_window_pattern="LLLG")


def test_gated_attention_between_norms() -> None:
    arch = arch_of("afmoe", mup_enabled=True)
    assert arch.embed_scale == 8.0 and arch_of("afmoe").embed_scale == 1.0
    assert arch.layers[0].norms == "both" and arch.layers[0].attention.gated
    names = {tensor.name: tensor.shape for tensor in trunk_tensors(arch)}
    assert names["layers.0.attn.gate.weight"] == (64, 64) and "layers.2.ffn_post_norm.weight" in names
    assert arch.moe_layers() == [1, 2] and arch.layers[1].ffn.router.normalize
    with pytest.raises(UnsupportedError, match="route_norm"):
        arch_of("afmoe", route_norm=False)


def test_gemma_s_own_ways() -> None:
    arch = arch_of("gemma3", query_pre_attn_scalar=64)
    assert arch.embed_scale == 8.0 and arch.norm_offset == 1.0
    assert arch.layers[0].attention.scale == 0.125, "not of the head's size"
    assert arch.layers[0].norms == "both" and arch.layers[0].ffn.activation == "gelu_tanh"
    assert arch_of("gemma3", tie_word_embeddings=None).tied_head, "tied by default"
    with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
        arch_of("gemma3", final_logit_softcapping=30.0)


def test_layers_that_do_not_rotate() -> None:
    arch = arch_of("llama4", num_hidden_layers=4, floor_scale=16, attn_scale=0.25)
    assert [len(arch.ropes[layer.attention.rope].inv_freq) for layer in arch.layers] == [8, 8, 8, 0]
    assert [layer.attention.chunk for layer in arch.layers] == [8192] * 3 + [0]
    assert [layer.attention.qk_norm for layer in arch.layers] == ["unit"] * 3 + ["none"]
    assert [layer.attention.temperature for layer in arch.layers] == [0.0] * 3 + [0.25]
    assert arch.layers[0].ffn.scale_input and arch.layers[0].ffn.router.scores == "sigmoid"
    listed = arch_of("llama4", no_rope_layers=[0, 1, 1], attn_temperature_tuning=False, interleave_moe_layer_step=2)
    assert [layer.attention.rope for layer in listed.layers] == [1, 0, 0]
    assert listed.layers[0].attention.temperature == 0.0
    assert listed.moe_layers() == [1] and arch_of("llama4", moe_layers=[0, 2]).moe_layers() == [0, 2]
    with pytest.raises(CorruptError, match="no_rope_layers has 2 entries"):
        arch_of("llama4", no_rope_layers=[1, 0])


# -- recurrent layers -------------------------------------------------------------------------------------------------


def recurs(family: str, **more: Any) -> str:
    layers = arch_of(family, **more).layers
    return "".join("r" if layer.attention.recurrent else "a" for layer in layers)


def test_which_layers_are_recurrent() -> None:
    assert recurs("lfm2_moe") == "rar"
    assert recurs("qwen3_next", full_attention_interval=4, num_hidden_layers=9) == "rrrarrrar"
    assert recurs("qwen3_next", layer_types=["full_attention", "linear_attention", "full_attention"]) == "ara"
    assert recurs("kimi_linear") == "rar", "counted from one"
    assert (
        recurs("granitemoehybrid")
        == recurs("granitemoehybrid", layer_types=["linear_attention", "full_attention"] * 1 + ["linear_attention"])
        == "rar"
    )
    assert recurs("jamba", attn_layer_period=4, attn_layer_offset=2, num_hidden_layers=8) == "rrarrrar"
    with pytest.raises(UnsupportedError, match="layer_types"):
        arch_of("lfm2_moe", layer_types=["conv", "sliding_attention", "conv"])
    with pytest.raises(CorruptError, match="layer_types"):
        arch_of("lfm2_moe", drop=("layer_types",))


def test_a_recurrent_block_s_own_norm_is_not_centred_on_zero() -> None:
    arch = arch_of("qwen3_next")
    roles = {tensor.name: tensor.role for tensor in trunk_tensors(arch)}
    assert arch.norm_offset == 1.0
    assert roles["layers.0.attn_norm.weight"] == roles["layers.1.attn.q_norm.weight"] == "norm"
    assert roles["layers.0.recur.norm.weight"] == "bias", "stored as it counts"
    assert arch_of("kimi_linear").norm_offset == arch_of("lfm2_moe").norm_offset == 0.0


def test_what_rotates_in_hybrids() -> None:
    assert len(arch_of("qwen3_next").rope.inv_freq) == 16 // 4 // 2, "a quarter of each head"
    for family in ("kimi_linear", "jamba", "granitemoehybrid"):
        assert arch_of(family).rope.inv_freq == ()
    assert len(arch_of("granitemoehybrid", position_embedding_type="rope").rope.inv_freq) == 8


def test_recurrent_numbers() -> None:
    mamba = arch_of("jamba").layers[0].attention.recurrent
    assert (mamba.values, mamba.rank, mamba.key_dim) == (128, 4, 16), "rank: the hidden size by sixteen, rounded up"
    assert arch_of("granitemoehybrid").layers[0].attention.recurrent.value_dim == 16, "auto: what the heads leave"
    kimi = arch_of("kimi_linear").layers[0].attention.recurrent
    assert kimi.channel_decay and kimi.sigmoid_gate and kimi.rank == 16
    assert not arch_of("qwen3_next").layers[0].attention.recurrent.channel_decay
    router = arch_of("lfm2_moe").layers[1].ffn.router
    assert router.correction and router.norm_added == 1e-6
    assert not arch_of("lfm2_moe", use_expert_bias=False).layers[1].ffn.router.correction
    assert [bool(layer.ffn.experts) for layer in arch_of("jamba").layers] == [False, True, False]
    with pytest.raises(UnsupportedError, match="time_step_limit"):
        arch_of("granitemoehybrid", time_step_limit=[0.001, 0.1])
    dense = arch_of("granitemoehybrid", num_local_experts=0, num_experts_per_tok=0).layers[0].ffn
    assert (dense.experts, dense.width) == (0, 48)
    with pytest.raises(CorruptError, match="recurrent heads"):
        arch_of("qwen3_next", linear_num_value_heads=5)
