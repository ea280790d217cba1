"""Trace: which experts a model chose, token by token, as a file that numpy reads by itself.

T tokens, L layers, K experts per token, R dimensions of a projection. Imports no torch.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe_cli.errors import SeqmoeError
from seqmoe_weights.files import PART_SUFFIX, replacing

FORMAT, FORMAT_VERSION = "seqmoe-trace", 1
PREFILL, DECODE = 0, 1  # values of Trace.phase
_SCALARS = {
    "model": str,
    "family": str,
    "num_experts": int,
    "projection_seed": int,
    "weights_sha256": str,
}
_REQUIRED = ("model", "family", "num_experts", "experts", "sequence", "phase")
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, RuntimeError)


class TraceError(SeqmoeError):
    """A file that holds no trace, or one of another format version, or a damaged one."""


@dataclass(frozen=True)
class Trace:
    """The tokens that went through a model, in that order, with the experts of every layer.

    A malformed one is a `ValueError`. The last sampled token of an answer is not in it: nothing
    came after it, so it was never evaluated.
    """

    model: str
    family: str
    num_experts: int  # of one layer
    experts: NDArray[Any]  # uint8 (uint16 above 256 experts) [T, L, K], the likeliest first
    sequence: NDArray[np.uint32]  # [T], never decreasing: which tokens saw each other
    phase: NDArray[
        np.uint8
    ]  # [T], PREFILL for tokens of the prompt, DECODE for those of the answer
    token_ids: NDArray[np.uint32] | None = None  # [T]
    weights: NDArray[np.float16] | None = None  # [T, L, K], what each expert's output is scaled by
    hidden: NDArray[np.float16] | None = None  # [T, R]: final norm's output times `projection`
    projection: NDArray[np.float32] | None = None  # [hidden size, R], orthonormal columns
    projection_seed: int | None = None
    weights_sha256: str | None = None  # of the model, see `PackedModel`

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(problem)

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def num_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def starts(self) -> NDArray[np.intp]:
        """The first token of each sequence."""
        return np.flatnonzero(np.diff(self.sequence, prepend=-1))

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    def select(self, tokens: NDArray[np.bool_]) -> Trace:
        """The trace of some tokens; bool [T]."""
        changes: dict[str, Any] = {
            name: array[tokens]
            for name in ("experts", "sequence", "phase", "token_ids", "weights", "hidden")
            if (array := getattr(self, name)) is not None
        }
        return replace(self, **changes)

    def with_answers(self, answers: Sequence[Sequence[tuple[int, int]]]) -> Trace:
        """The same tokens, decoded being these alone: for each sequence pairs of the first place in
        it and the last + 1."""
        phase = np.full(len(self), PREFILL, np.uint8)
        for start, spans in zip(self.starts, answers, strict=True):
            for first, end in spans:
                phase[start + first : start + end] = DECODE
        return replace(self, phase=phase)

    def save(self, path: Path) -> int:
        """Write the file, whole or not at all, and return its size in bytes. The same trace gives
        the same bytes."""
        try:
            with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
                for name, array in self._arrays().items():
                    _write_array(archive, name, array)
        except BaseException:
            path.with_name(path.name + PART_SUFFIX).unlink(missing_ok=True)
            raise
        return path.stat().st_size

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """What the file holds, by name."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        body = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return {name: np.asarray(value) for name, value in (head | body).items()}

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read and check a file; raises `TraceError` saying what is wrong with it."""
        hint = "make one with: seqmoe trace MODEL --prompts FILE -o OUT"
        try:
            if not _is_zip(path):
                raise TraceError(
                    f"{path} is no trace of seqmoe",
                    f"{hint}; other programs' are turned into one by: python -m "
                    "tools.simulator.convert_trace IN OUT",
                )
            with np.load(path, allow_pickle=False) as arrays:
                _check_head(arrays)
                return cls(**_members(arrays))
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror or error}", hint) from error
        except _DAMAGE as error:
            raise TraceError(f"{path} is no usable trace: {error}", hint) from error


def expert_dtype(num_experts: int) -> type[np.uint8 | np.uint16]:
    """The type that holds an expert's number."""
    return np.uint8 if num_experts <= 256 else np.uint16


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:  # by name, zipfile takes a file that is not there for no zip
        return zipfile.is_zipfile(file)


def _write_array(file: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    entry = zipfile.ZipInfo(f"{name}.npy")  # with the date of 1980, not of today
    entry.compress_type = zipfile.ZIP_DEFLATED
    with file.open(entry, "w", force_zip64=True) as stream:
        np.lib.format.write_array(stream, np.asarray(array, order="C"), allow_pickle=False)


def _check_head(arrays: Any) -> None:
    if "format" not in arrays or str(arrays["format"]) != FORMAT:
        raise ValueError("it was not written by seqmoe")
    version = int(arrays["format_version"]) if "format_version" in arrays else None
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}, this seqmoe reads {FORMAT_VERSION}")


def _members(arrays: Any) -> dict[str, Any]:
    """The fields of a trace that a file has; what it has besides is left alone."""
    for name in _REQUIRED:
        if name not in arrays:
            raise ValueError(f"{name} is missing")
    names = [f.name for f in fields(Trace) if f.name in arrays]
    return {name: _SCALARS.get(name, np.asarray)(arrays[name]) for name in names}


def _problem(trace: Trace) -> str | None:
    """What is wrong with a trace, if anything."""
    experts, num_experts = trace.experts, trace.num_experts
    if not 1 <= num_experts <= 65536:
        return f"num_experts is {num_experts}"
    if experts.ndim != 3 or experts.dtype != expert_dtype(num_experts):
        return f"experts is {experts.dtype} {list(experts.shape)}"
    tokens, layers, top_k = experts.shape
    shapes: dict[str, tuple[type, tuple[int, ...]]] = {
        "sequence": (np.uint32, (tokens,)),
        "phase": (np.uint8, (tokens,)),
        "token_ids": (np.uint32, (tokens,)),
        "weights": (np.float16, (tokens, layers, top_k)),
    }
    if trace.hidden is not None or trace.projection is not None:
        if trace.hidden is None or trace.projection is None or trace.projection_seed is None:
            return "hidden, projection and projection_seed belong together"
        rank = trace.projection.shape[-1] if trace.projection.ndim == 2 else -1
        shapes["hidden"] = (np.float16, (tokens, rank))
        shapes["projection"] = (np.float32, (*trace.projection.shape[:1], rank))
    for name, (dtype, shape) in shapes.items():
        array = getattr(trace, name)
        if array is not None and (array.dtype != dtype or array.shape != shape):
            return f"{name} is {array.dtype} {list(array.shape)}"
    return _wrong_value(trace)


def _wrong_value(trace: Trace) -> str | None:
    experts = trace.experts
    if experts.size and int(experts.max()) >= trace.num_experts:
        return f"expert {experts.max()} of {trace.num_experts}"
    ordered = np.sort(experts, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        return "a token uses the same expert of a layer twice"
    if (trace.sequence[1:] < trace.sequence[:-1]).any():
        return "sequence decreases"
    if (trace.phase > DECODE).any():
        return f"phase {trace.phase.max()}"
    return None
