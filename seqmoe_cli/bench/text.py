"""The text that a benchmark reads: the fables shipped with the package."""

from __future__ import annotations

from importlib.resources import files

SHIPPED = "aesop_fables.txt"


def shipped_text() -> tuple[str, str]:
    """Connected English prose of about 24,000 tokens, and the name under which rows cite it."""
    text = files("seqmoe_cli").joinpath("data", SHIPPED).read_bytes().decode("utf-8")
    return text, f"seqmoe_cli/data/{SHIPPED}"
