"""PooledExperts: waves through a small pool add up to the plain mixture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from seqmoe_cli.engine.experts import SEED_TOKENS, PooledExperts, StepContext
from seqmoe_cli.engine.streams import Beside
from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_kernels import Routing, expert_format, route
from seqmoe_weights.layout import RecordLayout

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 2, 8, 3, 32, 48
CPU = torch.device("cpu")


def make_records(layout: RecordLayout) -> torch.Tensor:
    torch.manual_seed(0)
    records = torch.zeros(LAYERS * EXPERTS, layout.record_bytes, dtype=torch.uint8)
    for record in records:
        for name in ("gate", "up", "down"):
            part = layout[name]
            view = record[part.offset : part.offset + part.num_bytes].view(torch.float32)
            view.copy_(torch.randn(part.shape).flatten() * 0.2)
    return records


def plain_mixture(
    records: torch.Tensor,
    layout: RecordLayout,
    layer: int,
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    def part(record: torch.Tensor, name: str) -> torch.Tensor:
        p = layout[name]
        return record[p.offset : p.offset + p.num_bytes].view(torch.float32).view(p.shape)

    out = torch.zeros_like(h)
    for t in range(h.shape[0]):
        for k in range(ids.shape[1]):
            record = records[layer * EXPERTS + int(ids[t, k])]
            gate, up, down = (part(record, name) for name in ("gate", "up", "down"))
            out[t] += weights[t, k] * (down @ (F.silu(gate @ h[t]) * (up @ h[t])))
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_waves_add_up(num_tokens: int) -> None:
    layout = RecordLayout.for_experts(HIDDEN, INTER, "F32")
    records = make_records(layout)
    x, h = torch.randn(2, num_tokens, HIDDEN)
    logits = torch.randn(num_tokens, EXPERTS)
    ids, weights = route(logits, TOP_K, True)
    expected = x + plain_mixture(records, layout, 1, h, ids, weights)
    outs = []
    for num_slots in (TOP_K, 5, LAYERS * EXPERTS):
        pool = ExpertPool(num_slots, records, CPU)
        context = StepContext(pool, Routing(EXPERTS, TOP_K, True), Beside(CPU))
        experts = PooledExperts(context, [expert_format(layout)] * LAYERS)
        experts(0, x, h, logits)  # another layer's experts are in the pool first
        outs.append(experts(1, x, h, logits))
    torch.testing.assert_close(outs[0], expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_long_prompt_leaves_the_pool_to_those_before_and_its_last_tokens() -> None:
    """It wants all experts of both layers; there are eight slots."""
    layout = RecordLayout.for_experts(HIDDEN, INTER, "F32")
    pool = ExpertPool(8, make_records(layout), CPU)
    context = StepContext(pool, Routing(EXPERTS, 1, True), Beside(CPU))
    experts = PooledExperts(context, [expert_format(layout)] * LAYERS)
    before = torch.tensor([3, 4, 11], dtype=torch.int32)
    pool.require(before)
    chosen = torch.tensor([*range(EXPERTS), *[6] * SEED_TOKENS])
    logits = F.one_hot(chosen, EXPERTS).float() * 9
    x, h = torch.randn(2, len(chosen), HIDDEN)
    for layer in range(LAYERS):
        experts(layer, x, h, logits)
    last = torch.tensor([6, EXPERTS + 6])
    assert pool.is_resident(before).all() and pool.is_resident(last).all()
