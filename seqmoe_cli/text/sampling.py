"""Sampling settings: each value with where it came from.

One table of knobs serves the flags, generation_config.json, `/set` and `/show`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmoe_cli.errors import CheckpointError, UsageError
from seqmoe_cli.settings import SamplingParams, check_range
from seqmoe_cli.text.files import read_json_object

Value = int | float | None
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Knob:
    """One setting: its flag without dashes, its field in `SamplingParams`, its name in
    generation_config.json (empty: not read from there), and the values it takes."""

    name: str
    field: str
    checkpoint_key: str
    kind: type[int] | type[float]
    low: float
    high: float

    def check(self, label: str, value: Any) -> int | float:
        """`value` in this knob's type; raises `UsageError` that starts with `label`."""
        number = value if isinstance(value, str) else repr(value)
        try:
            parsed = self.kind(value)
            if isinstance(value, bool) or (isinstance(value, float) and value != parsed):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            what = "a whole number" if self.kind is int else "a number"
            raise UsageError(
                f"{label} {number} is not {what}", f"use {what} from {self.low} to {self.high}"
            ) from None
        check_range(label, parsed, self.low, self.high)
        return parsed


KNOBS = (
    Knob("temp", "temperature", "temperature", float, 0, 100),
    Knob("top-k", "top_k", "top_k", int, 0, 1_000_000),
    Knob("top-p", "top_p", "top_p", float, 0.001, 1),
    Knob("min-p", "min_p", "min_p", float, 0, 1),
    Knob("repeat-penalty", "repeat_penalty", "repetition_penalty", float, 0.01, 100),
    Knob("presence-penalty", "presence_penalty", "", float, 0, 100),
    Knob("frequency-penalty", "frequency_penalty", "", float, 0, 100),
    Knob("seed", "seed", "", int, 0, 2**63 - 1),
)
_BY_NAME = {knob.name: knob for knob in KNOBS}


@dataclass
class Setting:
    """A value and its origin: flag, generation_config.json, default or /set."""

    value: Value
    origin: str


class SamplingSettings:
    """The settings in force; `params` is what the engine takes."""

    def __init__(self, flags: Mapping[str, Value], checkpoint: Mapping[str, Value]) -> None:
        defaults = SamplingParams()
        self.settings = {
            knob.name: Setting(getattr(defaults, knob.field), "default") for knob in KNOBS
        }
        for values, origin in ((checkpoint, GENERATION_CONFIG), (flags, "flag")):
            for name, value in values.items():
                if value is not None:
                    self.settings[name] = Setting(value, origin)

    @property
    def params(self) -> SamplingParams:
        values: dict[str, Any] = {k.field: self.settings[k.name].value for k in KNOBS}
        return SamplingParams(**values)

    def set(self, name: str, text: str) -> None:
        """What `/set name text` does; "random" frees the seed. Raises `UsageError` for a bad
        value; `name` is a knob's."""
        free = name == "seed" and text == "random"
        value = None if free else _BY_NAME[name].check(f"/set {name}", text)
        self.settings[name] = Setting(value, "/set")

    def text(self, name: str) -> str:
        """The value as people read it."""
        value = self.settings[name].value
        return "random" if value is None else str(value)

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, origin) of every setting, as `/show` lists them."""
        return [(name, self.text(name), s.origin) for name, s in self.settings.items()]


def check_flags(flags: Mapping[str, Value]) -> None:
    """Raise `UsageError` for a sampling flag that is out of range; None means not given."""
    for name, value in flags.items():
        if value is not None:
            _BY_NAME[name].check(f"--{name}", value)


def checkpoint_settings(folder: Path) -> dict[str, Value]:
    """Settings that the model's generation_config.json gives; `do_sample: false` means greedy.

    Raises `CheckpointError` naming the field for a value that cannot be used.
    """
    path = folder / GENERATION_CONFIG
    config = read_json_object(path)
    values: dict[str, Value] = {}
    for knob in KNOBS:
        raw = config.get(knob.checkpoint_key) if knob.checkpoint_key else None
        if raw is None:
            continue
        try:
            values[knob.name] = knob.check(knob.checkpoint_key, raw)
        except UsageError as error:
            raise CheckpointError(f"{path}: {error.message}", error.hint) from None
    if config.get("do_sample") is False:
        values["temp"] = 0.0
    return values
