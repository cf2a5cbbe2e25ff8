"""Importance weights: how much an error in each column of a matrix matters, as the mean square of what the column is
multiplied with when the model reads a text.

An expert that few tokens chose is counted with ``PRIOR_ROWS`` rows of its layer's average, so that a handful of tokens
does not decide what it is good for.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smoe_cli import _core
from smoe_cli.errors import from_core

PRIOR_ROWS = 16
STEP_TOKENS = 512  # of context: each window is read from an empty one
EXPERT = re.compile(r"(layers\.\d+\.experts\.)(\d+)\.(input|middle)")
READS = {"gate": "input", "up": "input", "down": "middle"}

Columns = NDArray[np.float32]


@dataclass(frozen=True)
class Importance:
    """``columns`` by trunk tensor, and by "layers.L.experts.E.input" and ".middle"; ``name`` says of what."""

    columns: dict[str, Columns] = field(default_factory=dict)
    name: str = ""
    tokens: int = 0

    def of(self, tensor: str) -> Columns | None:
        """For a trunk tensor or a part of an expert ("layers.3.experts.5.down"); None where nothing was counted."""
        stem, _, part = tensor.rpartition(".")
        key = f"{stem}.{READS[part]}" if ".experts." in tensor and part in READS else tensor
        return self.columns.get(key)


def collect(vault: Path, ids: list[int], progress: Callable[[int], None]) -> Importance:
    """Read the ids with a vault of the same model, in windows, and average what was counted."""
    try:
        engine = _core.Engine(str(vault), watch_columns=True, ctx=STEP_TOKENS)
        for start in range(0, len(ids) - 1, STEP_TOKENS):
            engine.score(ids[start : start + STEP_TOKENS])
            progress(min(start + STEP_TOKENS, len(ids)))
        sums = engine.column_sums()
    except _core.CoreError as error:
        raise from_core(error) from error
    return Importance(_averages(sums), name_of(ids), len(ids))


def name_of(ids: list[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]


def _averages(sums: Mapping[str, tuple[NDArray[np.float64], int]]) -> dict[str, Columns]:
    layers: dict[tuple[str, str], list[tuple[NDArray[np.float64], int]]] = defaultdict(list)
    for name, counted in sums.items():
        if found := EXPERT.fullmatch(name):
            layers[found[1], found[3]].append(counted)
    whole = {key: sum(s for s, _ in every) / max(1, sum(n for _, n in every)) for key, every in layers.items()}
    averages = {}
    for name, (squares, rows) in sums.items():
        if found := EXPERT.fullmatch(name):
            mean = (squares + PRIOR_ROWS * whole[found[1], found[3]]) / (rows + PRIOR_ROWS)
        else:
            mean = squares / max(1, rows)
        if np.isfinite(mean).all() and mean.max() > 0:
            averages[name] = mean.astype(np.float32)
    return averages
