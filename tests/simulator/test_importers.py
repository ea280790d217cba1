"""Importers on small samples of each format; on the published traces where they lie beside the
repository."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.forecast.trace import Trace, TraceError
from tools.simulator.convert_trace import main
from tools.simulator.importers import open_any_trace, read_delta_npy, read_route_csv

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")

HEAD = """# route_trace v1
# model=/some/where/Tiny-MoE-Q4.gguf arch=tiny n_layer=2 n_expert=9 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=200
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
# The prompt layer by layer, its first token without the last layer; then two turns of answers.
ROWS = """0,0,0,0,0,8,0.75,0,1
0,0,0,0,1,2,0.25,0,1
0,0,1,0,0,3,0.5,0,1
0,0,1,0,1,1,0.5,0,1
0,0,1,1,0,4,1,0,1
0,0,1,1,1,5,0,0,1
0,1,2,0,0,7,0.5,0,1
0,1,2,0,1,6,0.5,0,1
0,1,2,1,0,0,0.5,0,1
0,1,2,1,1,8,0.5,0,1
1,1,0,0,0,1,0.5,0,1
1,1,0,0,1,2,0.5,0,1
1,1,0,1,0,3,0.5,0,1
1,1,0,1,1,4,0.5,0,1
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_route_csv(tmp_path: Path) -> None:
    trace = read_route_csv(write(tmp_path / "t.csv", HEAD + ROWS))
    assert (trace.model, trace.family, trace.num_experts) == ("Tiny-MoE-Q4", "tiny", 9)
    assert trace.experts.tolist() == [[[3, 1], [4, 5]], [[7, 6], [0, 8]], [[1, 2], [3, 4]]]
    assert trace.phase.tolist() == [0, 1, 1] and trace.sequence.tolist() == [0, 0, 1]
    assert trace.weights is not None and trace.weights[0].tolist() == [[0.5, 0.5], [1, 0]]
    assert trace.token_ids is None


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    rows = ROWS.splitlines(keepends=True)
    expected = read_route_csv(write(tmp_path / "a.csv", HEAD + ROWS))
    mixed = read_route_csv(write(tmp_path / "b.csv", HEAD + "".join(rows[::-1])))
    assert np.array_equal(mixed.experts, expected.experts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "shape"),
        (ROWS, "shape"),
        (HEAD.replace("layer,slot", "slot,layer") + ROWS, "header"),
        (HEAD + ROWS.replace("0,1,2,1,1,8", "0,1,2,1,1,9"), "outside 0 to 8"),
        (HEAD + ROWS.replace("0,1,2,1,1,8", "0,1,2,1,0,8"), "twice"),
        (HEAD + ROWS.replace("0,1,2,1,1,8,0.5,0,1\n", ""), "lacks layers"),
        (HEAD + ROWS.replace("0,1,2,1,1,8", "0,1,2,1,1,eight"), "eight"),
        (HEAD + ROWS.replace("0,1,2,1,1,8", "0,1,2,1,1,0"), "the same expert"),
    ],
)
def test_route_csv_refuses(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        read_route_csv(write(tmp_path / "t.csv", text))
    assert words in error.value.message and "t.csv" in error.value.message


@pytest.mark.parametrize("name", ["t.npy", "t.npy.xz"])
def test_delta_npy(name: str, tmp_path: Path) -> None:
    layers, top_k, sequences, length = 3, 4, 2, 5
    rng = np.random.default_rng(0)
    picks = [np.sort(rng.permutation(200)[:top_k]) for _ in range(sequences * length * layers)]
    experts = np.array(picks).reshape(sequences, length, layers, top_k)
    delta = np.diff(experts, axis=3, prepend=0).transpose(2, 3, 0, 1).astype(np.uint8)
    with (lzma.open if name.endswith("xz") else open)(tmp_path / name, "wb") as file:
        np.save(file, delta)
    token_ids = np.arange(10).reshape(2, 5)
    trace = read_delta_npy(tmp_path / name, 200, 2, token_ids)
    assert np.array_equal(trace.experts, experts.reshape(-1, layers, top_k))
    assert trace.sequence.tolist() == [0] * 5 + [1] * 5
    assert trace.phase.tolist() == [0, 0, 1, 1, 1] * 2
    assert trace.token_ids is not None and trace.token_ids.tolist() == list(range(10))
    assert trace.model == "t"
    with pytest.raises(TraceError, match=f"outside 0 to {experts.max() - 1}"):
        read_delta_npy(tmp_path / name, int(experts.max()), 2)


def test_delta_npy_refuses_other_files(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(3, np.uint8))
    write(tmp_path / "text.npy", "hello")
    write(tmp_path / "text.npy.xz", "hello")
    for name in ("flat.npy", "text.npy", "text.npy.xz", "missing.npy"):
        with pytest.raises(TraceError, match=name):
            read_delta_npy(tmp_path / name, 128, 0)


@needs_shared
@pytest.mark.parametrize(
    ("name", "shape", "tokens"),
    [("qwen", (48, 128, 6), 128), ("gptoss", (36, 128, 2), 64), ("gemma", (30, 128, 6), 128)],
)
def test_published_tables(name: str, shape: tuple[int, int, int], tokens: int) -> None:
    trace = read_route_csv(SHARED / "qwen3-gptoss-gemma" / f"{name}.route.csv")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == shape
    assert int((trace.phase == 1).sum()) == tokens
    assert trace.weights is not None
    assert (np.diff(trace.weights.astype(np.float32), axis=2) <= 0).all()  # the likeliest first


@needs_shared
def test_published_array() -> None:
    token_ids = np.load(SHARED / "twin" / "twin_tokens.npy")[:40]
    trace = read_delta_npy(SHARED / "twin" / "twin_routes0.npy.xz", 128, 24, token_ids)
    assert trace.experts.shape == (40 * 407, 48, 8)
    assert int((trace.phase == 0).sum()) == 40 * 24
    assert trace.token_ids is not None and trace.token_ids[407] == token_ids[1, 0]


def test_the_number_of_experts_can_be_left_out(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([3, 4], np.uint8).reshape(1, 2, 1, 1))
    trace = read_delta_npy(tmp_path / "t.npy")
    assert (trace.num_experts, trace.experts.tolist(), trace.phase.tolist()) == (8, [[[3, 7]]], [1])


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder with a `table`, a `packed` one and an `array`."""
    table = write(tmp_path / "table", HEAD + ROWS)
    (tmp_path / "packed").write_bytes(lzma.compress(table.read_bytes()))
    np.save(tmp_path / "array.npy", np.array([3, 4], np.uint8).reshape(1, 2, 1, 1))
    (tmp_path / "array.npy").rename(tmp_path / "array")
    return tmp_path


