"""Energy from the processor's own counters (RAPL), net of what the idle machine takes. Where there are none: None."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
IDLE_S = 2.0


@dataclass(frozen=True)
class Domain:
    """One package's counter of microjoules, which begins again at ``wraps``."""

    file: Path
    wraps: int

    def read(self) -> int:
        return int(self.file.read_text())


class EnergyMeter:
    """Joules of all processor packages. ``open`` gives None where the machine does not count, or not for us."""

    def __init__(self, domains: list[Domain], idle_watts: float) -> None:
        self.domains, self.idle_watts = domains, idle_watts

    @classmethod
    def open(
        cls, root: Path = POWERCAP, idle_s: float = IDLE_S, sleep: Callable[[float], None] = time.sleep
    ) -> EnergyMeter | None:
        """Finds the packages and measures the idle machine for ``idle_s`` seconds."""
        domains = []
        for folder in sorted(root.glob("*-rapl:[0-9]")) + sorted(root.glob("*-rapl:[0-9][0-9]")):
            try:
                domain = Domain(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
                domain.read()
            except (OSError, ValueError):
                continue
            domains.append(domain)
        if not domains:
            return None
        meter = cls(domains, 0.0)
        before, start = meter.counters(), time.monotonic()
        sleep(idle_s)
        elapsed = max(time.monotonic() - start, idle_s)
        meter.idle_watts = meter.joules(before, meter.counters()) / elapsed
        return meter

    def counters(self) -> list[int]:
        return [domain.read() for domain in self.domains]

    def joules(self, before: list[int], after: list[int]) -> float:
        """Between two readings less than one turn of the counter apart."""
        spent = 0
        for domain, a, b in zip(self.domains, before, after, strict=True):
            spent += b - a if b >= a else b + domain.wraps - a
        return spent / 1e6

    def net_joules(self, before: list[int], after: list[int], seconds: float) -> float:
        return self.joules(before, after) - self.idle_watts * seconds
