"""A trace is opened by the name of a shipped one, or from a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.forecast.trace import TraceError


def test_shipped_trace() -> None:
    trace = open_trace("qwen3")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (48, 128, 6)
    assert trace.phase.tolist() == [0] + [1] * 128
    assert trace.weights is not None
    note = files("seqmoe_cli").joinpath("data", "qwen3.md").read_text("utf-8")
    assert "Apache" in note and "BigMoeOnEdge" in note


def test_what_is_no_trace(tmp_path: Path) -> None:
    for name in ("text", "zip"):
        (tmp_path / name).write_text("hello" if name == "text" else "PK")
        with pytest.raises(TraceError, match=name):
            open_trace(tmp_path / name)
    with pytest.raises(TraceError):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="'qwen4'"):
        open_trace("qwen4")
