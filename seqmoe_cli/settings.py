"""Options of the engine and of sampling; the only home of their defaults. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from seqmoe_cli.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
POLICIES = ("auto", "lru", "decayed", "forecast")
PREFETCHES = ("auto", "off", "lookahead", "full")
PREFETCHERS = ("auto", "gpu", "thread")
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_MAX_SLOTS, _MAX_BYTES = 10**9, 2**50  # beyond any machine: a typing error
_POOL_HELP = (
    "use auto, all, a share of all routed experts (45%), a size (2GiB) or a count (64slots)"
)


def check_range(flag: str, value: float, low: float, high: float) -> None:
    """Raise `UsageError` unless low <= value <= high; NaN is never in range."""
    if not low <= value <= high:
        raise UsageError(f"{flag} {value} is out of range", f"use a number from {low} to {high}")


@dataclass(frozen=True)
class PoolSize:
    """How large the pool shall be: `kind` is auto, all, percent, bytes or slots."""

    kind: str
    value: float = 0.0
    text: str = "auto"

    @classmethod
    def parse(cls, text: str) -> PoolSize:
        """Read `auto`, `all`, `45%`, `2GiB` or `64slots`; raises `UsageError` for anything else."""
        word = text.strip().lower()
        if word in ("auto", "all"):
            return cls(word, text=word)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|slots?|[kmg]i?b)", word, re.ASCII)
        if match is None:
            raise UsageError(f"--pool {text!r} is not a pool size", _POOL_HELP)
        number, unit, text = float(match[1]), match[2], text.strip()
        if unit == "%" and 0 < number <= 100:
            return cls("percent", number, text)
        if unit.startswith("slot") and 1 <= number <= _MAX_SLOTS and number == int(number):
            return cls("slots", number, text)
        if unit in _UNITS and 0 < number * _UNITS[unit] <= _MAX_BYTES:
            return cls("bytes", number * _UNITS[unit], text)
        raise UsageError(f"--pool {text!r} is out of range", _POOL_HELP)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and
    penalties of 1 (repeat) or 0 (presence, frequency) are off; `seed` None draws a fresh one."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is opened with. `ctx_size` is cut to the model's own maximum; `vram_gib`
    None means all free memory of the device. `verify`: prove, on the device, that every slot read
    holds the expert asked for.

    `policy`, one of POLICIES, chooses the victim of a miss; `prefetch`, one of PREFETCHES: whether
    experts are copied before they are wanted. "auto" is what was measured to be the fastest: on a
    GPU with a pool of less than all experts decayed counts and look-ahead, and the forecast once
    the model has a trained predictor; elsewhere least recent use and none. Decayed counts
    wherever `--prefetch full` needs them; look-ahead alone beside "lru". `prefetch_by`, one of
    PREFETCHERS: what copies them; "auto" is the GPU where there is one. `predictor`: a file to take
    in the place of the model's own."""

    pool: PoolSize = PoolSize("auto")
    device: str = "auto"
    dtype: str = "auto"
    ctx_size: int = 8192
    vram_gib: float | None = None
    verify: bool = False
    policy: str = "auto"
    prefetch: str = "auto"
    prefetch_by: str = "auto"
    predictor: Path | None = None

    @property
    def forecasting(self) -> str:
        """The flag that a predictor is needed for; empty if it is not."""
        if self.policy == "forecast":
            return "--policy forecast"
        return "--prefetch full" if self.prefetch == "full" else ""