def test_the_content_says_what_a_file_is(others: Path) -> None:
    expected = read_route_csv(others / "table")
    expected.save(others / "own")
    for name in ("table", "own", "packed"):
        assert np.array_equal(open_any_trace(others / name).experts, expected.experts)
    assert open_any_trace(str(others / "array")).experts.tolist() == [[[3, 7]]]
    assert len(open_any_trace("qwen3")) == 129


def test_conversion(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The product opens its own format alone, and says how to get there."""
    for name in ("table", "packed", "array"):
        with pytest.raises(TraceError, match=name) as refused:
            open_trace(others / name)
        assert "python -m tools.simulator.convert_trace IN OUT" in refused.value.hint
        assert main([str(others / name), str(others / "own")]) == 0
        assert capsys.readouterr().out == ""
        expected = open_any_trace(others / name)
        assert np.array_equal(Trace.load(others / "own").experts, expected.experts)
    assert main([str(others / "none"), str(others / "own")]) == 1


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"some text" * 99)[:40])
    write(tmp_path / "text", "hello")
    write(tmp_path / "zip", "PK")
    for name in ("cut.xz", "text", "zip"):
        with pytest.raises(TraceError, match=name):
            open_any_trace(tmp_path / name)
    with pytest.raises(TraceError):
        open_any_trace(tmp_path)
    with pytest.raises(TraceError, match="'qwen4'"):
        open_any_trace("qwen4")


@needs_shared
def test_shipped_trace_is_the_published_one() -> None:
    published = read_route_csv(SHARED / "qwen3-gptoss-gemma" / "qwen.route.csv")
    assert np.array_equal(open_trace("qwen3").experts, published.experts)
