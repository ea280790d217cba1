"""Random weights of a shape, made in memory: experts on the host, the rest on the device.

The weights mean nothing, so neither does the text. They are sized so that the router has a choice:
what all layers add together must not outweigh the token, or all tokens would be routed alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe_cli.bench.shapes import Shape
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import TensorSpec, find_family, scale_spec
from seqmoe_weights.files import Meter, Progress
from seqmoe_weights.layout import Part
from seqmoe_weights.store import HostStore

_GAIN = 0.9  # of a matrix: the size of its output for an input of size 1
_FP8_STD = 29.0  # of the codes that `_codes` makes
_CUT_BYTES = 4 * 2**20  # records are cut from noise, in pieces of at most this size
_STEP = 128  # bytes by which the cuts of two experts differ at least
_MAX_THREADS = 16
_SEED = 0

Bytes = NDArray[np.uint8]


def random_store(shape: Shape, pin: bool, progress: Progress | None = None) -> HostStore:
    """Finite random records with their stamps, no two alike, made by all cores.

    Raises `ResourceError` with numbers when they do not fit into host memory or cannot be pinned.
    `progress` counts the bytes made, then those pinned.
    """
    layout, count = shape.layouts[0], shape.config.num_routed_experts
    store = HostStore.allocate(count, layout.record_bytes, pin=False)
    cutters = [_Cutter.of(n, part, shape.config) for n, part in enumerate(layout.parts)]
    records: Bytes = store.records.numpy()
    meter = Meter(store.records.nbytes, progress)
    threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        made = [threads.submit(_fill, records[n], n, cutters) for n in range(count)]
        for record in as_completed(made):
            record.result()
            meter.add(layout.record_bytes)
    finally:
        threads.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the rest
    if pin:
        store.pin(progress)
    return store


class _Cutter(NamedTuple):
    """Fills a part of a record with a cut of noise that no other expert has."""

    part: Part
    number: int  # of the part
    noise: Bytes  # empty for the stamp
    num_cuts: int

    @classmethod
    def of(cls, number: int, part: Part, config: ModelConfig) -> _Cutter:
        count = config.num_routed_experts
        if part.name == "stamp":
            return cls(part, number, np.empty(0, np.uint8), count)
        size = min(part.num_bytes, _CUT_BYTES) + _STEP * count
        matrix = part.name.removesuffix("_scale")
        fan_in = config.moe_intermediate_size if matrix == "down" else config.hidden_size
        std = _std(fan_in, config, adds_to_residual=matrix == "down")
        generator = torch.Generator().manual_seed(_SEED)
        if part.dtype == "F8_E4M3":
            noise = _codes((size,), generator)
        elif part.name == matrix:
            noise = _normal((size // 2,), std, generator).to(torch.bfloat16).view(torch.uint8)
        else:
            noise = torch.full((size // 4,), std / _FP8_STD).view(torch.uint8)
        return cls(part, number, noise.numpy(), count)

    def fill(self, record: Bytes, expert: int) -> None:
        part = self.part
        target = record[part.offset : part.offset + part.num_bytes]
        if part.name == "stamp":
            target.view(np.int64)[:] = expert
            return
        for n, start in enumerate(range(0, len(target), _CUT_BYTES)):
            piece = target[start : start + _CUT_BYTES]
            at = (expert + 1009 * self.number + 4001 * n) % self.num_cuts * _STEP
            piece[:] = self.noise[at : at + len(piece)]


def _fill(record: Bytes, expert: int, cutters: Sequence[_Cutter]) -> None:
    for cutter in cutters:
        cutter.fill(record, expert)


def random_tensors(
    shape: Shape, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """The resident tensors in the form that `PackedModel.load_resident` gives them."""
    config = shape.config
    specs = find_family(config.family).resident_tensors(config)
    generator = torch.Generator(device).manual_seed(_SEED)
    meter = Meter(sum(math.prod(spec.shape) for spec in specs), progress)
    weights: dict[str, torch.Tensor] = {}
    for spec in specs:
        if len(spec.shape) == 1:
            weights[spec.name] = torch.ones(spec.shape, dtype=dtype, device=device)
        elif spec.quantized and config.dense_format == "FP8":
            codes = _codes(spec.shape, generator)
            weights[spec.name] = codes.view(torch.float8_e4m3fn)
            scale = scale_spec(spec)
            std = _std_of(spec, config) / _FP8_STD
            weights[scale.name] = torch.full(scale.shape, std, device=device)
        else:
            weights[spec.name] = _normal(spec.shape, _std_of(spec, config), generator).to(dtype)
        meter.add(math.prod(spec.shape))
    return weights


def _std_of(spec: TensorSpec, config: ModelConfig) -> float:
    if spec.role == "embedding":
        return 1.0
    return _std(spec.shape[1], config, adds_to_residual=spec.role == "o")


def _std(fan_in: int, config: ModelConfig, adds_to_residual: bool) -> float:
    """Of a matrix's weights."""
    layers = 2 * config.num_hidden_layers if adds_to_residual else 1
    return _GAIN / math.sqrt(fan_in * layers)


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """uint8 codes of finite FP8 (e4m3) numbers: uniform below 0x70, with random signs."""
    device = generator.device
    codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device, generator=generator)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator)
    return codes.bitwise_or_(sign << 7)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=generator.device, generator=generator).mul_(std)
