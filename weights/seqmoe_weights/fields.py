"""Typed reads of a parsed config.json. Every error names the file and the field."""

from __future__ import annotations

import math
from typing import Any

from seqmoe_weights.errors import CheckpointError, UnsupportedError

_MAX_INTEGER = 2**31 - 1
_HINT = "the checkpoint is damaged or not of this family; download it again"


class Fields:
    """A JSON object of config.json; `prefix` is its place there, such as `rope_parameters.`.

    A field that is null counts as absent, as it does for Hugging Face. The readers raise
    `CheckpointError` for a value that is absent (where no default is given), of another type or
    out of range. A boolean is not a number.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, maximum: int = _MAX_INTEGER) -> int:
        """A whole number from 1 to `maximum`."""
        value: int = self._read(name, int, "a whole number", default)
        if not 1 <= value <= maximum:
            raise self._wrong(name, value, f"allowed are 1 to {maximum}")
        return value

    def positive_number(self, name: str) -> float:
        """A finite number above 0."""
        value: float = self._read(name, int | float, "a number")
        if not (0 < value <= 1e300 and math.isfinite(value)):
            raise self._wrong(name, value, "it must be above 0")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value: bool = self._read(name, bool, "true or false", default)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value: str = self._read(name, str, "a string", default)
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty when absent."""
        value: list[str] = self._read(name, list, "a list of strings", [])
        if not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "not a list of strings")
        return value

    def nested(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        if name not in self:
            return None
        return Fields(self._read(name, dict, "an object"), f"{self._prefix}{name}.")

    def require(self, name: str, allowed: object) -> None:
        """Refuse, by name, a field that is present with a value other than the implemented one."""
        if name in self and not _same(self._values[name], allowed):
            raise UnsupportedError(
                f"config.json: {self._prefix}{name} = {_short(self._values[name])} "
                "is not implemented",
                "convert a checkpoint without it"
                if allowed is None
                else f"only {allowed!r} is supported",
            )

    def _read(self, name: str, kind: Any, wanted: str, default: object = None) -> Any:
        value = self._values[name] if name in self else default
        if value is None:
            raise CheckpointError(f"config.json: field {self._prefix}{name} is missing", _HINT)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(name, value, f"not {wanted}")
        return value

    def _wrong(self, name: str, value: object, what: str) -> CheckpointError:
        place = f"config.json: {self._prefix}{name}"
        return CheckpointError(f"{place} is {_short(value)}, {what}", _HINT)


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
