"""What llama.cpp takes for granted of an architecture. A vault that differs would load there and answer otherwise, or
not load, and is refused before a byte is written. The rules of a family stand in its [gguf] (families/spec.py)."""

from __future__ import annotations

import re
from typing import Any

from smoe_cli.convert.export.vault import VaultReader
from smoe_cli.errors import UnsupportedError
from smoe_cli.families.numbers import Numbers


def require_known(vault: VaultReader) -> None:
    """UnsupportedError names what is not as llama.cpp has it."""
    stated = vault.family.gguf
    found = (_dense(vault, stated), _groups(vault), _attention(vault, stated), _recurrent(vault), _fixed(vault, stated))
    for problem in found:
        if problem:
            raise UnsupportedError(
                f"llama.cpp's architecture {stated['arch'][0]} does not compute this model: {problem}",
                "export to safetensors instead",
            )


def _groups(vault: VaultReader) -> str:
    for layer in vault.arch["layers"]:
        if layer["ffn"].get("groups", 1) > 1 and layer["ffn"].get("group_score", "best") == "best":
            return "groups of experts are scored by their best one, not their best two"
    return ""


def _dense(vault: VaultReader, stated: dict[str, Any]) -> str:
    layers = [layer["ffn"]["block"] == "moe" for layer in vault.arch["layers"]]
    rule = stated.get("dense", "none")
    if all(layers) or not any(layers) or rule == "any":
        return ""
    first = layers.index(True)
    if rule == "leading" and all(layers[first:]):
        return ""
    if rule == "step" and layers == [(index + 1) % (first + 1) == 0 for index in range(len(layers))]:
        return ""
    listed = ", ".join(str(index) for index, moe in enumerate(layers) if not moe)
    return f"layers {listed} have no experts"


def _attention(vault: VaultReader, stated: dict[str, Any]) -> str:
    attentions = [layer["attention"] for layer in vault.arch["layers"] if layer["attention"]["block"] == "gqa"]
    if any(each["window"] for each in attentions) and not stated.get("windows"):
        return "it has sliding windows"
    allowed = {"q", "k", "v", *stated.get("bias", ())}
    biased = {name.split(".")[3] for name in vault.trunk() if ".attn." in name and name.endswith(".bias")}
    if biased - allowed:
        return f"it has biases of {', '.join(sorted(biased - allowed))} in attention"
    held = {re.sub(r"^layers\.\d+\.", "", name) for name in vault.trunk()}
    if missing := set(stated.get("needs", ())) - held:
        return f"it has no {', '.join(sorted(missing))}"
    same = stated.get("heads", "")
    if same in ("all", "hidden") and any(each["heads"] != each["kv_heads"] for each in attentions):
        return "it has fewer heads of keys than of queries"
    hidden, layers_here = vault.arch["hidden"], len(vault.arch["layers"])
    for each in attentions if "attention_scale" not in vault.family.config else ():
        like = hidden // each["heads"] if layers_here in stated.get("scale_like_hidden", ()) else each["head_dim"]
        if abs(each["scale"] * like**0.5 - 1) > 1e-4:
            return f"scores are scaled by {each['scale']:.4g}, not by the root of {like}"
    if stated.get("one_base") and len({rope_base(each) for each in vault.arch["ropes"]}) > 1:
        return "layers with a window rotate by another base"
    every = stated.get("still_every")
    if every and any(each["rope"] != int((index + 1) % every == 0) for index, each in enumerate(attentions)):
        return f"not one layer of {every} is without rotation"
    layers = [layer["attention"] for layer in vault.arch["layers"] if layer["attention"]["block"] == "mla"]
    lite = stated.get("lite", ())
    if lite and any(not each["q_rank"] for each in layers) and len(layers) not in lite:
        return f"queries are made directly, which it has at {' or '.join(map(str, lite))} layers only"
    widths = {each["heads"] * each["head_dim"] for each in attentions}
    if same in ("wide", "hidden") and widths != {vault.arch["hidden"]}:
        return "its heads are not together as wide as the model"
    return ""


def rope_base(rope: dict[str, Any]) -> float:
    """Of frequencies that are powers of it, rounded: what is compared."""
    frequencies = rope["inv_freq"]
    return (
        float(round(frequencies[-1] ** (-len(frequencies) / (len(frequencies) - 1)))) if len(frequencies) > 1 else 0.0
    )


def _recurrent(vault: VaultReader) -> str:
    for layer in range(len(vault.arch["layers"])):
        r = vault.recurrent(layer)
        if r is None:
            continue
        if r.block == "delta" and r.key_dim != r.value_dim:
            return f"keys of {r.key_dim} and values of {r.value_dim} in recurrent layers"
        if r.block in ("mamba", "mamba2") and r.values != 2 * vault.arch["hidden"]:
            return f"recurrent layers of {r.values} channels are not twice as wide as the model"
        heads = [each["attention"]["heads"] for each in vault.arch["layers"] if each["attention"]["block"] == "mla"]
        if r.channel_decay and (set(heads) - {r.heads} or r.rank != r.key_dim):
            return f"{r.heads} heads of {r.key_dim} in recurrent layers, others in attention"
    return ""


def _fixed(vault: VaultReader, stated: dict[str, Any]) -> str:
    numbers = Numbers(vault.family, vault.config)
    for name, value in stated.get("fixed", {}).items():
        known = value if isinstance(value, list) else [value]
        found = numbers.raw(name)
        if found not in known:
            return f"{numbers.key(name)} is {found!r}, not {' or '.join(repr(each) for each in known)}"
    return ""
