"""Which tilings make the matrix-vector kernels fastest, in the shapes of Qwen3-30B-A3B-FP8.

    python benchmarks/tilings.py [--only NAME] [--compile]

Prints the best of each kernel; times are those of kernels.py. With --compile nothing is measured:
several such processes, one for each NAME, fill Triton's cache sooner than the measurement alone. A
choice that is better everywhere belongs into `seqmoe_kernels.dense.tiling`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.kernels import (
    BF16,
    EXPERTS,
    FORMAT,
    HIDDEN,
    INTER,
    KEYS,
    QUERIES,
    TOP_K,
    found,
    fp8_matrices,
    microseconds,
    orders_of_slots,
    random_matrices,
    random_slots,
)
from seqmoe_kernels import Matrix, Norm
from seqmoe_kernels.dense.linear import one_token
from seqmoe_kernels.dense.tiling import RowTiling
from seqmoe_kernels.experts.mlp import down, gate_up


class Subject(NamedTuple):
    """A kernel and its candidates; its calls take the tiling."""

    name: str
    candidates: list[RowTiling]
    calls: list[Callable[[RowTiling], object]]


def subjects() -> Iterator[Subject]:
    slots, orders = random_slots(), orders_of_slots()
    x = torch.randn((1, HIDDEN), dtype=BF16, device="cuda")
    norm = Norm(torch.randn(HIDDEN, dtype=BF16, device="cuda"), 1e-6)
    act = torch.randn((TOP_K, INTER), dtype=BF16, device="cuda")
    shares = torch.rand(TOP_K, device="cuda")
    calls = [lambda t, p=p: gate_up(x, slots, found(p), FORMAT, t) for p in orders]
    yield Subject("gate+up", candidates(HIDDEN), calls)
    calls = [lambda t, p=p: down(act, slots, p, shares, x, FORMAT, t) for p in orders]
    yield Subject("down", candidates(TOP_K * INTER), calls)
    groups = fp8_matrices(QUERIES, KEYS, KEYS, cols=HIDDEN)
    calls = [lambda t, g=g: one_token(x, g, norm, None, t) for g in groups]
    yield Subject("qkv", candidates(HIDDEN), calls)
    mixed = torch.randn((1, QUERIES), dtype=BF16, device="cuda")
    groups = fp8_matrices(HIDDEN, cols=QUERIES)
    calls = [lambda t, g=g: one_token(mixed, g, None, x, t) for g in groups]
    yield Subject("o", candidates(QUERIES), calls)
    weights = random_matrices(EXPERTS, HIDDEN, BF16)
    calls = [lambda t, w=w: one_token(x, [Matrix.of(w)], norm, None, t) for w in weights]
    yield Subject("router", candidates(2 * HIDDEN), calls)


def candidates(row_bytes: int) -> list[RowTiling]:
    """Tilings in which a lane has at most 16 loads of each matrix on their way."""
    return [
        RowTiling(rows, tiles, warps)
        for rows in (2, 4, 8, 16)
        for warps in (1, 2, 4, 8)
        for tiles in range(1, 16 // rows + 1)
        if -(-row_bytes // (512 * warps)) % tiles == 0
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the kernel's name")
    parser.add_argument("--compile", action="store_true", help="only compile")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/tilings.py: no usable CUDA device", file=sys.stderr)
        return 1
    for subject in subjects():
        if args.only not in subject.name:
            continue
        results = []
        for tiling in subject.candidates:
            calls = [lambda call=call, t=tiling: call(t) for call in subject.calls[:16]]
            if args.compile:
                calls[0]()
                continue
            results.append((microseconds(calls, 0.02), tiling))
        for us, tiling in sorted(results)[:6]:
            print(f"{subject.name:10}{us:9.2f} us  {tiling}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
