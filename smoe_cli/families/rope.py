"""Rotary embeddings resolved into numbers: inverse frequencies (float32) and the scale of cos and sin.

The formulas are those of the reference implementation (transformers, ``modeling_rope_utils``), in float32 as there.
Types: default, linear, dynamic (up to the original length, where it equals default; or with a fixed alpha), yarn,
llama3, longrope (two sets of frequencies: an engine whose window is longer than the original length uses the second).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.errors import CorruptError, UnsupportedError

LARGEST = 1e15  # of any number in rope settings
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """``inv_freq`` has half as many values as are rotated; cos and sin are multiplied by ``scale``. Pairs are (i, i +
    half), or (2i, 2i + 1) where ``interleaved``. The long set replaces them where the window exceeds ``long_from``."""

    inv_freq: tuple[float, ...]
    scale: float
    max_positions: int
    interleaved: bool = False
    long_from: int = 0
    long_inv_freq: tuple[float, ...] = ()
    long_scale: float = 1.0


@dataclass(frozen=True)
class RopeInput:
    head_dim: int
    max_positions: int
    theta_default: float | None
    partial_allowed: bool
    partial_default: float = 1.0
    interleaved: bool = False


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The one rope dictionary of a config, of either spelling, with ``rope_type`` and (where stated) ``rope_theta``."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise CorruptError(f"config.json: rope settings are {found!r}, expected an object")
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedError("config.json: rope settings per layer type are not supported")
    settings = dict(found)
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    if settings["rope_type"] == "deepseek_yarn":  # another name of the same
        settings["rope_type"] = "yarn"
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is None and config.get(key) is not None:
            settings[key] = config[key]
    if config.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return settings


def resolve_rope(config: dict[str, Any], given: RopeInput, notices: list[str]) -> Rope:
    """Inverse frequencies and scale of a config. Defaults are only the family's documented ones, and are announced."""
    settings = rope_settings(config)
    kind = settings["rope_type"]
    if kind not in TYPES:
        raise UnsupportedError(f"config.json: rope type {kind!r} is not supported", f"supported: {', '.join(TYPES)}")
    theta = _number(settings, "rope_theta", 0.0)
    if not theta:
        if given.theta_default is None:
            raise CorruptError(
                "config.json states no rope_theta, and this family has no default for it",
                "add rope_theta, at the top level or in rope_parameters",
            )
        theta = given.theta_default
        notices.append(f"config.json states no rope_theta: the family's default, {theta:g}, is used")
    partial = _number(settings, "partial_rotary_factor", given.partial_default)
    if partial != 1.0 and not given.partial_allowed:
        raise UnsupportedError(f"config.json: partial_rotary_factor {partial} in a family that rotates whole heads")
    dim = int(given.head_dim * partial)
    if dim < 2 or dim % 2:
        raise CorruptError(f"config.json: {dim} rotated values per head, expected an even number")
    if theta <= 1.0:
        raise CorruptError(f"config.json: rope_theta is {theta}, expected more than 1")
    if kind == "longrope":
        return replace(_longrope(theta, dim, settings, given.max_positions), interleaved=given.interleaved)
    make = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}[kind]
    with np.errstate(all="ignore"):  # what comes out is checked
        inv_freq, scale, max_positions = make(theta, dim, settings, given.max_positions)
    if not np.all(np.isfinite(inv_freq)) or not math.isfinite(scale):
        raise CorruptError(f"config.json: the rope settings {settings} give frequencies that are not finite")
    return Rope(_floats(inv_freq), scale, max_positions, given.interleaved)


def _floats(values: F32) -> tuple[float, ...]:
    return tuple(float(str(value)) for value in values)


