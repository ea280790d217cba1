"""Steps of a model with prefetch, by the kernels and by their references at once."""

from __future__ import annotations

from collections import deque

import torch

from seqmoe_kernels import (
    AllCopied,
    Flights,
    Handover,
    PoolState,
    Predictions,
    RecordedIds,
    Request,
    Routing,
    Signals,
    StepForecast,
    read_request,
)
from seqmoe_kernels.eviction.expected_use import ExpectedUse
from seqmoe_kernels.pool.choose import choose, choose_reference
from seqmoe_kernels.pool.fetch import fetch, fetch_reference
from seqmoe_kernels.prefetch.candidates import pick_candidates, pick_candidates_reference
from seqmoe_kernels.prefetch.lookahead import FEW_PREDICTIONS
from seqmoe_kernels.prefetch.schedule import schedule_prefetches, schedule_reference
from seqmoe_kernels.state import CERTAIN, LEAST, PREDICTED, RIGHT
from tests.kernels.pool_states import (
    CPU,
    DISTANCES,
    EXPERTS,
    LAYERS,
    NAMES,
    TOP_K,
    assert_same,
    flights_on,
    invariants,
    make,
    pool_on,
)


class Case:
    """The same events for references on the CPU and kernels on `device`."""

    def __init__(
        self, num_slots: int, device: torch.device, seed: int, hinted: bool = False
    ) -> None:
        self.hinted = hinted
        self.device, self.gen = device, torch.Generator().manual_seed(seed)
        self.pool, self.state = make(num_slots)
        self.state.rules[LEAST] = CERTAIN // 4
        counts = torch.tensor([FEW_PREDICTIONS - 9, FEW_PREDICTIONS // 4])
        self.state.accuracy[:, [PREDICTED, RIGHT]] = counts
        self.kernel_pool = pool_on(self.pool, device)
        self.kernel_state = flights_on(self.state, device)
        self.handover = Handover.idle(LAYERS, EXPERTS, TOP_K, DISTANCES, CPU)
        self.kernel_handover = Handover.idle(LAYERS, EXPERTS, TOP_K, DISTANCES, device)
        self.records = torch.arange(LAYERS * EXPERTS).byte()[:, None].repeat(1, 16)
        self.slots = torch.zeros(num_slots, 16, dtype=torch.uint8)
        self.kernel_slots = self.slots.to(device, copy=True)
        self.pinned = self.records.pin_memory() if device.type == "cuda" else self.records
        self.expected_use: ExpectedUse | None = None
        self.kernel_expected_use: ExpectedUse | None = None
        self.asked: deque[Request] = deque()
        self.next_number = 0

    def pick_candidates(self) -> None:
        """A forecast of three steps, of which the second one begins."""
        expected, step = torch.rand(3, LAYERS * EXPERTS, generator=self.gen), torch.tensor([4])
        expected[:, EXPERTS * LAYERS // 2 :] += 0.4  # of the layers beyond look-ahead
        pick_candidates_reference(StepForecast(expected, step), self.pool, self.state)
        moved = StepForecast(expected.to(self.device), step.to(self.device))
        pick_candidates.launch(moved, self.kernel_pool, self.kernel_state)
        assert_same(self.kernel_pool, self.kernel_state, self.pool, self.state)

    def layer(self, layer: int, recorded: torch.Tensor | None) -> None:
        routing = Routing(EXPERTS, TOP_K, True)
        seen = min(DISTANCES, LAYERS - 1 - layer)
        logits = torch.randn(1, (1 + seen) * EXPERTS, generator=self.gen)
        outcomes = []
        for on_device in (False, True):
            device = self.device if on_device else CPU
            pool, state = self._parts(on_device)
            slots = self.kernel_slots if on_device else self.slots
            handover = self.kernel_handover if on_device else self.handover
            expected_use = self.kernel_expected_use if on_device else self.expected_use
            run = choose.launch if on_device else choose_reference
            copy = fetch.launch if on_device else fetch_reference
            ask = schedule_prefetches.launch if on_device else schedule_reference
            chosen = run(
                logits.to(device), layer, routing, pool, None, state, expected_use, handover.used,
                handover,
            )  # fmt: skip
            ids = None
            if recorded is not None:
                step = torch.zeros(1, dtype=torch.int64, device=device)
                ids = RecordedIds(recorded.to(device), step)
            all_copied = AllCopied(state.control, pool.clock, state.arrived)
            signals = Signals(all_copied, handover.free_behind(layer))
            records = self.pinned if on_device else self.records
            copy(records, slots, chosen.resolved, pool.marks, signals)
            outcomes.append([t.cpu() for t in (chosen.wanted, *chosen.resolved)])
            served = chosen.resolved.slots.long()
            assert torch.equal(slots[served, 0].cpu().int(), chosen.wanted.cpu())
            per_layer = NAMES if recorded is not None else NAMES - 1  # no power of two
            predictions = Predictions(EXPERTS, per_layer, ids, self.hinted)
            ask(predictions, pool, state, handover, expected_use)
        assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
        assert_same(self.kernel_pool, self.kernel_state, self.pool, self.state)
        invariants(self.pool, self.state)
        while (asked := read_request(self.state.requests, self.next_number)) is not None:
            self.asked.append(asked)
            self.next_number += 1

    def _parts(self, on_device: bool) -> tuple[PoolState, Flights]:
        if on_device:
            return self.kernel_pool, self.kernel_state
        return self.pool, self.state

    def host(self) -> None:
        """The oldest request: done, refused, or not yet."""
        luck = float(torch.rand(1, generator=self.gen))
        if not self.asked or luck < 0.3:
            return
        tag, slot, expert, _ = self.asked.popleft()
        if luck < 0.9:
            self.slots[slot] = self.records[expert]
            self.kernel_slots[slot] = self.records[expert].to(self.device)
        else:
            tag = -tag
        for pool in (self.pool, self.kernel_pool):
            pool.landed_tag[slot] = tag
