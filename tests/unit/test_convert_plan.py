"""Planning a conversion: every tensor accounted for, sizes and encodings known before a byte is written
(cases C6-C8, C12, C15, C21)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CONFIGS, FakeCheckpoint, config_of

from smoe_cli import _core
from smoe_cli.convert.checkpoint import open_checkpoint
from smoe_cli.convert.encodings import ROLES, choose_roles, presets
from smoe_cli.convert.plan import Plan, make_plan
from smoe_cli.errors import CorruptError, UnsupportedError, UsageError


def plan_of(fake: FakeCheckpoint, folder: Path, quant: str = "q4", *roles: str) -> Plan:
    return make_plan(open_checkpoint(fake.write(folder)), quant, choose_roles(quant, roles))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_plans_and_uses_every_tensor_once(family: str, tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of(family))
    plan = plan_of(fake, tmp_path)
    used = [tensor.source for tensor in plan.tensors]
    used += [part for record in plan.experts for part in (*record.parts, *record.biases)]
    assert {matrix.tensor.name for matrix in used} == set(fake.tensors)
    parts = [(matrix.tensor.name, matrix.expert, matrix.first, matrix.groups) for matrix in used]
    assert len(set(parts)) == len(parts)
    assert plan.notices == []


# -- presets and roles ------------------------------------------------------------------------------------------------


def test_presets() -> None:
    assert {"q2", "q3", "q4", "q5", "q6", "q8", "source", *_core.encodings()} == set(presets())
    assert choose_roles("q4")["expert.gate"] == "q4_k" and choose_roles("q4")["attention"] == "q6_k"
    assert set(choose_roles("q8").values()) == {"q8_0", "source"}
    assert all(choose_roles(quant)["router"] == "source" for quant in presets())
    assert set(choose_roles("q4")) == set(ROLES)


def test_roles_override() -> None:
    roles = choose_roles("q4", ["experts=q4_0", "expert.down=q6_k", "head=f16"])
    assert [roles[role] for role in ("expert.gate", "expert.up", "expert.down")] == ["q4_0", "q4_0", "q6_k"]
    assert roles["head"] == "f16"


@pytest.mark.parametrize(
    ("quant", "experts", "down"), [("q2", "q2_k", "q3_k"), ("q3", "q3_k", "q3_k"), ("q5", "q5_k", "q5_k")]
)
def test_presets_store_the_experts_smallest(quant: str, experts: str, down: str) -> None:
    roles = choose_roles(quant)
    assert roles["expert.up"] == roles["expert.gate"] == experts and roles["expert.down"] == down
    assert roles["router"] == "source"
    assert _core.stored_bytes(experts, "rows", 1, 256) <= _core.stored_bytes(roles["attention"], "rows", 1, 256)


def test_a_dense_model_stores_its_feed_forward_as_a_mixture_its_experts() -> None:
    assert choose_roles("q4", dense=True)["ffn"] == "q4_k" and choose_roles("q4")["ffn"] == "q6_k"
    assert choose_roles("q4", ["ffn=q8_0"], dense=True)["ffn"] == "q8_0"
    assert choose_roles("q8", dense=True) == choose_roles("q8")


def test_an_unknown_quant_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="q7") as info:
        choose_roles("q7")
    assert "q5_k" in info.value.hint and "mlx4_g64_bf16" in info.value.hint and len(info.value.hint) < 300


@pytest.mark.parametrize("role", ["attention", "attention=q9", "wheels=q8_0", "norm=q8_0", "attention=tied"])
def test_wrong_roles(role: str) -> None:
    with pytest.raises(UsageError, match=role):
        choose_roles("q4", [role])


def test_c15_norms_biases_and_routers_keep_source_precision(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen2_moe"), dtype="BF16")
    fake.put("model.layers.0.mlp.gate.weight", fake.values("model.layers.0.mlp.gate.weight"), "F32")
    encodings = {tensor.name: tensor.encoding for tensor in plan_of(fake, tmp_path, "q4_0").tensors}
    assert encodings["layers.0.router.weight"] == "f32"
    assert encodings["layers.2.router.weight"] == "bf16"
    assert encodings["layers.0.shared_gate.weight"] == "bf16"
    assert encodings["layers.0.attn.q.bias"] == encodings["final_norm.weight"] == "bf16"
    assert encodings["layers.0.attn.q.weight"] == encodings["embed.weight"] == "q4_0"


def test_source_keeps_each_tensor_as_it_is(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("mixtral"), dtype="F16")
    fake.put("model.embed_tokens.weight", fake.values("model.embed_tokens.weight"), "F32")
    one = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    fake.put(one, fake.values(one), "F32")
    plan = plan_of(fake, tmp_path, "source")
    assert {tensor.name: tensor.encoding for tensor in plan.tensors}["embed.weight"] == "f32"
    assert plan.encodings()[0] == {"gate": "f16", "up": "f16", "down": "f16"}
    assert plan.encodings()[1] == {"gate": "f16", "up": "f16", "down": "f32"}  # what holds all of the layer's exactly


@pytest.mark.parametrize(("hidden", "width"), [(576, 96), (256, 96), (48, 40)])
def test_c21_rows_that_do_not_divide_fall_back_and_say_so(tmp_path: Path, hidden: int, width: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_attention_heads": 4, "num_key_value_heads": 2}
    plan = plan_of(FakeCheckpoint(config_of("mixtral", **sizes)), tmp_path, "q4")
    allowed = {576: "q5_0", 256: "q4_k", 48: "f16", 96: "q5_0", 40: "f16"}
    assert plan.encodings()[0] == {"gate": allowed[hidden], "up": allowed[hidden], "down": allowed[width]}
    fallbacks = {fallback.name: (fallback.cols, fallback.wanted, fallback.used) for fallback in plan.fallbacks}
    assert fallbacks["layers.0.experts.down"] == (width, "q4_k", allowed[width])
    assert ("layers.0.experts.gate" in fallbacks) == (hidden != 256)


def test_layouts(tmp_path: Path) -> None:
    layouts = {tensor.name: tensor.layout for tensor in plan_of(FakeCheckpoint(config_of("llama")), tmp_path).tensors}
    assert layouts["embed.weight"] == "rows" and layouts["head.weight"] == "panel16"
    assert layouts["layers.0.attn.q.weight"] == "panel16" and layouts["layers.0.attn_norm.weight"] == "rows"


# -- experts (C6, C7, C12) --------------------------------------------------------------------------------------------


def expert_values(fake: FakeCheckpoint, folder: Path) -> list[np.ndarray]:
    checkpoint = open_checkpoint(fake.write(folder))
    plan = make_plan(checkpoint, "source", choose_roles("source"))
    return [part.read(checkpoint.reader, 0, part.rows) for record in plan.experts for part in record.parts]


@pytest.mark.parametrize("turned", [False, True])
def test_c6_fused_experts_of_either_orientation_are_the_same_experts(tmp_path: Path, turned: bool) -> None:
    config = config_of("qwen3_moe", moe_intermediate_size=40)
    reference = expert_values(FakeCheckpoint(config), tmp_path / "separate")
    fake = FakeCheckpoint(config)
    for layer in range(3):
        fake.fuse(layer, turned)
    for ours, expected in zip(expert_values(fake, tmp_path / "fused"), reference, strict=True):
        assert np.array_equal(ours, expected)


def test_c7_the_layout_is_found_per_layer(tmp_path: Path) -> None:
    reference = expert_values(FakeCheckpoint(config_of("olmoe")), tmp_path / "separate")
    fake = FakeCheckpoint(config_of("olmoe"))
    fake.fuse(1)
    for ours, expected in zip(expert_values(fake, tmp_path / "mixed"), reference, strict=True):
        assert np.array_equal(ours, expected)


def test_c6_a_square_shape_takes_the_family_s_rule(tmp_path: Path) -> None:
    """gate_up [E, 64, 64] says nothing of its orientation: the families here store [out, in]."""
    sizes = {"moe_intermediate_size": 32, "hidden_size": 64}
    reference = expert_values(FakeCheckpoint(config_of("qwen3_moe", **sizes)), tmp_path / "separate")
    fake = FakeCheckpoint(config_of("qwen3_moe", **sizes))
    fake.fuse(0)
    assert all(np.array_equal(a, b) for a, b in zip(expert_values(fake, tmp_path / "fused"), reference, strict=True))
    turned = FakeCheckpoint(config_of("qwen3_moe", **sizes))
    turned.fuse(0, turned=True)  # down, not square, shows that the rule does not hold here: refused, not guessed
    with pytest.raises(CorruptError, match="different orientations"):
        plan_of(turned, tmp_path / "turned")


def test_c6_a_fused_tensor_that_fits_neither_way(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe"))
    fake.fuse(2)
    fake.put("model.layers.2.mlp.experts.down_proj", np.zeros((4, 64, 33)))
    with pytest.raises(CorruptError, match=r"down_proj has shape \[4, 64, 33\]"):
        plan_of(fake, tmp_path)


def test_c7_an_unmatched_tensor_is_an_error(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe"))
    fake.put("model.layers.1.mlp.surprise.weight", np.zeros((4, 4)))
    with pytest.raises(CorruptError, match=r"model\.layers\.1\.mlp\.surprise\.weight"):
        plan_of(fake, tmp_path)


def test_both_layouts_at_once_leave_tensors_over(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe"))
    kept = dict(fake.tensors)
    fake.fuse(1)
    fake.tensors = {**kept, **fake.tensors}
    with pytest.raises(CorruptError, match="12 tensors"):
        plan_of(fake, tmp_path)


def test_c12_experts_under_other_names(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("olmoe"))
    fake.tensors = {name.replace(".experts.", ".specialists."): value for name, value in fake.tensors.items()}
    with pytest.raises(CorruptError, match="layer 0 has no experts under a known name"):
        plan_of(fake, tmp_path)


def test_one_expert_missing_is_named(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("olmoe"))
    del fake.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CorruptError, match=r"layers\.1\.mlp\.experts\.3\.up_proj.*up of expert 3 of layer 1"):
        plan_of(fake, tmp_path)


def test_more_layers_than_the_config_says(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    fake.config["num_hidden_layers"] = 2
    with pytest.raises(CorruptError, match=r"model\.layers\.2\."):
        plan_of(fake, tmp_path)


def test_a_shape_that_the_config_does_not_say(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    fake.config["vocab_size"] = 97
    with pytest.raises(CorruptError, match=r"embed_tokens.*\[96, 64\].*\[97, 64\]"):
        plan_of(fake, tmp_path)


def test_c5_packed_bytes_are_never_numbers(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    fake.tensors["model.layers.0.mlp.up_proj.weight"] = ("U8", (96, 64), bytes(96 * 64))
    with pytest.raises(UnsupportedError, match="packed"):
        plan_of(fake, tmp_path)


def test_ignored_and_optional_tensors(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe", num_nextn_predict_layers=1))
    fake.put("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(16), "F32")
    fake.put("model.layers.3.eh_proj.weight", np.zeros((4, 4)))
    fake.put("mtp.fc.weight", np.zeros((4, 4)))
    notices = plan_of(fake, tmp_path).notices
    assert len(notices) == 1 and "2 tensors" in notices[0]


# -- heads (C8) -------------------------------------------------------------------------------------------------------


def tied(config_says: bool, head: Any) -> FakeCheckpoint:
    fake = FakeCheckpoint(config_of("llama"))
    fake.config["tie_word_embeddings"] = config_says
    if head is None:
        del fake.tensors["lm_head.weight"]
    elif head == "same":
        fake.tensors["lm_head.weight"] = fake.tensors["model.embed_tokens.weight"]
    return fake


def has_head(plan: Plan) -> bool:
    return "head.weight" in {tensor.name for tensor in plan.tensors}


def test_c8_tied_without_a_head(tmp_path: Path) -> None:
    plan = plan_of(tied(True, None), tmp_path)
    assert plan.arch.tied_head and not has_head(plan)
    assert {tensor.name: tensor.layout for tensor in plan.tensors}["embed.weight"] == "panel16"


def test_c8_tied_with_an_equal_head(tmp_path: Path) -> None:
    plan = plan_of(tied(True, "same"), tmp_path)
    assert plan.arch.tied_head and not has_head(plan)


def test_c8_tied_but_a_different_head_is_stored(tmp_path: Path) -> None:
    plan = plan_of(tied(True, "other"), tmp_path)
    assert not plan.arch.tied_head and has_head(plan)
    assert any("the stored head is used" in notice for notice in plan.notices)


def test_c8_no_head_and_not_tied_is_refused_with_the_choice(tmp_path: Path) -> None:
    fake = tied(False, None)
    with pytest.raises(UsageError, match=r"lm_head\.weight") as caught:
        plan_of(fake, tmp_path / "a")
    assert "--role head=tied" in caught.value.hint
    assert plan_of(fake, tmp_path / "b", "q4", "head=tied").arch.tied_head


def test_a_tied_head_has_one_encoding(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must agree"):
        plan_of(tied(True, None), tmp_path, "q4", "embed=q8_0")


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    """Names with a prefix are the family's own without it; the other part's tensors are left out, and said to be."""
    text = FakeCheckpoint(config_of("llama4"))
    want = plan_of(text, tmp_path / "text")
    fake = FakeCheckpoint(config_of("llama4"))
    fake.config = {"model_type": "llama4", "text_config": config_of("llama4")}
    fake.tensors = {f"language_model.{name}": tensor for name, tensor in fake.tensors.items()}
    fake.put("vision_model.patch.weight", fake.values("language_model.model.norm.weight"))
    plan = plan_of(fake, tmp_path / "both")
    assert plan.notices == ["left out, only text is understood: 1 tensors (vision_model.patch.weight ...)"]
    assert plan.arch.layers == want.arch.layers and plan.arch.model_type == "llama4"
    assert [tensor.source.tensor.name for tensor in plan.tensors] == [
        f"language_model.{tensor.source.tensor.name}" for tensor in want.tensors
    ]
