"""What a GGUF says of its model beside the tensors: the pairs that llama.cpp looks up."""

from __future__ import annotations

from typing import Any

from smoe_cli.convert.encodings import SOURCE
from smoe_cli.convert.export.vault import VaultReader
from smoe_cli.convert.gguf.config import KEYS, ROPE_TYPES
from smoe_cli.convert.gguf.file import STRING
from smoe_cli.convert.gguf.tokens import tokenizer_metadata
from smoe_cli.convert.gguf.write import BOOL, F32, I32, U32, Out, Typed
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.numbers import Numbers
from smoe_cli.families.rope import rope_settings

FILE_TYPES = {  # general.file_type by the encoding that most bytes have
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15,
    "q5_k": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32, "mxfp4": 38,
}  # fmt: skip
REALS = ("norm_eps", "scaling", "attention_scale", "embed_scale", "residual_scale", "logit_divisor", "clip")
# Of KEYS, those that are stated by other means.
NOT_OF_CONFIG = (
    *("width", "experts", "top_k", "normalize", "window", "v_dim", "rope_dim"),
    *("conv_taps", "recurrent_key_dim", "recurrent_key_heads", "groups", "top_groups"),
)


def _file_type(tensors: list[Out]) -> int:
    weight: dict[str, int] = {}
    for out in tensors:
        weight[out.kind.lower()] = weight.get(out.kind.lower(), 0) + out.nbytes
    return FILE_TYPES[max(weight, key=lambda name: weight[name])]


