"""Compile every kernel for a GPU that is not there: `python compile_kernels.py 80` for sm_80.

The wrappers are called with meta tensors in the shapes of Qwen3-30B-A3B; instead of launching,
Triton compiles down to machine code. Prints the names of the kernels. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from seqmoe_kernels.attention.decode import attention_step
from seqmoe_kernels.attention.rope import Rotation, rotary
from seqmoe_kernels.common import launch
from seqmoe_kernels.dense.linear import Matrix, linears, normed_linear
from seqmoe_kernels.dense.norm import Norm, rms_norm
from seqmoe_kernels.eviction.calibration import calibrate
from seqmoe_kernels.eviction.expected_use import ExpectedUse, update_expected_use
from seqmoe_kernels.eviction.ghost_cache import GhostCache
from seqmoe_kernels.experts.combine import combine
from seqmoe_kernels.experts.mlp import expert_mlp
from seqmoe_kernels.experts.record import expert_format
from seqmoe_kernels.formats import decode_by_tiles, format_names, fp8_block
from seqmoe_kernels.formats.fp8_block import FP8
from seqmoe_kernels.pool.choose import RecordedIds, Routing, choose
from seqmoe_kernels.pool.fetch import AllCopied, Signals, fetch
from seqmoe_kernels.pool.lock import Handover
from seqmoe_kernels.pool.resolve import Resolved, resolve
from seqmoe_kernels.pool.route import route
from seqmoe_kernels.pool.step_ring import ENTRY_WORDS, begin_step, publish
from seqmoe_kernels.pool.verify import verify_slots
from seqmoe_kernels.predictor.embed import StepInput, TokenInput, sum_rows
from seqmoe_kernels.predictor.gru import GruWeights, gru_step
from seqmoe_kernels.predictor.heads import ExpertHeads, UseHistory, expected_uses
from seqmoe_kernels.predictor.horizons import window_vectors
from seqmoe_kernels.prefetch.candidates import StepForecast, pick_candidates
from seqmoe_kernels.prefetch.copy_kernels import copy_prefetches
from seqmoe_kernels.prefetch.lookahead import Predictions
from seqmoe_kernels.prefetch.schedule import schedule_prefetches
from seqmoe_kernels.sampling.sample import sample
from seqmoe_kernels.sampling.state import NUM_SETTINGS, SamplingState
from seqmoe_kernels.state import Flights, PoolState
from seqmoe_weights.layout import RecordLayout

HIDDEN, INTER, TOP_K, VOCAB = 2048, 768, 8, 151936


class AbsentGpu:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_decode_kernels(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    def real(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=dtype)

    def f32(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=torch.float32)

    rms_norm.launch(real(1, HIDDEN), real(HIDDEN), 1e-6)
    position = tensor(1, dtype=torch.int64)
    rotary.launch(real(1, 32, 128), position, f32(64))
    route.launch(real(1, 128), TOP_K, True)
    combine.launch(f32(1, TOP_K, HIDDEN), f32(1, TOP_K), dtype)
    state = real(4096, 4, 128)
    for q_norm, k_norm in ((real(128), real(128)), (real(4096), real(512))):
        rotation = Rotation(f32(64), q_norm, k_norm, 1e-6)
        row = real(1, 4096), real(1, 512), real(1, 512)
        attention_step.launch(*row, state, state, position, rotation, 128**-0.5)
    scaled = weight_dtype == torch.float8_e4m3fn
    weight = tensor(4096, HIDDEN, dtype=weight_dtype if scaled else dtype)
    parts = (weight, f32(32, 16)) if scaled else (weight,)
    matrix = Matrix.of(*parts, bias=real(4096))
    x, norm = real(1, HIDDEN), Norm(real(HIDDEN), 1e-6)
    linears.launch(x, [matrix] * 3, norm)
    linears.launch(x, [matrix], None, real(1, 4096))
    normed_linear.launch(x, norm, matrix)
    normed_linear.launch(x, norm, matrix, matrix)
    name = "F8_E4M3" if scaled else {torch.bfloat16: "BF16", torch.float16: "F16"}[weight_dtype]
    fmt = expert_format(RecordLayout.for_experts(HIDDEN, INTER, name))
    slots = tensor(64, fmt.record_bytes, dtype=torch.uint8)
    resolved = Resolved(tensor(TOP_K), tensor(TOP_K), tensor(TOP_K), tensor(1))
    expert_mlp.launch(x, x, slots, resolved, f32(TOP_K), fmt)


def call_residency_kernels() -> None:
    codes, scales = tensor(256, 256, dtype=torch.int8), tensor(2, 2, dtype=torch.float32)
    decode_by_tiles(FP8.tiles, codes, (scales,), tensor(256, 256, dtype=torch.bfloat16))
    pool = PoolState.cold(6144, 1024, torch.device("meta"))
    resolve.launch(tensor(TOP_K), pool)
    routing, logits = Routing(128, TOP_K, True), tensor(1, 128, dtype=torch.float32)
    recorded = RecordedIds(tensor(3, 48, TOP_K), pool.clock)
    choose.launch(logits, 0, routing, pool)
    choose.launch(logits, 0, routing, pool, recorded)
    begin_step.launch(pool)
    ring = tensor(64, ENTRY_WORDS, dtype=torch.int64)
    publish.launch(pool.clock, pool, ring, pool.clock)
    slots = tensor(1024, 4 * 2**20, dtype=torch.uint8)
    missing = Resolved(*(tensor(size) for size in (TOP_K, TOP_K, TOP_K, 1)))
    fetch.launch(slots, slots, missing, pool.marks)
    handover = Handover.idle(48, 128, TOP_K, 4, pool.clock.device)
    by_thread = Flights.none(48, TOP_K, 4, TOP_K, pool.clock.device)
    flights = Flights.none(48, TOP_K, 4, TOP_K, pool.clock.device, beside=True)
    all_copied = AllCopied(flights.control, pool.clock, flights.arrived)
    for begun in (None, handover.free_behind(5)):
        fetch.launch(slots, slots, missing, pool.marks, Signals(all_copied, begun))
    resolve.launch(tensor(TOP_K), pool, flights)
    choose.launch(logits, 0, routing, pool, recorded, flights)
    expected = tensor(3, 6144, dtype=torch.float32)
    for step in (None, pool.clock):
        pick_candidates.launch(StepForecast(expected, step), pool, flights)
    numbers, used = tensor(6, dtype=torch.int64), tensor(48 * TOP_K)
    expected_use = ExpectedUse.unknown(6144, 1024, tensor(256), numbers, pool.clock.device)
    choose.launch(logits, 3, routing, pool, None, flights, expected_use, used)
    predicted = RecordedIds(tensor(3, 48, 4, TOP_K), pool.clock)
    by_routers = Predictions(128, TOP_K)
    for carrier in (flights, by_thread):
        for predictions, use in (
            (by_routers, None),
            (by_routers, expected_use),
            (by_routers._replace(recorded=predicted), None),
            (by_routers._replace(use_candidates=True), None),
        ):
            schedule_prefetches.launch(predictions, pool, carrier, handover, use)
    records = tensor(6144, 4 * 2**20, dtype=torch.uint8)
    copy_prefetches.launch(records, slots, pool, flights, handover)
    logits = tensor(1, 5 * 128, dtype=torch.bfloat16)
    for there in (None, expected_use):
        choose.launch(logits, 3, routing, pool, None, flights, there, handover.used, handover)
    logits = tensor(1, 128, dtype=torch.float32)
    choose.launch(logits, 3, routing, pool, None, None, expected_use, used)
    verify_slots.launch(tensor(TOP_K), tensor(TOP_K), slots, 4096, pool.counters)


def call_sampling_kernels() -> None:
    settings, counts = (tensor(n, dtype=torch.float32) for n in (NUM_SETTINGS, VOCAB))
    stream, seen = tensor(2, dtype=torch.int64), tensor(VOCAB, dtype=torch.bool)
    logits = tensor(VOCAB, dtype=torch.float32)
    sample.launch(logits, SamplingState(settings, stream, counts, seen))


def call_predictor_kernels(dtype: torch.dtype) -> None:
    def real(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=dtype)

    def f32(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=torch.float32)

    width, layers, num_flat, rank = 768, 48, 6144, 64
    used, token, ids = tensor(layers * TOP_K), tensor(1, dtype=torch.int64), real(VOCAB, rank)
    token_in, token_out = (TokenInput(ids, real(n, rank)) for n in (width, 4 * num_flat))
    x = sum_rows.launch(real(num_flat, width), StepInput(used, token, token_in))
    norm, states = Norm(real(width), 1e-5), f32(2, 2, width)
    matrices = real(3 * width, width), real(3 * width, width)
    weights = GruWeights(*matrices, real(3 * width), real(3 * width))
    gru_step.launch(x, norm, weights, states[0, 0], states[1, 0])
    vectors = window_vectors.launch(x, norm, real(4 * width, width), real(4 * width))
    rates = f32(4, num_flat), f32(3, 4, layers), f32(3), f32(4)
    heads, history = (
        ExpertHeads(real(num_flat, width), *rates),
        UseHistory(f32(3, num_flat), states),
    )
    expected = f32(4, num_flat)
    expected_uses.launch(vectors, heads, StepInput(used, token, token_out), history, expected)
    pool = PoolState.cold(num_flat, 1024, torch.device("meta"))
    numbers = tensor(6, dtype=torch.int64)
    expected_use = ExpectedUse.unknown(num_flat, 1024, tensor(256), numbers, torch.device("meta"))
    for ghost in (None, GhostCache.unknown(num_flat, torch.device("meta"))):
        calibrate.launch(used, TOP_K, pool, expected_use, ghost)
        update_expected_use.launch(expected, pool, expected_use, ghost)


def main(arch: int) -> None:
    run = JITFunction.run
    names: list[str] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        names.append(self.fn.__name__)
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentGpu(arch))
    if arch >= 89:
        fp8_block.converts_fp8 = lambda device: True  # type: ignore[assignment]
    if arch >= 90:
        launch.use_pdl = lambda device: True  # type: ignore[assignment]
    format_names()  # their files must be imported while kernels compile
    triton.knobs.runtime.interpret = True  # the wrappers' word for: not only CUDA tensors
    call_residency_kernels()
    call_decode_kernels(torch.bfloat16, torch.float8_e4m3fn)
    call_decode_kernels(torch.float32, torch.bfloat16)
    call_sampling_kernels()
    call_predictor_kernels(torch.bfloat16)
    call_predictor_kernels(torch.float32)
    print("\n".join(names))


if __name__ == "__main__":
    main(int(sys.argv[1]))
