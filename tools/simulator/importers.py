"""Traces that other programs recorded: routing tables as CSV, and delta-coded arrays of numpy; both
may be compressed with xz."""

from __future__ import annotations

import lzma
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.forecast.shipped import open_trace
from seqmoe_cli.forecast.trace import PREFILL, Trace, TraceError, expert_dtype

_COLUMNS = "turn,phase,step,layer,slot,expert,weight"
_SHAPE = re.compile(r"model=(\S+) arch=(\S+) n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)")
_HINT = "see the trace formats in docs/architecture.md"
_XZ_MAGIC, _NUMPY_MAGIC = b"\xfd7zXZ\x00", b"\x93NUMPY"


def open_any_trace(source: str | Path) -> Trace:
    """What `open_trace` opens, or a file of one of the two formats here. The content decides, not
    the name. Raises `TraceError` for a file that is not there or holds no trace."""
    path = Path(source)
    if not path.is_file():
        return open_trace(source)
    try:
        with unpacked(path) as file:
            start = file.read(len(_NUMPY_MAGIC))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(f"cannot read {path}: {error}", _HINT) from error
    if start.startswith(b"PK"):
        return open_trace(path)
    return read_delta_npy(path) if start == _NUMPY_MAGIC else read_route_csv(path)


def unpacked(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Open a file for reading; one that xz compressed, whatever its name, gives what is inside."""
    with path.open("rb") as file:
        compressed = file.read(len(_XZ_MAGIC)) == _XZ_MAGIC
    return lzma.open(path, "rb") if compressed else path.open("rb")


def read_route_csv(path: Path) -> Trace:
    """A table with a row for each (token, layer, rank): turn, phase, step, layer, slot (the rank),
    expert, weight; columns after these are left alone. A line `# model=... arch=... n_layer=...
    n_expert=... n_expert_used=...` gives the shape.

    A turn becomes a sequence. Prompt tokens that lack layers are left out: some recorders skip the
    last layer where its result is not used. Raises `TraceError` for anything else.
    """
    try:
        with unpacked(path) as file:
            lines = file.read().decode("utf-8").splitlines()
        shape = next((found for line in lines if (found := _SHAPE.search(line))), None)
        rows = [line for line in lines if line and not line.startswith("#")]
        if shape is None or not rows or not rows[0].startswith(_COLUMNS):
            raise ValueError(f"no line with the model's shape, or no header {_COLUMNS}")
        name, family, layers, num_experts, top_k = shape.groups()
        table = np.loadtxt(rows[1:], delimiter=",", usecols=range(7), ndmin=2)
        columns = _whole_tokens(table, int(layers), int(top_k), int(num_experts))
        return Trace(Path(name).stem, family, int(num_experts), **columns)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise TraceError(f"{path} is no routing table: {error}", _HINT) from error


def _whole_tokens(
    table: NDArray[np.float64], layers: int, top_k: int, num_experts: int
) -> dict[str, Any]:
    """Arrays [T], [T, L, K] of the tokens that have all their rows."""
    table = table[np.lexsort(table[:, 4::-1].T)]  # by turn, phase, step, layer, rank
    _, start, count = np.unique(table[:, :3], axis=0, return_index=True, return_counts=True)
    start, lacking = start[count == layers * top_k], start[count != layers * top_k]
    if (table[lacking, 1] != PREFILL).any():
        raise ValueError("a token of the answer lacks layers or has too many")
    rows = table[start[:, None] + np.arange(layers * top_k)].reshape(-1, layers, top_k, 7)
    grid = np.stack(np.meshgrid(np.arange(layers), np.arange(top_k), indexing="ij"), axis=2)
    if (rows[..., 3:5] != grid).any():
        raise ValueError("a layer or rank is there twice")
    return {
        "experts": _numbers(rows[..., 5], num_experts),
        "weights": rows[..., 6].astype(np.float16),
        "sequence": rows[:, 0, 0, 0].astype(np.uint32),
        "phase": rows[:, 0, 0, 1].astype(np.uint8),
    }


def read_delta_npy(
    path: Path,
    num_experts: int | None = None,
    num_prompt_tokens: int = 0,
    token_ids: NDArray[Any] | None = None,
) -> Trace:
    """An array uint8 [layers, K, sequences, length]: expert numbers in rising order, each but the
    first as the difference to the one before it.

    Without `num_experts` a layer has as many as the highest number that occurs asks for. The first
    `num_prompt_tokens` of a sequence are its prompt. `token_ids` [sequences, length] are kept in a
    file of their own. Raises `TraceError` for anything else.
    """
    try:
        with unpacked(path) as file:
            delta = np.lib.format.read_array(file, allow_pickle=False)
        if delta.ndim != 4 or delta.dtype != np.uint8:
            raise ValueError(f"it is {delta.dtype} {list(delta.shape)}")
        layers, top_k, sequences, length = delta.shape
        experts = np.cumsum(delta, axis=1, dtype=np.int32).transpose(2, 3, 0, 1)
        num_experts = num_experts or int(experts.max()) + 1
        return Trace(
            model=path.name.split(".")[0],
            family="unknown",
            num_experts=num_experts,
            experts=_numbers(experts.reshape(-1, layers, top_k), num_experts),
            sequence=np.repeat(np.arange(sequences, dtype=np.uint32), length),
            phase=np.tile(np.arange(length) >= num_prompt_tokens, sequences).astype(np.uint8),
            token_ids=None if token_ids is None else token_ids.ravel().astype(np.uint32),
        )
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise TraceError(f"{path} holds no routing: {error}", _HINT) from error


def _numbers(experts: NDArray[Any], num_experts: int) -> NDArray[Any]:
    if experts.size and not 0 <= experts.min() <= experts.max() < num_experts:
        raise ValueError(f"an expert outside 0 to {num_experts - 1}")
    return np.ascontiguousarray(experts.astype(expert_dtype(num_experts)))
