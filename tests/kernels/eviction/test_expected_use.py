"""What is expected of experts: the kernels and the reference decide as the simulator does, bit for
bit, and the victim is the expert with the least expected use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from seqmoe_cli.residency.policies import LOG2_1P, WIDTHS, WINDOWS
from seqmoe_cli.residency.pool import make_expected_use
from seqmoe_kernels.eviction.calibration import calibrate, calibrate_reference
from seqmoe_kernels.eviction.expected_use import (
    NUM_WINDOWS,
    SPAN,
    update_expected_use,
    update_expected_use_reference,
    width_of,
)
from seqmoe_kernels.eviction.units import ONE
from seqmoe_kernels.state import NO_VICTIM, PREFETCHES, RULE_NOW, RULE_TICK, PoolState
from tests.kernels.pool_states import EXPERTS, LAYERS, TOP_K
from tests.kernels.step_case import Case
from tools.simulator.forecast_eviction import Blend, ForecastEviction
from tools.simulator.scores import DecayedFrequency

# layers, experts of each, used of them
SHAPES = [(1, 4, 1), (3, 20, 3), (5, 64, 4)]
STEPS = 24


def test_the_same_windows_everywhere() -> None:
    assert tuple(((1 << w) - max((1 << w >> 1), 1) + 1, 1 << w) for w in range(4)) == WINDOWS
    widths = [last - first + 1 for first, last in WINDOWS]
    assert widths == [width_of(window) for window in range(NUM_WINDOWS)]


def some_steps(rng: np.random.Generator, layers: int, experts: int, top_k: int) -> np.ndarray:
    """Ids [STEPS, L, K] that come again, as those of real routing do."""
    ids = np.argsort(rng.random((STEPS, layers, experts)), axis=2)[..., :top_k]
    for step in range(1, STEPS):
        again = rng.random(layers) < 0.5
        ids[step, again] = ids[step - 1, again]
    return ids


def some_forecasts(
    rng: np.random.Generator, ids: np.ndarray, experts: int, kind: str
) -> np.ndarray:
    """f32 [STEPS, W, N]: the truth, noise, or the truth for a while and then its contrary."""
    steps, layers, _ = ids.shape
    hot = np.zeros((steps + SPAN, layers, experts), np.float32)
    np.put_along_axis(hot[:steps], ids, 1, axis=2)
    hot = hot.reshape(len(hot), -1)
    truth = np.stack(
        [[hot[t + a - 1 : t + b].sum(0) for a, b in WINDOWS] for t in range(steps)]
    ).astype(np.float32)
    noise = rng.random(truth.shape, np.float32)
    if kind == "noise":
        return noise * WIDTHS[:, None].astype(np.float32)
    made = 0.7 * truth + 0.1 * noise
    if kind == "traitor":
        made[STEPS // 2 :] = (WIDTHS[:, None] - truth)[STEPS // 2 :]
    return made.astype(np.float32)


class Beside:
    """The policies of the simulator, and the tensors that shall agree with them."""

    def __init__(self, layers: int, experts: int, made: np.ndarray, device: torch.device) -> None:
        num = layers * experts
        self.blend = Blend(num, lambda step: np.rint(made[step] * ONE).astype(np.int64))
        self.eviction = ForecastEviction(layers, self.blend)
        self.pool = PoolState.cold(num, 4, device)
        counts = DecayedFrequency(num)
        self.pool.rule.copy_(torch.tensor([counts.tick, counts.now - counts.tick]))
        self.pool = self.pool._replace(log_sums=torch.from_numpy(LOG2_1P).int().to(device))
        self.expected_use = make_expected_use(num, 4, device)
        self.used: list[int] = []  # flat ids, in this step
        self.experts = experts

    def start(self, step: int) -> None:
        self.blend.start_token(step)
        self.eviction.start_token(step)
        self.pool.rule[RULE_NOW] += self.pool.rule[RULE_TICK]
        self.used.clear()

    def use(self, layer: int, ids: np.ndarray) -> None:
        flat = ids + layer * self.experts
        self.blend.use(layer, flat)
        self.eviction.use(layer, flat)
        self.used += flat.tolist()
        self.pool.usage.copy_(torch.from_numpy(self.blend.counts.score[:-1]))

    def compare(self, num_passed: int) -> None:
        got = self.expected_use
        np.testing.assert_array_equal(got.trust.cpu().numpy(), self.blend.trust)
        np.testing.assert_array_equal(got.mixed.cpu().numpy(), self.blend.expected)
        first_to_come = num_passed * self.experts
        worth = got.coming.clone()
        worth[:first_to_come] = got.passed[:first_to_come]
        worth[self.used] = got.again[self.used]
        np.testing.assert_array_equal(worth.cpu().numpy(), self.eviction.score[:-1])


@pytest.mark.parametrize("kind", ["truth", "noise", "traitor"])
@pytest.mark.parametrize("layers,experts,top_k", SHAPES)
def test_as_the_simulator_says(
    device: torch.device, layers: int, experts: int, top_k: int, kind: str
) -> None:
    rng = np.random.default_rng(layers)
    ids = some_steps(rng, layers, experts, top_k)
    made = some_forecasts(rng, ids, experts, kind)
    used = torch.full((layers * top_k,), layers * experts, dtype=torch.int32)
    sides = {run: Beside(layers, experts, made, device) for run in (True, False)}
    trusts = []
    for step in range(STEPS):
        for on_gpu, side in sides.items():
            side.start(step)
            judge = calibrate.launch if on_gpu else calibrate_reference
            update = update_expected_use.launch if on_gpu else update_expected_use_reference
            judge(used.to(device), top_k, side.pool, side.expected_use)
            update(torch.from_numpy(made[step]).to(device), side.pool, side.expected_use)
            for layer in range(layers):
                side.compare(layer)
                side.use(layer, ids[step, layer])
            side.compare(layers)
        used = torch.from_numpy(ids[step] + experts * np.arange(layers)[:, None]).flatten().int()
        trusts.append(sides[True].expected_use.trust.tolist())
    for got, expected in zip(sides[True].expected_use, sides[False].expected_use, strict=True):
        if expected is not sides[False].expected_use.parts:
            assert torch.equal(got, expected)
    middle, last = trusts[STEPS // 2 - 1], trusts[-1]
    if kind == "noise":
        assert max(last) < 128
    else:
        assert middle[0] > 160
    if kind == "traitor":
        assert last[0] < middle[0] // 2


def test_an_interruption_is_not_judged(device: torch.device) -> None:
    """After it, forecasts of before are not compared with what was used after it."""
    layers, experts = 2, 8
    made = np.ones((STEPS, NUM_WINDOWS, layers * experts), np.float32)
    side = Beside(layers, experts, made, device)
    used = torch.tensor([0, 9], dtype=torch.int32, device=device)
    expected = torch.ones(NUM_WINDOWS, layers * experts, device=device)

    def step() -> None:
        calibrate.launch(used, 1, side.pool, side.expected_use)
        update_expected_use.launch(expected, side.pool, side.expected_use)

    for _ in range(10):
        step()
    before = side.expected_use.sums[1].clone()
    side.expected_use.steps[1:].zero_()
    step()
    assert torch.equal(side.expected_use.sums[1], before)
    step()
    changed = (side.expected_use.sums[1] != before).any(1)
    assert changed.tolist() == [True, False, False, False]


@pytest.mark.parametrize("num_slots", [9, 25])
def test_kernels_choose_the_same_victims(device: torch.device, num_slots: int) -> None:
    """Of misses and of prefetches, from step to step."""
    num, case = LAYERS * EXPERTS, Case(num_slots, device, 0)
    counts = DecayedFrequency(num)
    for pool in (case.pool, case.kernel_pool):
        pool.rule.copy_(torch.tensor([counts.tick, counts.now]))
    case.expected_use, case.kernel_expected_use = (
        make_expected_use(num, num_slots, place) for place in (torch.device("cpu"), device)
    )
    used = torch.full((LAYERS * TOP_K,), num, dtype=torch.int32)
    for _ in range(3):
        expected = torch.rand(NUM_WINDOWS, num, generator=case.gen)
        for pool in (case.pool, case.kernel_pool):
            pool.rule[RULE_NOW] += pool.rule[RULE_TICK]
        calibrate_reference(used, TOP_K, case.pool, case.expected_use)
        update_expected_use_reference(expected, case.pool, case.expected_use)
        calibrate.launch(used.to(device), TOP_K, case.kernel_pool, case.kernel_expected_use)
        update_expected_use.launch(expected.to(device), case.kernel_pool, case.kernel_expected_use)
        for layer in range(LAYERS):
            case.layer(layer, None)
            case.host()
            case.host()
    assert case.pool.counters[PREFETCHES] > 3 and case.pool.counters[NO_VICTIM] == 0