class Metadata:
    """Of a vault whose family has an architecture there. UnsupportedError where it has no words for something."""

    def __init__(self, vault: VaultReader) -> None:
        self.vault = vault
        self.arch = vault.family.gguf["arch"][0]
        self.numbers = Numbers(vault.family, vault.config)

    def pairs(self, tensors: list[Out]) -> dict[str, Typed]:
        found = {
            "general.architecture": Typed(STRING, self.arch),
            "general.name": Typed(STRING, self.vault.manifest["id"]),
            "general.file_type": Typed(U32, _file_type(tensors)),
            "general.quantization_version": Typed(U32, 2),
        }
        source = self.vault.manifest["source"]
        if source["kind"] == "gguf" and self.vault.manifest["quant"] == SOURCE:  # what it said of itself
            kept = {"name": STRING, "license": STRING, "size_label": STRING, "quantized_by": STRING, "file_type": U32}
            found |= {f"general.{key}": Typed(kind, source[key]) for key, kind in kept.items() if key in source}
        own = self._sizes() | self._mixture() | self._rope() | self._windows()
        found |= {f"{self.arch}.{key}": typed for key, typed in own.items()}
        return found | tokenizer_metadata(self.vault)

    def _sizes(self) -> dict[str, Typed]:
        arch, family = self.vault.arch, self.vault.family
        found = {"vocab_size": Typed(U32, arch["vocab"]), "block_count": Typed(U32, len(arch["layers"]))}
        for name, keys in KEYS.items():
            if name not in family.config or name in NOT_OF_CONFIG:
                continue
            value = self.numbers.raw(name)
            if (
                value is None
                or isinstance(value, list)
                or (name in REALS and not value)
                or (name == "q_rank" and not value)
            ):
                continue
            found[keys[0]] = Typed(F32, float(value)) if name in REALS else Typed(U32, int(value))
        attention = self._attention()
        if attention["block"] == "mla":
            rank, rotated = attention["kv_rank"], attention["rope_dim"]
            sizes = {
                "attention.head_count_kv": 1,
                "attention.key_length": rank + rotated,
                "attention.value_length": rank,
            }
            sizes |= {"attention.key_length_mla": attention["nope_dim"] + rotated, "rope.dimension_count": rotated}
            sizes |= {"attention.value_length_mla": attention["v_dim"]}
        else:
            head = attention["head_dim"]
            sizes = {"attention.key_length": head, "attention.value_length": head}
            if rotated := 2 * len(arch["ropes"][attention["rope"]]["inv_freq"]):
                sizes["rope.dimension_count"] = rotated
        return found | {key: Typed(U32, value) for key, value in sizes.items()} | self._recurrent()

    def _attention(self) -> dict[str, Any]:
        """Of the first layer that has it."""
        layers = [layer["attention"] for layer in self.vault.arch["layers"]]
        found = next((each for each in layers if each["block"] in ("gqa", "mla")), None)
        if found is None:
            raise UnsupportedError("export to GGUF of a model without attention is not supported")
        return dict(found)

    def _recurrent(self) -> dict[str, Typed]:
        """The numbers of recurrent blocks, and which layers have one."""
        blocks = [self.vault.recurrent(layer) for layer in range(len(self.vault.arch["layers"]))]
        r = next((block for block in blocks if block), None)
        if r is None:
            return {}
        found: dict[str, Typed] = {}
        if "rope_kind" in self.vault.family.config:
            found["rope.scaling.finetuned"] = Typed(BOOL, bool(self.vault.arch["ropes"][0]["inv_freq"]))
        if self.vault.family.gguf.get("recurrent_list"):
            kinds = [block is not None for block in blocks]
            found["attention.recurrent_layers"] = Typed(BOOL, kinds)
            every = kinds.index(False) + 1
            if kinds == [(index + 1) % every != 0 for index in range(len(kinds))]:
                found["full_attention_interval"] = Typed(U32, every)
        else:
            attention = self._attention()
            heads = 1 if attention["block"] == "mla" else attention["kv_heads"]
            found["attention.head_count_kv"] = Typed(I32, [0 if block else heads for block in blocks])
        if r.block == "short_conv":
            return found | {"shortconv.l_cache": Typed(U32, r.taps)}
        if r.channel_decay:
            return found | {"ssm.conv_kernel": Typed(U32, r.taps), "kda.head_dim": Typed(U32, r.key_dim)}
        sizes = {"conv_kernel": r.taps, "state_size": r.key_dim, "inner_size": r.values}
        sizes["time_step_rank"] = r.rank if r.block == "mamba" else r.heads
        if r.block != "mamba":
            sizes["group_count"] = r.key_heads
        return found | {f"ssm.{key}": Typed(U32, value) for key, value in sizes.items()}

    def _mixture(self) -> dict[str, Typed]:
        layers = [layer["ffn"] for layer in self.vault.arch["layers"]]
        routed = [ffn for ffn in layers if ffn["block"] == "moe"]
        dense = [ffn["width"] for ffn in layers if ffn["block"] == "ffn"]
        if not routed:
            return {"feed_forward_length": Typed(U32, dense[0])}
        first = next(index for index, ffn in enumerate(layers) if ffn["block"] == "moe")
        ffn = routed[0]
        width = ffn["expert_width"]
        step = first + 1 if self.vault.family.gguf.get("dense") == "step" else 1
        stated = {
            "feed_forward_length": dense[0] if dense else width,
            "expert_count": ffn["experts"],
            "expert_used_count": ffn["top_k"],
            "expert_feed_forward_length": width,
            "leading_dense_block_count": 0 if step > 1 else first,
            "expert_gating_func": 2 if ffn.get("scores") == "sigmoid" else 1,
            "interleave_moe_layer_step": step,
        }
        if self.vault.family.config.get("groups"):
            stated["expert_group_count"] = ffn.get("groups", 1)
            stated["expert_group_used_count"] = ffn.get("top_groups", 1)
        if ffn["shared_width"]:
            count = max(1, ffn["shared_width"] // width) if self.vault.family.shared_like_experts else 1
            each = self.vault.family.gguf.get("shared_each", False)
            stated["expert_shared_count"] = count
            stated["expert_shared_feed_forward_length"] = ffn["shared_width"] // (count if each else 1)
        found = {key: Typed(U32, int(value)) for key, value in stated.items()}
        found["expert_weights_norm"] = Typed(BOOL, bool(ffn["normalize"]))
        found["expert_weights_scale"] = Typed(F32, float(ffn["scaling"]))
        return found

    def _windows(self) -> dict[str, Typed]:
        windows = [layer["attention"].get("window", 0) for layer in self.vault.arch["layers"]]
        if not any(windows):
            return {}
        pattern = Typed(BOOL, [bool(window) for window in windows])
        return {"attention.sliding_window": Typed(U32, max(windows)), "attention.sliding_window_pattern": pattern}

    def rope_base(self) -> float:
        settings = self.rope_settings()
        theta = settings.get("rope_theta") or self.vault.family.theta_default
        return float(theta or 10000.0)

    def rope_settings(self) -> dict[str, Any]:
        config = self.numbers.config
        nested = (config.get("rope_parameters") or {}).get("full_attention") if self.vault.family.by_type else None
        return {"rope_type": "default", **nested} if nested else rope_settings(config)

    def _rope(self) -> dict[str, Typed]:
        settings = self.rope_settings()
        kind = settings.get("rope_type", "default")
        found = {"rope.freq_base": Typed(F32, self.rope_base())}
        if self.vault.family.gguf.get("sections"):  # of text all are equal, but none may be left out
            count = len(self.vault.arch["ropes"][0]["inv_freq"])
            stated = settings.get("mrope_section") or [(count + 2) // 3, (count + 1) // 3, count // 3]
            found["rope.dimension_sections"] = Typed(I32, [*stated, 0, 0, 0, 0][:4])
        if self.vault.family.by_type and len(self.vault.arch["ropes"]) > 1:
            config = self.numbers.config
            local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
            local = local or config.get("rope_local_base_freq") or self.vault.family.local_theta
            found["rope.freq_base_swa"] = Typed(F32, float(local or 10000.0))
        known = {ours: theirs for theirs, ours in ROPE_TYPES.items()} | {"llama3": "none"}
        if kind not in known:
            raise UnsupportedError(f"export to GGUF of rope type {kind!r} is not supported")
        if kind in ("linear", "yarn"):
            found["rope.scaling.type"] = Typed(STRING, kind)
            found["rope.scaling.factor"] = Typed(F32, float(settings["factor"]))
        if kind == "yarn":
            original = settings.get("original_max_position_embeddings") or self.vault.arch["max_positions"]
            found["rope.scaling.original_context_length"] = Typed(U32, int(original))
            keys = {
                "beta_fast": "yarn_beta_fast",
                "beta_slow": "yarn_beta_slow",
                "attention_factor": "yarn_attn_factor",
            }
            for ours, theirs in keys.items():
                if settings.get(ours) is not None:
                    found[f"rope.scaling.{theirs}"] = Typed(F32, float(settings[ours]))
            if settings.get("mscale_all_dim") and self.vault.family.latent_scale:
                found["rope.scaling.yarn_log_multiplier"] = Typed(F32, 0.1 * float(settings["mscale_all_dim"]))
        if kind == "longrope" and self.vault.arch["ropes"][0]["scale"] != 1:
            found["rope.scaling.attn_factor"] = Typed(F32, float(self.vault.arch["ropes"][0]["scale"]))
        return found
