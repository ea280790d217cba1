"""Asking for the experts that recorded routing names."""

from __future__ import annotations

import torch

from seqmoe_kernels import (
    Ahead,
    Asking,
    Flights,
    PoolState,
    Prefetching,
    RecordedIds,
    Routing,
    choose,
    fetch,
)
from seqmoe_kernels.pool.choose import Chosen
from tests.kernels.pool_states import DISTANCES, EXPERTS, LAYERS, NAMES, TOP_K


def ask_ahead(
    pool: PoolState,
    state: Flights,
    names: torch.Tensor,
    layer: int = 0,
    hinted: bool = False,
) -> None:
    logits = torch.zeros(1, EXPERTS)
    logits[0, :TOP_K] = 1
    chosen: Chosen = choose(logits, layer, Routing(EXPERTS, TOP_K, True), pool, None, state)
    ids = torch.full((1, LAYERS, DISTANCES, NAMES), -1, dtype=torch.int32)
    ids[0, layer] = names
    recorded = RecordedIds(ids, torch.zeros(1, dtype=torch.int64))
    asking = Asking(EXPERTS, NAMES, recorded, hinted)
    ahead = Ahead(layer, logits[:, :0], chosen.wanted, chosen.resolved.slots, asking)
    records = torch.zeros(LAYERS * EXPERTS, 16, dtype=torch.uint8)
    slots = torch.zeros(len(pool.owner), 16, dtype=torch.uint8)
    fetch(records, slots, *chosen.resolved[1:], pool.marks, Prefetching(pool, state, ahead))


def named(*rows: list[int]) -> torch.Tensor:
    out = torch.full((DISTANCES, NAMES), -1, dtype=torch.int32)
    for d, row in enumerate(rows):
        out[d, : len(row)] = torch.tensor(row)
    return out
