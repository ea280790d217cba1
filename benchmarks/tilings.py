"""Which tilings make the matrix-vector kernels fastest, in the shapes of Qwen3-30B-A3B-FP8.

    python benchmarks/tilings.py [--only NAME]

Prints the best of each kernel; times are those of kernels.py. A choice that is better everywhere
belongs into `seqmoe_kernels.gemv.tiling_for`.
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
    FORMAT,
    HIDDEN,
    INTER,
    MATRICES,
    TOP_K,
    VOCAB,
    microseconds,
    pairs_of_slots,
    random_matrices,
    random_slots,
)
from seqmoe_kernels.expert_mlp import down_triton, gate_up_triton
from seqmoe_kernels.gemv import Tiling, linear_triton


class Subject(NamedTuple):
    """A kernel over rows of `row_bytes`; its calls take the tiling."""

    name: str
    row_bytes: int
    itemsize: int
    calls: list[Callable[[Tiling], object]]


def subjects() -> Iterator[Subject]:
    slots, pairs = random_slots(), pairs_of_slots()
    x = torch.randn((1, HIDDEN), dtype=BF16, device="cuda")
    act = torch.randn((TOP_K, INTER), dtype=BF16, device="cuda")
    out = torch.empty((1, TOP_K, HIDDEN), device="cuda")
    calls = [lambda t, p=p: gate_up_triton(x, slots, p, FORMAT, t) for p in pairs]
    yield Subject("gate+up", HIDDEN, 1, calls)
    calls = [lambda t, p=p: down_triton(act, slots, p, FORMAT, out, t) for p in pairs]
    yield Subject("down", INTER, 1, calls)
    for name, (rows, cols) in MATRICES.items():
        vector = torch.randn((1, cols), dtype=BF16, device="cuda")
        scale = torch.rand((rows // 128, cols // 128), device="cuda")
        weights = random_matrices(rows, cols, torch.float8_e4m3fn)
        calls = [
            lambda t, v=vector, w=w, s=scale: linear_triton(v, w, s, tiling=t) for w in weights
        ]
        yield Subject(name, cols, 1, calls)
    weights = random_matrices(VOCAB, HIDDEN, BF16)
    calls = [lambda t, w=w: linear_triton(x, w, tiling=t) for w in weights]
    yield Subject("lm_head", 2 * HIDDEN, 2, calls)


def candidates(row_bytes: int, itemsize: int) -> Iterator[Tiling]:
    """Tilings in which a thread has 2 to 8 loads of 16 bytes in each tile."""
    for width in (256, 512, 1024, 2048):
        num_tiles = -(-row_bytes // width)
        for rows in (2, 4, 8, 16, 32):
            for warps in (1, 2, 4, 8):
                loads = rows * width // (16 * 32 * warps)
                if width // itemsize >= 128 and 2 <= loads <= 8:
                    yield Tiling(rows, width // itemsize, min(num_tiles, 4), warps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the kernel's name")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/tilings.py: no usable CUDA device", file=sys.stderr)
        return 1
    for subject in subjects():
        if args.only not in subject.name:
            continue
        results = []
        for tiling in candidates(subject.row_bytes, subject.itemsize):
            calls = [lambda call=call, t=tiling: call(t) for call in subject.calls[:16]]
            results.append((microseconds(calls, 0.02), tiling))
        for us, tiling in sorted(results)[:6]:
            print(f"{subject.name:10}{us:9.2f} us  {tiling}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
