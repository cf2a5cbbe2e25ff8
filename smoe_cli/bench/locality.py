"""What a routing trace says of its text: how soon an expert is wanted again, and how few do most of the work."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Fetch = tuple[int, int, Sequence[int], Sequence[int]]  # MoE layer, tokens, experts, uses
QUANTILES = (0.25, 0.5, 0.75, 0.9)
SHARES = (0.5, 0.8, 0.95)


class Stack:
    """Reuse distances: how many other records were asked for since the last time (Mattson et al. 1970). An LRU of n
    slots hits exactly where the distance is below n. Counted with a Fenwick tree over the times of last use."""

    def __init__(self, accesses: int) -> None:
        self.tree = [0] * (accesses + 1)
        self.last: dict[tuple[int, int], int] = {}
        self.now = 0

    def _add(self, at: int, value: int) -> None:
        while at < len(self.tree):
            self.tree[at] += value
            at += at & -at

    def _sum(self, at: int) -> int:
        total = 0
        while at > 0:
            total += self.tree[at]
            at -= at & -at
        return total

    def use(self, record: tuple[int, int]) -> int | None:
        """The distance since the record's last use, None at its first."""
        self.now += 1
        before = self.last.get(record)
        self.last[record] = self.now
        self._add(self.now, 1)
        if before is None:
            return None
        self._add(before, -1)
        return self._sum(self.now - 1) - self._sum(before)


def quantile(values: list[int], share: float) -> int:
    """The least of ``values`` that ``share`` of them do not exceed; sorted already."""
    return values[min(len(values) - 1, int(share * len(values)))]


def locality(fetches: Sequence[Fetch]) -> dict[str, Any]:
    """``accesses``, ``records`` seen; ``reuse_distance`` quantiles in records; ``first_uses``, the share of accesses
    that were a record's first; ``overlap`` for each layer, the share of a decode step's experts that the step before
    asked for too; ``hot_set``, the share of the records that do half, 80% and 95% of the work."""
    stack = Stack(sum(len(experts) for _, _, experts, _ in fetches))
    distances: list[int] = []
    uses: Counter[tuple[int, int]] = Counter()
    before: dict[int, set[int]] = {}
    shared: dict[int, list[float]] = defaultdict(list)
    for layer, tokens, experts, counts in fetches:
        for index, expert in enumerate(experts):
            distance = stack.use((layer, expert))
            if distance is not None:
                distances.append(distance)
            uses[layer, expert] += counts[index] if counts else 1
        if tokens == 1:
            if layer in before:
                shared[layer].append(len(before[layer] & set(experts)) / len(experts))
            before[layer] = set(experts)
    distances.sort()
    accesses = stack.now
    return {
        "accesses": accesses,
        "records": len(uses),
        "first_uses": (accesses - len(distances)) / accesses if accesses else 0.0,
        "reuse_distance": {f"{q:.0%}": quantile(distances, q) for q in QUANTILES} if distances else {},
        "overlap": {layer: statistics.mean(values) for layer, values in sorted(shared.items())},
        "hot_set": {f"{share:.0%}": hot_share(uses, share) for share in SHARES},
        "distances": distances,
    }


def hot_share(uses: Counter[tuple[int, int]], share: float) -> float:
    """The smallest share of the records whose uses make ``share`` of all."""
    total, done = sum(uses.values()), 0
    for count, (_, times) in enumerate(uses.most_common(), 1):
        done += times
        if done >= share * total:
            return count / len(uses)
    return 1.0