def _number(settings: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number of the settings; ``default`` where it is absent or null."""
    value = settings.get(key)
    if value is None:
        if default is None:
            raise CorruptError(f"config.json: rope type {settings['rope_type']!r} needs {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise CorruptError(f"config.json: rope {key} is {value!r}, expected a positive number")
    return float(value)


def _powers(base: float, dim: int) -> F32:
    """base ** (0, 2, 4 ... / dim): float32 exponents and base, the power correctly rounded to float32."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _default(base: float, dim: int, settings: dict[str, Any], positions: int) -> tuple[F32, float, int]:
    return np.float32(1.0) / _powers(base, dim), 1.0, positions


def _linear(base: float, dim: int, settings: dict[str, Any], positions: int) -> tuple[F32, float, int]:
    return np.float32(1.0) / _powers(base, dim) / np.float32(_number(settings, "factor")), 1.0, positions


def _dynamic(base: float, dim: int, settings: dict[str, Any], positions: int) -> tuple[F32, float, int]:
    """Up to the length the model was trained for, where the stretched base is the plain one. With ``alpha`` the base is
    stretched by it at every length."""
    if settings.get("alpha") and dim > 2:
        return np.float32(1.0) / _powers(base * _number(settings, "alpha") ** (dim / (dim - 2)), dim), 1.0, positions
    factor = _number(settings, "factor")
    stretched = base * (factor - (factor - 1)) ** (dim / (dim - 2)) if dim > 2 else base
    return np.float32(1.0) / _powers(stretched, dim), 1.0, positions


def _yarn(base: float, dim: int, settings: dict[str, Any], positions: int) -> tuple[F32, float, int]:
    original = _number(settings, "original_max_position_embeddings", positions)
    factor = _number(settings, "factor", positions / original)
    low, high = _yarn_range(base, dim, settings, original)
    powers = _powers(base, dim)
    extrapolated = np.float32(1.0) / powers
    interpolated = np.float32(1.0) / (np.float32(factor) * powers)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp.astype(np.float32)
    inv_freq = interpolated * (np.float32(1) - keep) + extrapolated * keep
    return inv_freq.astype(np.float32), _yarn_scale(settings, factor), max(positions, int(original * factor))


def _yarn_range(base: float, dim: int, settings: dict[str, Any], original: float) -> tuple[float, float]:
    """Between which pairs the frequencies pass from extrapolated to interpolated."""

    def pair_of(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low = pair_of(_number(settings, "beta_fast", 0.0) or 32)
    high = pair_of(_number(settings, "beta_slow", 0.0) or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_scale(settings: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    over, under = _number(settings, "mscale", 0.0), _number(settings, "mscale_all_dim", 0.0)
    return mscale(over) / mscale(under) if over and under else mscale(1.0)


def _llama3(base: float, dim: int, settings: dict[str, Any], positions: int) -> tuple[F32, float, int]:
    inv_freq = np.float32(1.0) / _powers(base, dim)
    factor, low = np.float32(_number(settings, "factor")), _number(settings, "low_freq_factor")
    high = _number(settings, "high_freq_factor")
    original = _number(settings, "original_max_position_embeddings", positions)
    wavelength = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(wavelength > np.float32(original / low), inv_freq / factor, inv_freq)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < np.float32(original / high)) & ~(wavelength > np.float32(original / low))
    return np.where(medium, blended, scaled).astype(np.float32), 1.0, positions


def _longrope(base: float, dim: int, settings: dict[str, Any], positions: int) -> Rope:
    """Each frequency divided by its own factor, short or long. Scales as stated (short_mscale, long_mscale,
    attention_factor), else sqrt(1 + ln(factor) / ln(original))."""
    original = _number(settings, "original_max_position_embeddings")
    factor = _number(settings, "factor", positions / original)
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = _number(settings, "attention_factor", derived)
    found = {}
    for which in ("short", "long"):
        factors = settings.get(f"{which}_factor")
        if not isinstance(factors, list) or len(factors) != dim // 2:
            raise CorruptError(f"config.json: rope {which}_factor is not a list of {dim // 2} numbers")
        if not all(isinstance(value, int | float) and 0 < value < LARGEST for value in factors):
            raise CorruptError(f"config.json: rope {which}_factor holds something other than positive numbers")
        found[which] = _floats(np.float32(1.0) / (np.array(factors, np.float32) * _powers(base, dim)))
    return Rope(
        found["short"],
        _number(settings, "short_mscale", scale),
        positions,
        long_from=int(original),
        long_inv_freq=found["long"],
        long_scale=_number(settings, "long_mscale", scale),
    )
