"""What a measurement must know of its model: active bytes, whether both programs compute the same, and the routing.

Runs our engine inside this process, outside every cgroup: nothing here is timed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli import _core
from smoe_cli.bench.model import describe_vault

Array = np.ndarray[Any, Any]
NOT_EXPERTS_BYTES = 400 << 20  # what a limit leaves to trunk, state, scratch and process before experts get the rest


def open_engine(path: Path, ctx: int = 1024) -> Any:
    return _core.Engine(str(path), ctx=ctx)


def compare_logits(vault: Path, ids: list[int], peer_logits: Path) -> dict[str, float]:
    """Our logits against the peer's at every position: KL(peer || ours) in nats, agreement on the likeliest id."""
    ours = np.asarray(open_engine(vault).logits(ids, len(ids)), dtype=np.float64).reshape(len(ids), -1)
    peer = np.load(peer_logits).astype(np.float64)
    p, q = log_softmax(peer), log_softmax(ours)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": float((peer.argmax(axis=1) == ours.argmax(axis=1)).mean()),
        "largest_difference": float(np.abs(peer - ours).max() / np.abs(peer).max()),
        "entropy_nats": float(-(np.exp(p) * p).sum(axis=1).mean()),
    }


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def entropy_bits(trace: Array, experts: int) -> float:
    """Mean over layers of the entropy of which experts are used. ``trace`` is [positions, layers, top_k]."""
    result = []
    for layer in range(trace.shape[1]):
        share = np.bincount(trace[:, layer].ravel(), minlength=experts) / trace[:, layer].size
        result.append(-(share[share > 0] * np.log2(share[share > 0])).sum())
    return float(np.mean(result))


def repeated_share(trace: Array) -> float:
    """The share of experts that the token before used in the same layer."""
    hits = total = 0
    for before, now in itertools.pairwise(trace):
        for a, b in zip(before, now, strict=True):
            hits += len(set(a) & set(b))
            total += len(b)
    return hits / total


def lru_misses(trace: Array, slots: int, measured: int) -> list[tuple[int, int]]:
    """The (layer, expert) that an LRU of ``slots`` misses on the last ``measured`` positions, all before as warm-up."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = []
    for position, layers in enumerate(trace):
        for layer, chosen in enumerate(layers):
            for expert in chosen:
                key = (layer, int(expert))
                if key in held:
                    held.move_to_end(key)
                    continue
                if position >= len(trace) - measured:
                    missed.append(key)
                held[key] = None
                if len(held) > slots:
                    held.popitem(last=False)
    return missed


def streaming_floor(vault: Path, ids: list[int], prefill: int, measured: int, limits: dict[str, int]) -> dict[str, Any]:
    """Entropy of expert use of these ids, and per limit what an LRU replay of their routing misses a token."""
    model = describe_vault(vault)
    engine = open_engine(vault)
    engine.logits(ids, prefill)
    shape = (len(ids), len(model["top_k"]), max(model["top_k"]))
    trace = np.asarray(engine.route_trace(), dtype=np.int32).reshape(shape)
    record = max(model["record_bytes"])
    result: dict[str, Any] = {
        "positions": len(ids),
        "entropy_bits": entropy_bits(trace, max(model["experts"])),
        "uniform_bits": float(np.log2(max(model["experts"]))),
        "entropy_of_decode_bits": entropy_bits(trace[-measured:], max(model["experts"])),
        "repeated_share": repeated_share(trace[-measured:]),
    }
    for name, limit in limits.items():
        slots = max(0, (limit - NOT_EXPERTS_BYTES) // record)
        missed = lru_misses(trace, slots, measured)
        misses = len(missed) / measured
        result[name] = {"slots": slots, "lru_misses_per_token": misses, "lru_missed_bytes_per_token": misses * record}
    return result
