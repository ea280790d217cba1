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
        value = self._read(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._ill_typed(name, value, "a whole number")
        if not 1 <= value <= maximum:
            raise CheckpointError(
                f"config.json: {self._prefix}{name} is {_short(value)}, allowed are 1 to {maximum}",
                _HINT,
            )
        return value

    def positive_number(self, name: str) -> float:
        """A finite number above 0."""
        value = self._read(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._ill_typed(name, value, "a number")
        if not (0 < value <= 1e300 and math.isfinite(value)):
            place = f"config.json: {self._prefix}{name}"
            raise CheckpointError(f"{place} is {_short(value)}, it must be above 0", _HINT)
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._read(name, default)
        if not isinstance(value, bool):
            raise self._ill_typed(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self._ill_typed(name, value, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty when absent."""
        value = self._read(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._ill_typed(name, value, "a list of strings")
        return value

    def nested(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        if name not in self:
            return None
        value = self._values[name]
        if not isinstance(value, dict):
            raise self._ill_typed(name, value, "an object")
        return Fields(value, f"{self._prefix}{name}.")

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

    def _read(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"config.json: field {self._prefix}{name} is missing", _HINT)
        return default

    def _ill_typed(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"config.json: {self._prefix}{name} is {_short(value)}, not {wanted}", _HINT
        )


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
