"""Asking for experts that are predicted by a record."""

from __future__ import annotations

import torch

from seqmoe_kernels import (
    AllCopied,
    Flights,
    Handover,
    PoolState,
    Predictions,
    RecordedIds,
    Routing,
    Signals,
    choose,
    fetch,
    schedule_prefetches,
)
from tests.kernels.pool_states import CPU, DISTANCES, EXPERTS, LAYERS, NAMES, TOP_K


def ask_ahead(
    pool: PoolState,
    state: Flights,
    predicted: torch.Tensor,
    layer: int = 0,
    use_candidates: bool = False,
) -> None:
    logits = torch.zeros(1, EXPERTS)
    logits[0, :TOP_K] = 1
    handover = Handover.idle(LAYERS, EXPERTS, TOP_K, DISTANCES, CPU)
    routing = Routing(EXPERTS, TOP_K, True)
    chosen = choose(logits, layer, routing, pool, None, state, None, handover.used, handover)
    records = torch.zeros(LAYERS * EXPERTS, 16, dtype=torch.uint8)
    slots = torch.zeros(len(pool.owner), 16, dtype=torch.uint8)
    all_copied = AllCopied(state.control, pool.clock, state.arrived)
    signals = Signals(all_copied, handover.free_behind(layer))
    fetch(records, slots, chosen.resolved, pool.marks, signals)
    ids = torch.full((1, LAYERS, DISTANCES, NAMES), -1, dtype=torch.int32)
    ids[0, layer] = predicted
    recorded = RecordedIds(ids, torch.zeros(1, dtype=torch.int64))
    predictions = Predictions(EXPERTS, NAMES, recorded, use_candidates)
    schedule_prefetches(predictions, pool, state, handover)


def predicting(*rows: list[int]) -> torch.Tensor:
    out = torch.full((DISTANCES, NAMES), -1, dtype=torch.int32)
    for d, row in enumerate(rows):
        out[d, : len(row)] = torch.tensor(row)
    return out
