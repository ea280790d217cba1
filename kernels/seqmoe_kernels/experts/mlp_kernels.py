"""The two kernels of one token's experts: gate and up with the activation, down with all the rest.

Both may start before the kernels in front of them have ended, and read weights ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqmoe_kernels.common.launch import acquired, let_next_start, wait_for_inputs
from seqmoe_kernels.dense.tensor_core_gemv import (
    TILE_BITS,
    add_products,
    load_tile,
    no_sums,
    row_sums,
    slice_starts,
    slices_of_rows,
    slices_of_vector,
    vector_columns,
)
from seqmoe_kernels.experts.record import others_at


@triton.jit
def _is_missed(slot, miss_slots, num_wanted, BLOCK_K: tl.constexpr):
    i = tl.arange(0, BLOCK_K)
    missed = tl.load(miss_slots + i, mask=i < num_wanted, other=-1, cache_modifier=".cg")
    return tl.max((missed == slot).to(tl.int32), 0) > 0


@triton.jit
def _gate_up_kernel(
    h,
    slots,
    resolved,
    act,
    fmt,
    activation,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GATE: tl.constexpr,
    UP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    OPERAND: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The vector `h` [H] times gate and up [I, H] of the experts in `resolved` (`Resolved`), with
    the `activation`: `act` [K, I]. A program has ROWS rows of gate and of up of one expert.

    `slots`: a tuple of `PartOfSlots`, in which gate and up lie at the offsets GATE and UP, tuples
    too, in the format `fmt`.
    """
    # The fetch before this kernel lets it start when the slots are known. Those of hits hold what
    # they should: only programs of a miss wait for the fetch, and the others work meanwhile.
    weights, slot_weights = slots[0]
    STORED: tl.constexpr = weights.dtype.element_ty
    PACKED: tl.constexpr = STORED.primitive_bitwidth // fmt.bits  # weights in an element
    COLUMNS: tl.constexpr = WARPS * (TILE_BITS // fmt.bits)
    SLICE: tl.constexpr = TILE_BITS // 8 // fmt.bits
    pair = tl.program_id(1)
    here = tl.load(resolved.slots + pair, cache_modifier=".cg")
    if PDL:  # noqa: SIM102
        if acquired(resolved.num_misses) > 0:  # (one condition is the compiler's)  # noqa: SIM102
            if _is_missed(here, resolved.miss_slots, tl.num_programs(1), BLOCK_K):
                wait_for_inputs(PDL)
    let_next_start(PDL)  # not before: the next kernel reads slots without waiting for this one
    slot = tl.maximum(here, 0).to(tl.int64)
    first = tl.program_id(0) * ROWS
    order = tl.arange(0, 2 * ROWS)  # rows of gate and up in turn
    row = first + order // 2
    inside, is_up = row < I, order % 2 == 1
    starts = slot * slot_weights + GATE[0] + order % 2 * (UP[0] - GATE[0]) + row * (H // PACKED)
    of_gate, of_up = others_at(slots, GATE, slot), others_at(slots, UP, slot)
    starts_of_slices = slice_starts(SLICE, WARPS)
    at = vector_columns(SLICE, WARPS, 16 // (act.dtype.element_ty.primitive_bitwidth // 8))
    sums = no_sums(2 * ROWS, WARPS, TENSOR_CORES)
    for batch in range(0, H, TILES * COLUMNS):
        tiles, gates, ups, vectors = (), (), (), ()
        for i in tl.static_range(TILES):
            column = (batch + i * COLUMNS) // PACKED + tl.arange(0, COLUMNS // PACKED)
            tiles += (load_tile(weights, starts, inside, column, H // PACKED),)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            begin = batch + i * COLUMNS + starts_of_slices
            # Past the L1 cache, like weights: it may still hold what was in the slot before.
            gates += (fmt.scales(of_gate, first, row, begin, begin < H, H, ".cg"),)  # type: ignore[assignment]
            ups += (fmt.scales(of_up, first, row, begin, begin < H, H, ".cg"),)  # type: ignore[assignment]
        tl.debug_barrier()  # or the compiler would put some of these off to save registers
        for i in tl.static_range(TILES):
            column = batch + i * COLUMNS + at
            vectors += (tl.load(h + column, mask=column < H, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            scales = fmt.joined(gates[i], ups[i], is_up[None, :, None])
            rows = fmt.weights(slices_of_rows(tiles[i], WARPS), scales, OPERAND)
            vector, factor = fmt.vector(slices_of_vector(vectors[i], fmt.bits), OPERAND, STORED)
            sums = add_products(sums, rows, vector, fmt.factor(factor, scales), TENSOR_CORES)
    gate, up = tl.split(tl.reshape(row_sums(sums, 2 * ROWS, TENSOR_CORES), (ROWS, 2)))
    value = activation(gate, up)
    row = first + tl.arange(0, ROWS)
    tl.store(act + pair * I + row, value.to(act.dtype.element_ty), mask=row < I)
    wait_for_inputs(PDL)  # a kernel that waits for this one thereby waits for the fetch, too


@triton.jit
def _down_tile(
    weights,
    pair_slots,
    row,
    start,
    slot_weights,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN: tl.constexpr,
    TOP_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Elements of rows as stored, from element `start` of all experts together on: [ROWS, n]. A
    row of an expert has I elements, padded to whole slices."""
    CHUNK: tl.constexpr = TILE_BITS // 32 // weights.dtype.element_ty.primitive_bitwidth
    PADDED: tl.constexpr = (I + 4 * CHUNK - 1) // (4 * CHUNK) * (4 * CHUNK)
    chunk = start + tl.arange(0, 32 * WARPS) * CHUNK  # in one expert each
    inside = (chunk < TOP_K * PADDED) & (chunk % PADDED < I)
    slot = tl.load(pair_slots + chunk // PADDED, mask=inside, other=0, cache_modifier=".cg")
    base = tl.maximum(slot, 0).to(tl.int64) * slot_weights + DOWN + chunk % PADDED
    at = base[:, None, None] + (row * I)[None, :, None] + tl.arange(0, CHUNK)[None, None, :]
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, CHUNK]), [1, 1, CHUNK])
    mask = inside[:, None, None] & (row < H)[None, :, None]
    tile = tl.load(weights + at, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.reshape(tl.permute(tile, (1, 0, 2)), (row.shape[0], 32 * WARPS * CHUNK))


@triton.jit
def _down_kernel(
    act,
    slots,
    pair_slots,
    pair_weights,
    residual,
    out,
    fmt,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    DOWN: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    OPERAND: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activations `act` [K, I] times down [H, I] of the experts in `pair_slots` [K], times their
    `pair_weights` [K], plus `residual` [H]: `out` [H]. A program has ROWS rows of all experts.

    `slots`: a tuple of `PartOfSlots`, in which down lies at the offsets DOWN, in the format `fmt`.
    """
    # One product of rows as long as all experts together: activations [K * I] lie in a row, the
    # weights of a row lie in K slots. `_gate_up_kernel` lets this one start after the fetch: all
    # that it reads but the activations is there.
    weights, slot_weights = slots[0]
    STORED: tl.constexpr = weights.dtype.element_ty
    PACKED: tl.constexpr = STORED.primitive_bitwidth // fmt.bits  # weights in an element
    COLUMNS: tl.constexpr = WARPS * (TILE_BITS // fmt.bits)
    SLICE: tl.constexpr = TILE_BITS // 8 // fmt.bits
    PADDED: tl.constexpr = (I + SLICE - 1) // SLICE * SLICE
    LENGTH: tl.constexpr = TOP_K * PADDED
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    starts_of_slices = slice_starts(SLICE, WARPS)
    column = vector_columns(SLICE, WARPS, 16 // (act.dtype.element_ty.primitive_bitwidth // 8))
    before = tl.load(residual + row, mask=row < H, other=0, cache_modifier=".cg")
    sums = no_sums(ROWS, WARPS, TENSOR_CORES)
    for batch in range(0, LENGTH, TILES * COLUMNS):
        tiles, vectors, scales, shares = (), (), (), ()
        for i in tl.static_range(TILES):
            start = (batch + i * COLUMNS) // PACKED
            tile = _down_tile(
                weights, pair_slots, row, start, slot_weights, H, I // PACKED, DOWN[0], TOP_K, WARPS
            )
            tiles += (tile,)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            at = batch + i * COLUMNS + starts_of_slices
            inside, expert = at < LENGTH, at // PADDED
            share = tl.load(pair_weights + expert, mask=inside, other=0.0, cache_modifier=".cg")
            slot = tl.load(pair_slots + expert, mask=inside, other=0, cache_modifier=".cg")
            others = others_at(slots, DOWN, tl.maximum(slot, 0).to(tl.int64))
            scale = fmt.scales(others, first, row, at % PADDED, inside, I, ".cg")
            scales += (scale,)  # type: ignore[assignment]
            shares += (fmt.factor(share, scale),)  # type: ignore[assignment]
        if batch == 0:
            wait_for_inputs(PDL)
            let_next_start(PDL)
        for i in tl.static_range(TILES):
            place = batch + i * COLUMNS + column
            mask = (place < LENGTH) & (place % PADDED < I)
            source = act + place // PADDED * I + place % PADDED
            vectors += (tl.load(source, mask=mask, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(TILES):
            rows = fmt.weights(slices_of_rows(tiles[i], WARPS), scales[i], OPERAND)
            vector, factor = fmt.vector(slices_of_vector(vectors[i], fmt.bits), OPERAND, STORED)
            factor = factor[:, None, :] * shares[i]
            sums = add_products(sums, rows, vector, factor, TENSOR_CORES)
    mixed = row_sums(sums, ROWS, TENSOR_CORES).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row, (before.to(tl.float32) + mixed).to(out.dtype.element_ty), mask=row < H)
