"""The experts of pairs against plain formulas, and that their bits depend on nothing else."""

from __future__ import annotations

import pytest
import torch

from seqmoe_kernels import ExpertFormat, PoolState, Resolved, Routing, expert_pairs
from seqmoe_kernels import expert_format as format_of_record
from seqmoe_kernels.dense.tiling import RowTiling
from seqmoe_kernels.experts.mlp import down, expert_mlp, expert_mlp_reference, gate_up
from seqmoe_kernels.formats.fp8_block import num_blocks
from seqmoe_kernels.pool.choose import choose
from seqmoe_kernels.pool.fetch import fetch
from seqmoe_kernels.pool.resolve import resolve
from seqmoe_weights.layout import RecordLayout

FP8 = torch.float8_e4m3fn
NAMES = {FP8: "F8_E4M3", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
NAN = float("nan")


def expert_format(hidden: int, inter: int, dtype: torch.dtype) -> ExpertFormat:
    return format_of_record(RecordLayout.for_experts(hidden, inter, NAMES[dtype]))


def random_record(gen: torch.Generator, fmt: ExpertFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes, and gate, up, down [H, I] transposed to one f32 [3, I, H]."""
    record = torch.zeros(fmt.record_bytes, dtype=torch.uint8)
    weights = []
    for stored in (fmt.gate, fmt.up, fmt.down):
        shape = (stored.rows, stored.cols)
        weight = torch.randn(shape, generator=gen).mul(0.1)
        if stored.format.name == "F8_E4M3":
            scale = torch.rand(num_blocks(*shape), generator=gen) + 0.5
            parts: tuple[torch.Tensor, ...] = (weight.to(FP8), scale)
        else:
            parts = stored.format.encode(weight)
        for offset, part in zip(stored.offsets, parts, strict=True):
            _put(record, offset, part)
        weights.append(stored.decode(record, torch.float32))
    return record, torch.stack((weights[0], weights[1], weights[2].t()))


def _put(record: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().view(torch.uint8).flatten()
    record[offset : offset + len(raw)] = raw


def random_slots(
    gen: torch.Generator, fmt: ExpertFormat, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [random_record(gen, fmt) for _ in range(count)]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def plain(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One pair by the formula, in float64 but for the rounding of the activation."""
    gate, up, down = weights.double()
    g, u = gate @ x.double(), up @ x.double()
    return (g * torch.sigmoid(g) * u).to(x.dtype).double() @ down


def assert_pair_close(
    got: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, limit: float
) -> None:
    expected = plain(x, weights)
    error = (got.cpu().double() - expected).norm() / expected.norm()
    assert error <= limit, f"relative error {error}"


def run_pairs(
    device: torch.device,
    x: torch.Tensor,
    slots: torch.Tensor,
    pair_slots: torch.Tensor,
    fmt: ExpertFormat,
) -> torch.Tensor:
    out = torch.full((*pair_slots.shape, fmt.hidden), NAN, device=device)
    expert_pairs(x.to(device), slots.to(device), pair_slots.to(device), fmt, out)
    return out.cpu()


def found(slots: torch.Tensor, device: torch.device) -> Resolved:
    """As if all experts had been in their slots already."""
    none = torch.full_like(slots, -1)
    return Resolved(*(t.to(device) for t in (slots, none, none, torch.zeros_like(slots[:1]))))


# (hidden, inter): several tiles to a row and partial 128x128 blocks, each way
SHAPES = [(288, 80), (48, 208)]
# weights, x: FP8 and both plain widths; records may be narrower than the computation
DTYPES = [
    (FP8, torch.float32),
    (FP8, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
]


def tolerance(dtype: torch.dtype, device: torch.device, rounded_weights: bool = False) -> float:
    """f32 sums; beside 16-bit `x` the rounding of the activation, a cut in the interpreter."""
    if dtype == torch.float32:
        return 1e-6
    return 8e-3 if device.type == "cpu" else 4e-3 + 2e-3 * rounded_weights


@pytest.mark.parametrize("weight_dtype,dtype", DTYPES)
@pytest.mark.parametrize("hidden,inter", SHAPES)
@pytest.mark.parametrize("run", [expert_mlp_reference, expert_mlp.launch])
def test_one_token(
    device: torch.device,
    gen: torch.Generator,
    run: object,
    hidden: int,
    inter: int,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """x plus the weighted sum of experts over h; three experts, which is no power of two."""
    fmt = expert_format(hidden, inter, weight_dtype)
    slots, weights = random_slots(gen, fmt, 4)
    x = torch.randn((1, hidden), generator=gen).to(dtype)
    h = torch.randn((1, hidden), generator=gen).to(dtype)
    shares = torch.tensor([0.5, 0.2, 0.3])
    assert callable(run)
    where = torch.device("cpu") if run is expert_mlp_reference else device
    order = torch.tensor([2, 0, 3], dtype=torch.int32)
    got = run(x.to(where), h.to(where), slots.to(where), found(order, where), shares.to(where), fmt)
    assert got.dtype == dtype
    mixed = sum(
        share * plain(h[0], weights[slot]) for share, slot in zip(shares, (2, 0, 3), strict=True)
    )
    error = (got.cpu().double()[0] - x.double()[0] - mixed).norm()
    limit = tolerance(dtype, device) * (2 * mixed.norm() + x.double().norm())
    assert error <= limit, f"{error} is more than {limit}"


@pytest.mark.parametrize("weight_dtype,dtype", DTYPES)
@pytest.mark.parametrize("run", [expert_mlp_reference, expert_mlp.launch])
def test_bits_of_one_token_do_not_depend_on_the_slots(
    device: torch.device,
    gen: torch.Generator,
    run: object,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    fmt = expert_format(144, 32, weight_dtype)
    slots, _ = random_slots(gen, fmt, 5)
    x, h = torch.randn((2, 1, 144), generator=gen).to(dtype)
    shares = torch.tensor([0.6, 0.4], device=device)
    assert callable(run)

    def bits(rows: torch.Tensor, *order: int) -> torch.Tensor:
        at = found(torch.tensor(order, dtype=torch.int32), device)
        out: torch.Tensor = run(x.to(device), h.to(device), rows.to(device), at, shares, fmt)
        return out

    expected = bits(slots, 1, 4)
    assert torch.isfinite(expected).all()
    assert torch.equal(expected, bits(slots.flip(0), 3, 0))
    moved = torch.cat((slots[4:], slots[1:2], slots[:1]))
    assert torch.equal(expected, bits(moved, 1, 0))


@pytest.mark.parametrize("tiling", [RowTiling(8, 1, 2), RowTiling(32, 2, 4)])
@pytest.mark.parametrize("weight_dtype", [FP8, torch.bfloat16])
def test_the_tiling_changes_rounding_at_most(
    device: torch.device, gen: torch.Generator, weight_dtype: torch.dtype, tiling: RowTiling
) -> None:
    fmt = expert_format(272, 144, weight_dtype)
    slots, weights = random_slots(gen, fmt, 2)
    h = torch.randn((1, 272), generator=gen).bfloat16()
    at = found(torch.tensor([1, 0], dtype=torch.int32), device)
    act = gate_up(h.to(device), slots.to(device), at, fmt, tiling)
    limit = tolerance(torch.bfloat16, device)
    for k, slot in enumerate((1, 0)):
        gate, up = (weights[slot][part].double() @ h[0].double() for part in (0, 1))
        expected = gate * torch.sigmoid(gate) * up
        assert (act[k].cpu().double() - expected).norm() <= limit * expected.norm()
    shares = torch.tensor([0.7, 0.3])
    nothing = torch.zeros((1, 272), dtype=torch.bfloat16, device=device)
    tall = tiling._replace(rows=max(tiling.rows, 2 * tiling.num_warps))
    args = (act, slots.to(device), at.slots, shares.to(device), nothing, fmt, tall)
    mixed = sum(
        share * act[k].cpu().double() @ weights[slot][2].double()
        for k, (slot, share) in enumerate(zip((1, 0), shares.double(), strict=True))
    )
    assert isinstance(mixed, torch.Tensor)
    assert (down(*args)[0].cpu().double() - mixed).norm() <= limit * mixed.norm()


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token_of_a_size_that_no_f16_has(
    device: torch.device, gen: torch.Generator, dtype: torch.dtype, size: float
) -> None:
    """Where products with FP8 weights are of f16, no activation may be too small or too large."""
    fmt = expert_format(288, 80, FP8)
    slots, _ = random_slots(gen, fmt, 1)
    h = torch.randn((1, 288), generator=gen).to(dtype)
    gate = fmt.gate.offsets[0]
    slots[:, gate : gate + 288 * 80] = 0x38  # ones
    nothing = torch.zeros_like(h)
    at, share = found(torch.zeros(1, dtype=torch.int32), device), torch.ones(1, device=device)
    moved = [t.to(device) for t in (nothing, (h * size), slots)]
    got = expert_mlp.launch(*moved, at, share, fmt)
    expected = expert_mlp_reference(
        nothing, h * size, slots, found(at.slots.cpu(), torch.device("cpu")), share.cpu(), fmt
    )
    assert expected.abs().max() > 0
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error <= 2 * tolerance(dtype, device)


@pytest.mark.parametrize("weight_dtype,dtype", DTYPES)
def test_many_tokens(
    device: torch.device,
    gen: torch.Generator,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    fmt = expert_format(144, 80, weight_dtype)
    slots, weights = random_slots(gen, fmt, 4)
    x = torch.randn((5, 144), generator=gen).to(dtype)
    pair_slots = torch.tensor([[0, 2], [2, -1], [-1, -1], [3, 0], [2, 3]], dtype=torch.int32)
    out = run_pairs(device, x, slots, pair_slots, fmt)
    limit = tolerance(dtype, device, rounded_weights=weight_dtype == FP8)
    for token in range(5):
        for k in range(2):
            slot = int(pair_slots[token, k])
            if slot < 0:
                assert out[token, k].isnan().all()
            else:
                assert_pair_close(out[token, k], x[token], weights[slot], limit)


@pytest.mark.parametrize("weight_dtype,dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_bits_depend_on_neither_slot_nor_companions(
    device: torch.device,
    gen: torch.Generator,
    tokens: int,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    fmt = expert_format(144, 32, weight_dtype)
    slots, _ = random_slots(gen, fmt, 5)
    x = torch.randn((tokens, 144), generator=gen).to(dtype)

    def bits(rows: torch.Tensor, slot: int, companions: list[int]) -> torch.Tensor:
        pair_slots = torch.tensor([[slot, *companions]] * tokens, dtype=torch.int32)
        out = run_pairs(device, x, rows, pair_slots, fmt)
        return out[:, 0]

    alone = bits(slots, 1, [])
    assert torch.isfinite(alone).all()
    assert torch.equal(alone, bits(slots, 1, [0, 4, 2]))
    assert torch.equal(alone, bits(slots, 1, [-1, 3, -1]))
    assert torch.equal(alone, bits(slots.flip(0), 3, [4, 0, 1]))


def test_waves_of_experts_fill_one_output(device: torch.device, gen: torch.Generator) -> None:
    """Computing pairs in two calls over reused slots gives the bits of one call."""
    fmt = expert_format(128, 128, torch.float32)
    slots, _ = random_slots(gen, fmt, 2)
    x = torch.randn((3, 128), generator=gen)
    both = torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.int32)
    expected = run_pairs(device, x, slots, both, fmt)
    out = torch.full_like(expected, NAN).to(device)
    for wave in range(2):
        pair_slots = torch.where(both == wave, 0, -1).int().to(device)
        one_slot = slots[wave : wave + 1].to(device)
        expert_pairs(x.to(device), one_slot, pair_slots, fmt, out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("weight_dtype,dtype", DTYPES)
@pytest.mark.parametrize("missing", [1, 3])
def test_what_the_fetch_right_before_brings_is_what_is_computed(
    device: torch.device,
    gen: torch.Generator,
    missing: int,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Slots full of NaN, then choice, fetch and experts in a row: nothing is read too early."""
    fmt = expert_format(288, 80, weight_dtype)
    rows, weights = random_slots(gen, fmt, 40)
    records = rows.pin_memory() if device.type == "cuda" else rows
    x, h = torch.randn((2, 1, 288), generator=gen).to(dtype)
    expected = sum(plain(h[0], weights[expert]) for expert in range(3)) / 3
    logits = torch.tensor([[2.0, 2.0, 2.0, *[0.0] * 37]], device=device)
    for _ in range(20 if device.type == "cuda" else 1):
        slots = torch.full((8, fmt.record_bytes), 0xFF, dtype=torch.uint8, device=device)
        pool = PoolState.cold(40, 8, device)
        kept = torch.arange(3 - missing, dtype=torch.int32, device=device)
        if len(kept):
            held = resolve.launch(kept, pool)
            slots[held.slots.long()] = rows[: len(kept)].to(device)
        chosen = choose.launch(logits, 0, Routing(40, 3, True), pool)
        found = chosen.resolved
        fetch.launch(records, slots, found, pool.marks)
        got = expert_mlp.launch(x.to(device), h.to(device), slots, found, chosen.weights, fmt)
        assert found.num_misses.tolist() == [missing]
        error = (got.cpu().double()[0] - x.double()[0] - expected).norm()
        assert error <= tolerance(dtype, device) * (2 * expected.norm() + x.double().norm())


def test_expert_mlp_on_the_cpu_is_the_reference(gen: torch.Generator) -> None:
    fmt = expert_format(128, 128, torch.bfloat16)
    slots, _ = random_slots(gen, fmt, 2)
    x = torch.randn((1, 128), generator=gen).bfloat16()
    shares = torch.tensor([0.9, 0.1])
    at = found(torch.tensor([1, 0], dtype=torch.int32), torch.device("cpu"))
    expected = expert_mlp_reference(x, x, slots, at, shares, fmt)
    assert torch.equal(expert_mlp(x, x, slots, at, shares, fmt), expected)
