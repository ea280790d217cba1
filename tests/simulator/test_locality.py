"""Figures of locality, by hand and on a published trace, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.forecast.trace import Trace
from tools.demo_model import locality
from tools.simulator.importers import read_route_csv
from tools.simulator.locality import adjacent_overlap, working_set

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


def hand_made() -> Trace:
    """Five tokens in two sequences; layer 0 stays the same within each, layer 1 changes."""
    layer_0 = [[0, 1], [0, 1], [1, 0], [4, 5], [4, 5]]
    layer_1 = [[0, 1], [1, 2], [3, 4], [3, 4], [5, 0]]
    return Trace(
        model="hand",
        family="none",
        num_experts=6,
        experts=np.array([layer_0, layer_1], np.uint8).transpose(1, 0, 2),
        sequence=np.array([0, 0, 0, 1, 1], np.uint32),
        phase=np.array([0, 1, 1, 1, 1], np.uint8),
    )


def test_overlap_of_neighbours_in_a_sequence() -> None:
    assert adjacent_overlap(hand_made()).tolist() == pytest.approx([1.0, 1 / 6])
    first = hand_made().select(np.arange(5) == 0)
    assert np.isnan(adjacent_overlap(first)).all()


def test_working_set_of_windows_in_a_sequence() -> None:
    trace = hand_made()
    assert working_set(trace, 1) == 2.0
    assert working_set(trace, 2) == pytest.approx((2 + 3 + 2 + 4) / 4)  # tokens 0-1 and 3-4
    assert working_set(trace, 3) == pytest.approx((2 + 5) / 2)  # tokens 0-2
    assert np.isnan(working_set(trace, 4))


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hand.trace"
    hand_made().save(path)
    assert locality.main([str(path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("`hand`: 2 layers of 6 experts, 2 used by a token. 4 tokens of")
    assert "| 15 % | 1 | too small |  |  |  |" in lines
    # five of twelve slots: 7 and 6 loads for the 16 lookups of the four tokens that count
    assert "| 45 % | 5 | 56.2 % | 1.8 | 62.5 % | 1.5 |" in lines
    assert "0.333, here 0.500, layer by layer:" in lines
    assert "| tokens | 1 | 2 |" in lines and "| experts | 2.0 | 3.0 |" in lines
    overlap = next(line for line in lines if line.startswith("| 0 |"))
    assert overlap.split(" | ")[1:3] == ["1.000", "0.000"]


def test_page_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_made().select(hand_made().phase == 0).save(tmp_path / "prompt.trace")
    assert locality.main([]) == 2
    assert locality.main([str(tmp_path / "missing")]) == 1
    assert locality.main([str(tmp_path / "prompt.trace")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "missing" in err and "no token of an answer" in err


@needs_shared
def test_published_overlap_of_qwen3() -> None:
    trace = read_route_csv(SHARED / "qwen3-gptoss-gemma" / "qwen.route.csv")
    assert round(float(adjacent_overlap(trace.select(trace.phase == 1)).mean()), 2) == 0.38
