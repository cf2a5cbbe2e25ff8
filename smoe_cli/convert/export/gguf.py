"""A vault as a GGUF file of the same bytes, as llama.cpp reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.convert.encodings import SOURCE
from smoe_cli.convert.export.vault import PARTS, Stored, VaultReader
from smoe_cli.convert.gguf import names
from smoe_cli.convert.gguf.config import KEYS, ROPE_TYPES
from smoe_cli.convert.gguf.file import STRING
from smoe_cli.convert.gguf.tokens import tokenizer_metadata
from smoe_cli.convert.gguf.write import BOOL, CODES, F32, U32, Out, Typed
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.numbers import Numbers
from smoe_cli.families.rope import rope_settings

FILE_TYPES = {  # general.file_type by the encoding that most bytes have
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15,
    "q5_k": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32, "mxfp4": 38,
}  # fmt: skip
REALS = ("norm_eps", "scaling", "attention_scale", "embed_scale", "residual_scale", "logit_divisor", "clip")


class GgufExport:
    """``metadata`` and ``tensors`` of a vault. UnsupportedError where GGUF or llama.cpp has no place for something."""

    def __init__(self, vault: VaultReader) -> None:
        self.vault = vault
        self.stated = vault.family.gguf
        if not self.stated:
            raise UnsupportedError(f"family {vault.family.name} has no GGUF architecture that is known")
        self.arch = self.stated["arch"][0]
        self.numbers = Numbers(vault.family, vault.config)
        self.tensors = [*self._trunk(), *self._experts(), *self._factors()]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _trunk(self) -> list[Out]:
        found = []
        for canonical, stored in self.vault.trunk().items():
            pattern = re.sub(r"^layers\.\d+\.", "layers.{L}.", canonical)
            options = names.alternatives(pattern)
            if not options:
                raise UnsupportedError(f"GGUF has no name for {canonical}, which family {self.vault.family.name} has")
            name = (
                options[-1]
                if self.arch in names.LATE_NORM and pattern.startswith("layers.{L}.ffn_norm")
                else options[0]
            )
            layer = canonical.split(".")[1] if pattern != canonical else ""
            found.append(self._out(name.replace("{L}", layer), canonical, stored))
        return found

    def _out(self, name: str, canonical: str, stored: Stored) -> Out:
        shape = stored.shape
        if match := re.fullmatch(r"layers\.(\d+)\.attn\.(k_up|v_up)\.weight", canonical):
            heads = self.vault.arch["layers"][int(match[1])]["attention"]["heads"]
            shape = (heads, stored.rows // heads, stored.cols)
        small = len(stored.shape) == 1 or "router" in canonical or "shared_gate" in canonical
        heads = self._paired(canonical)
        if small:
            return Out(name, "F32", shape, lambda: [self._floats(stored, heads)])
        return Out(name, self._kind(stored, canonical), shape, lambda: self._rows(stored, heads))

    def _paired(self, canonical: str) -> int:
        """Heads whose rows are stored in pairs; 0 where rows stay as they are."""
        match = re.fullmatch(r"layers\.(\d+)\.attn\.([qk])\.(weight|bias)", canonical)
        if not match or not self.stated.get("pairs"):
            return 0
        attention = self.vault.arch["layers"][int(match[1])]["attention"]
        return int(attention["heads"] if match[2] == "q" else attention["kv_heads"])

    def _floats(self, stored: Stored, heads: int) -> NDArray[np.uint8]:
        values = stored.values(self.vault.reader).reshape(-1, 1 if heads else stored.cols)
        return np.ascontiguousarray(_pairs(values, heads) if heads else values, np.float32).view(np.uint8)

    def _rows(self, stored: Stored, heads: int) -> Iterable[NDArray[np.uint8]]:
        return [_pairs(stored.raw(self.vault.reader), heads)] if heads else stored.pieces(self.vault.reader)

    def _kind(self, stored: Stored, what: str) -> str:
        kind = stored.encoding.upper()
        if kind not in CODES:
            raise UnsupportedError(
                f"{what} is stored as {stored.encoding}, which GGUF does not have", "convert with another --quant"
            )
        return kind

    def _experts(self) -> list[Out]:
        found = []
        for layer in self.vault.moe_layers():
            ffn = self.vault.arch["layers"][layer]["ffn"]
            for part in PARTS:
                stored = self.vault.expert(layer, part, 0)
                kind = self._kind(stored, f"{part} of layer {layer}")
                shape = (ffn["experts"], *stored.shape)
                found.append(Out(names.EXPERTS[part].replace("{L}", str(layer)), kind, shape, self._stack(layer, part)))
                if ffn.get("expert_bias"):
                    name = names.EXPERT_BIASES[part].replace("{L}", str(layer))
                    found.append(Out(name, "F32", (ffn["experts"], stored.rows), self._biases(layer, part)))
        return found

    def _stack(self, layer: int, part: str) -> Any:
        def pieces() -> Iterable[NDArray[np.uint8]]:
            for expert in range(self.vault.arch["layers"][layer]["ffn"]["experts"]):
                yield from self.vault.expert(layer, part, expert).pieces(self.vault.reader)

        return pieces

    def _biases(self, layer: int, part: str) -> Any:
        def pieces() -> Iterable[NDArray[np.uint8]]:
            for expert in range(self.vault.arch["layers"][layer]["ffn"]["experts"]):
                yield self.vault.bias(layer, part, expert).raw(self.vault.reader)

        return pieces

    def _factors(self) -> list[Out]:
        """Frequencies that are not powers of the base, as divisors of those."""
        kind = self._settings()["rope_type"]
        if kind not in ("llama3", "longrope"):
            return []
        rope = self.vault.arch["ropes"][0]
        plain = np.float64(self._base()) ** -(np.arange(len(rope["inv_freq"])) / len(rope["inv_freq"]))
        sets = {"rope_freqs.weight": rope["inv_freq"]}
        if rope.get("long_from") and rope["inv_freq"] != rope["long_inv_freq"]:
            sets = {"rope_factors_short.weight": rope["inv_freq"], "rope_factors_long.weight": rope["long_inv_freq"]}
        found = []
        for name, frequencies in sets.items():
            values = (plain / np.array(frequencies)).astype(np.float32)
            found.append(Out(name, "F32", values.shape, lambda values=values: [values.view(np.uint8)]))  # type: ignore[misc]
        return found

    # -- metadata -----------------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Typed]:
        found = {
            "general.architecture": Typed(STRING, self.arch),
            "general.name": Typed(STRING, self.vault.manifest["id"]),
            "general.file_type": Typed(U32, self._file_type()),
            "general.quantization_version": Typed(U32, 2),
        }
        source = self.vault.manifest["source"]
        if source["kind"] == "gguf" and self.vault.manifest["quant"] == SOURCE:  # what it said of itself
            kept = {"name": STRING, "license": STRING, "size_label": STRING, "quantized_by": STRING, "file_type": U32}
            found |= {f"general.{key}": Typed(kind, source[key]) for key, kind in kept.items() if key in source}
        own = self._sizes() | self._mixture() | self._rope() | self._windows()
        found |= {f"{self.arch}.{key}": typed for key, typed in own.items()}
        return found | tokenizer_metadata(self.vault)

    def _file_type(self) -> int:
        weight: dict[str, int] = {}
        for out in self.tensors:
            weight[out.kind.lower()] = weight.get(out.kind.lower(), 0) + out.nbytes
        return FILE_TYPES[max(weight, key=lambda name: weight[name])]

    def _sizes(self) -> dict[str, Typed]:
        arch, family = self.vault.arch, self.vault.family
        found = {"vocab_size": Typed(U32, arch["vocab"]), "block_count": Typed(U32, len(arch["layers"]))}
        for name, keys in KEYS.items():
            if name not in family.config or name in (
                "width",
                "experts",
                "top_k",
                "normalize",
                "window",
                "v_dim",
                "rope_dim",
            ):
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
        attention = arch["layers"][0]["attention"]
        if attention["block"] == "mla":
            rank, rotated = attention["kv_rank"], attention["rope_dim"]
            sizes = {
                "attention.head_count_kv": 1,
                "attention.key_length": rank + rotated,
                "attention.value_length": rank,
            }
            sizes |= {"attention.key_length_mla": attention["nope_dim"] + rotated, "rope.dimension_count": rotated}
            sizes |= {"attention.value_length_mla": attention["v_dim"]}
        elif attention["block"] == "gqa":
            head = attention["head_dim"]
            rotated = 2 * len(arch["ropes"][attention["rope"]]["inv_freq"])
            sizes = {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": rotated}
        else:
            raise UnsupportedError(f"export to GGUF of layers with {attention['block']} is not supported")
        return found | {key: Typed(U32, value) for key, value in sizes.items()}

    def _mixture(self) -> dict[str, Typed]:
        layers = [layer["ffn"] for layer in self.vault.arch["layers"]]
        routed = [ffn for ffn in layers if ffn["block"] == "moe"]
        dense = [ffn["width"] for ffn in layers if ffn["block"] == "ffn"]
        if not routed:
            return {"feed_forward_length": Typed(U32, dense[0])}
        first = next(index for index, ffn in enumerate(layers) if ffn["block"] == "moe")
        ffn, config = routed[0], self.numbers
        width = ffn["expert_width"]
        moe = self.vault.moe_layers()
        step = moe[1] - moe[0] if len(moe) > 1 else 1
        if moe != list(range(first, len(layers), step)):
            raise UnsupportedError("GGUF has no words for which layers hold experts here")
        stated = {
            "feed_forward_length": dense[0] if dense else width,
            "expert_count": ffn["experts"],
            "expert_used_count": ffn["top_k"],
            "expert_feed_forward_length": width,
            "leading_dense_block_count": first if step == 1 else 0,
            "expert_gating_func": 2 if ffn.get("scores") == "sigmoid" else 1,
            "interleave_moe_layer_step": step,
        }
        if ffn["shared_width"]:
            stated["expert_shared_feed_forward_length"] = ffn["shared_width"]
            stated["expert_shared_count"] = (
                max(1, ffn["shared_width"] // width) if config.family.shared_like_experts else 1
            )
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

    def _base(self) -> float:
        settings = self._settings()
        theta = settings.get("rope_theta") or self.vault.family.theta_default
        return float(theta or 10000.0)

    def _settings(self) -> dict[str, Any]:
        config = self.numbers.config
        nested = (config.get("rope_parameters") or {}).get("full_attention") if self.vault.family.by_type else None
        return {"rope_type": "default", **nested} if nested else rope_settings(config)

    def _rope(self) -> dict[str, Typed]:
        settings = self._settings()
        kind = settings.get("rope_type", "default")
        found = {"rope.freq_base": Typed(F32, self._base())}
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


def _pairs(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of each head in the order (0, half), (1, half + 1) ..."""
    return np.ascontiguousarray(rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2)).reshape(rows.shape)


def plan_gguf(path: Path) -> tuple[GgufExport, dict[str, Typed], list[Out]]:
    export = GgufExport(VaultReader(path))
    return export, export.metadata(), export.tensors
