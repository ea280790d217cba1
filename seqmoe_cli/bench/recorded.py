"""RecordedRouting: a trace that a benchmark replays in the place of the router's choice.

Look-ahead and forecast are simulated then: a trace has no hidden states that the routers of later
layers could look at, and random weights no predictor, so the trace's own future is named, blurred
to a recall and a precision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.shipped import SHIPPED, open_trace
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_weights.config import ModelConfig

ACCURACY = ((0.751, 0.680), (0.669, 0.550), (0.613, 0.461), (0.573, 0.399))
"""Recall of misses and precision of copies, 1 to 4 layers ahead: the routers of Qwen3-30B-A3B
beside an LRU pool of 44 %, as measured by others."""
FORECAST = (0.6, 0.6)
"""Of a step's misses before it begins: what predictors of small models had on text that they had
not seen, when as many of the likeliest absent experts were named as were missed."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RecordedRouting:
    """`trace` holds the tokens of the answers alone: its prompts are not replayed. `accuracy`: how
    well simulated look-ahead knows it, see `blurred_names`."""

    name: str
    trace: Trace
    accuracy: Sequence[tuple[float, float]] = ACCURACY

    @classmethod
    def open(cls, name: str) -> RecordedRouting:
        """A shipped trace or a file, see `open_trace`; it must have two tokens to replay."""
        trace = open_trace(name)
        trace = trace.select(trace.phase == DECODE)
        if len(trace) < 2:
            raise SeqmoeError(
                f"trace {name} has {len(trace)} tokens of answers, at least 2 are needed",
                f"record a longer one, or use one that comes with seqmoe: {', '.join(SHIPPED)}",
            )
        return cls(name, trace)

    def first(self, num: int) -> RecordedRouting:
        """The same, but its first `num` tokens only."""
        return replace(self, trace=self.trace.select(np.arange(len(self.trace)) < num))

    def check_fits(self, model: str, config: ModelConfig) -> None:
        """Raise `SeqmoeError` unless the model has the layers and experts of the trace."""
        trace = self.trace
        shapes = (
            f"{layers} layers of {experts} experts"
            for layers, experts in (
                (trace.num_layers, trace.num_experts),
                (config.num_hidden_layers, config.num_experts),
            )
        )
        recorded, present = shapes
        if recorded != present:
            raise SeqmoeError(
                f"trace {self.name} was recorded from {recorded}, {model} has {present}",
                "replay it with a model or --shape like the recorded one, or record another: "
                "seqmoe trace",
            )

    def cases(self, gens: Sequence[int] | None, depths: Sequence[int]) -> tuple[Case, ...]:
        """All tokens of the trace are replayed, the last ones timed: as many as `gens` says, or the
        second half. The first token is never timed, as it comes as a prompt."""
        total = len(self.trace)
        for num in gens or ():
            if not 1 <= num < total:
                raise SeqmoeError(
                    f"-n {num}: of the {total} tokens of trace {self.name}, 1 to {total - 1} can "
                    "be timed",
                    f"leave -n out to time the last {total // 2}",
                )
        return tuple(
            Case(0, num, depth, num_untimed=total - num)
            for depth in depths
            for num in gens or (total // 2,)
        )

    def replayed(
        self, device: torch.device, prefetch_slots: int = 0, forecast: bool = False
    ) -> ReplayedRouting:
        """What an engine on `device` takes; with prefetch into a pool of so many slots, simulated
        look-ahead too, and on request a simulated forecast."""
        experts, named, expected = self.trace.experts, None, None
        sizes = self.trace.num_experts, prefetch_slots
        if prefetch_slots:
            named = torch.from_numpy(blurred_names(experts, *sizes, self.accuracy))
        if forecast:
            expected = torch.from_numpy(blurred_uses(experts, *sizes))
        tokens = None
        if self.trace.token_ids is not None:
            tokens = torch.from_numpy(self.trace.token_ids.astype("int64"))
        ids = torch.from_numpy(experts.astype("int32"))
        return ReplayedRouting(ids, device, named, expected, tokens)


def blurred_names(
    experts: NDArray[np.integer],
    num_experts: int,
    num_slots: int,
    accuracy: Sequence[tuple[float, float]] = ACCURACY,
    seed: int = 0,
) -> Ints:
    """What each layer says that the next ones will use: ids [steps, L, D, K], -1 for none, from
    what they do use, `experts` [steps, L, K].

    Of the experts that an event uses, a share `recall` is named; what is named from afar is named
    from nearer too. Wrong names are drawn evenly from the experts of its layer that an LRU pool of
    `num_slots` would not hold, as many as make the precision right at that pool's rate of misses in
    the tokens around. The engine leaves out resident experts. Absent names come first, in the order
    of the trace.
    """
    rng = np.random.default_rng(seed)
    steps, layers, top_k = experts.shape
    absent = _absent(experts, num_experts, num_slots)
    missed = np.take_along_axis(absent, experts.astype(np.int64), axis=2)
    rate = _around(missed.sum((1, 2)) / layers)  # misses of an event
    luck = rng.random(experts.shape)
    names = np.full((steps, layers, len(accuracy), top_k), -1, np.int64)
    for step, layer in np.ndindex(steps, layers):
        wanted, out = experts[step, layer].astype(np.int64), missed[step, layer]
        others = rng.permutation(np.setdiff1d(np.flatnonzero(absent[step, layer]), wanted))
        draw = rng.random()
        for d, (recall, precision) in enumerate(accuracy[:layer]):
            right = luck[step, layer] < recall
            expected = recall * rate[step] * (1 - precision) / precision
            wrong = others[: int(expected + draw)]  # the mean of int(x + U) is x
            row = np.concatenate((wanted[right & out], wrong, wanted[right & ~out]))[:top_k]
            names[step, layer - 1 - d, d, : len(row)] = row
    return names


def blurred_uses(
    experts: NDArray[np.integer],
    num_experts: int,
    num_slots: int,
    accuracy: tuple[float, float] = FORECAST,
    seed: int = 1,
) -> NDArray[np.float32]:
    """What is expected of each step, [steps, N], from `experts` [steps, L, K]: the precision for
    experts that are named, else 0. Named are a share `recall` of what an LRU pool of `num_slots`
    would miss, drawn without regard to look-ahead, and others that it does not hold."""
    rng, (recall, precision) = np.random.default_rng(seed), accuracy
    steps, layers, _ = experts.shape
    absent = _absent(experts, num_experts, num_slots)
    missed = np.zeros_like(absent)
    np.put_along_axis(missed, experts.astype(np.int64), True, axis=2)
    others, missed = absent & ~missed, absent & missed
    wrong = recall * _around(missed.sum((1, 2)) / layers) * (1 - precision) / precision
    chance = wrong[:, None, None] / np.maximum(others.sum(2, keepdims=True), 1)
    named = missed & (rng.random(absent.shape) < recall)
    named |= others & (rng.random(absent.shape) < chance)
    return (named * np.float32(precision)).reshape(steps, layers * num_experts)


def _absent(experts: NDArray[np.integer], num_experts: int, num_slots: int) -> NDArray[np.bool_]:
    """The experts that are not in an LRU pool when an event comes: [steps, L, E]."""
    steps, layers, _ = experts.shape
    out = np.empty((steps, layers, num_experts), bool)
    pool: OrderedDict[int, None] = OrderedDict()
    now = np.ones(layers * num_experts, bool)
    for step, layer in np.ndindex(steps, layers):
        base = layer * num_experts
        out[step, layer] = now[base : base + num_experts]
        for expert in (experts[step, layer].astype(np.int64) + base).tolist():
            pool[expert], now[expert] = None, False
            pool.move_to_end(expert)
        while len(pool) > num_slots:
            now[pool.popitem(last=False)[0]] = True
    return out


def _around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over up to five neighbours."""
    window = np.ones(5)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
