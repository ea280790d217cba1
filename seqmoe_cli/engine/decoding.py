"""Decoding: one step after the other, some of them ahead of the host, on a GPU as one CUDA graph.

A step evaluates the token chosen last, chooses the next one and publishes it in the ring. It runs
without the host: the token, its position, the sampling settings and the pool are device tensors at
fixed addresses. So it can be captured once and replayed for every token of every answer.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from seqmoe_cli.engine.experts import StepContext
from seqmoe_cli.engine.forward import Forward
from seqmoe_cli.settings import SamplingParams
from seqmoe_kernels import (
    ENTRY_WORDS,
    PoolState,
    SamplingState,
    begin_step,
    publish,
    read_entry,
    sample,
)

REPLAYS_AHEAD = 1  # a stop token or an interruption wastes as many
_RING_SIZE = 64  # entries; far more than steps that run ahead of the host
_NAP_S = 20e-6  # between looks; a sleeping thread leaves the interpreter to others


class Taken(NamedTuple):
    """A chosen token, `PoolState.counters` after its step, and how long the step took: since it was
    asked for or since the one before was taken, whichever is later."""

    token: int
    counters: Sequence[int]
    elapsed_s: float


class Issuer(Protocol):
    """How steps get to the device. `ahead`: how many shall be queued beyond the one awaited."""

    @property
    def ahead(self) -> int: ...
    def __call__(self) -> None: ...


class EagerSteps:
    """Runs the step operation by operation."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.ahead = 0
        self._step = step

    def __call__(self) -> None:
        self._step()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record what the device is given meanwhile into `graph`; nothing of it runs.

    What other threads do meanwhile is not recorded. The garbage collector waits: freeing the
    graph of an earlier engine would make the capture invalid.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class GraphSteps:
    """Replays the step as one CUDA graph. The first step of all runs eagerly, which compiles its
    kernels; the second is captured. A step of another `kind` has a graph of its own."""

    def __init__(
        self, step: Callable[[], None], kind: Callable[[], Hashable] = lambda: True
    ) -> None:
        self._step, self._kind = step, kind
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: has run eagerly

    @property
    def graph(self) -> torch.cuda.CUDAGraph | None:
        """That of the present kind, once there is one."""
        return self._graphs.get(self._kind())

    @property
    def ahead(self) -> int:
        return REPLAYS_AHEAD if self.graph else 0

    def __call__(self) -> None:
        kind = self._kind()
        if kind not in self._graphs:
            self._step()
            self._graphs[kind] = None
            return
        if (graph := self._graphs[kind]) is None:
            graph = torch.cuda.CUDAGraph()
            with captured(graph):
                self._step()
            self._graphs[kind] = graph
        graph.replay()


class TokenRing:
    """How chosen tokens reach the host while the device goes on: entries in host memory that the
    device writes, numbered without end.

    `next_number` is the number of the next entry that will be asked of the device. An entry that
    is not taken is overwritten one day.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._entries = torch.full(
            (_RING_SIZE, ENTRY_WORDS), -1, dtype=torch.int64, pin_memory=on_gpu
        )
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self.next_number = 0

    def begin(self) -> None:
        """Let the device count from `next_number`, whatever became of the steps before."""
        self._number.fill_(self.next_number)

    def put(self, token: torch.Tensor, pool: PoolState) -> None:
        """Queue the writing of one entry: `token` int64 [1] and the pool's counters."""
        publish(token, pool, self._entries, self._number)

    def wait(self, number: int) -> tuple[int, list[int]]:
        """An entry that has been asked for: the token, and the numbers of `PoolState.counters`.
        Other threads run meanwhile."""
        while True:
            idle = self._stream is None or self._stream.query()  # also raises the device's errors
            if (entry := read_entry(self._entries, number)) is not None:
                token, *counters = entry
                return token, counters
            if idle:
                raise AssertionError(f"the device is idle and has not written entry {number}")
            time.sleep(_NAP_S)


class Sampler:
    """The sampling state of the answer under way, in tensors that stay where they are.

    The order of penalties and filters is that of `seqmoe_kernels.sample`. The same seed and the
    same logits give the same tokens on every device.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.state = SamplingState(
            settings=torch.ones(7, device=device),
            stream=torch.zeros(2, dtype=torch.int64, device=device),
            counts=torch.zeros(vocab_size, device=device),
            seen=torch.zeros(vocab_size, dtype=torch.bool, device=device),
        )

    def begin(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Start an answer to a prompt."""
        p, state = params, self.state
        settings = [p.temperature, p.top_k, p.top_p, p.min_p]
        settings += [p.repeat_penalty, p.presence_penalty, p.frequency_penalty]
        state.settings.copy_(torch.tensor(settings))
        seed = secrets.randbits(32) if p.seed is None else p.seed
        state.stream.copy_(torch.tensor([seed, 0]))
        state.counts.zero_()
        state.seen.zero_()
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=state.seen.device)
        state.seen.index_fill_(0, prompt, True)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocab_size] -> token id int64 [1], which is then part of the answer."""
        return sample(logits, self.state)


class Decoding:
    """The tokens of one answer at a time: `begin`, `choose_first`, then `take` until enough.

    Steps that were issued and never taken have no effect but in the pool: the KV state counts what
    is committed, and `begin` puts everything else back.
    """

    def __init__(
        self, forward: Forward, sampler: Sampler, context: StepContext, use_graph: bool
    ) -> None:
        device = context.pool.slots.device
        self._forward, self._sampler, self._pool = forward, sampler, context.pool
        self._ring = TokenRing(device)
        self._token = torch.zeros(1, dtype=torch.int64, device=device)
        self._awaited: deque[tuple[int, float]] = deque()  # entries asked for: number, when
        self._taken_at = 0.0
        self._num_left = 0  # steps that may still be issued
        self._eager_steps = EagerSteps(self.step)
        graphs = GraphSteps(self.step, lambda: context.kind)
        self.issue: Issuer = graphs if use_graph else self._eager_steps

    def begin(self, params: SamplingParams, prompt_ids: Sequence[int], max_steps: int) -> None:
        """Start an answer of at most `max_steps` steps beside the first token."""
        self._sampler.begin(params, prompt_ids)
        self._ring.begin()
        self._awaited.clear()
        self._num_left = max_steps

    def choose_first(self, x: torch.Tensor) -> None:
        """Queue the choice of the first token, after the prompt's last row x [1, H]."""
        self._ask(lambda: self._choose(x))

    def take(self) -> Taken:
        """The next token. Steps that may run ahead are queued before it is waited for."""
        issue = self._eager_steps if self._forward.is_recorded else self.issue
        while self._num_left and len(self._awaited) < 1 + issue.ahead:
            self._num_left -= 1
            self._ask(issue)
        number, asked_at = self._awaited.popleft()
        token, counters = self._ring.wait(number)
        before, self._taken_at = max(asked_at, self._taken_at), time.perf_counter()
        return Taken(token, self._pool.checked(counters), self._taken_at - before)

    def _ask(self, work: Callable[[], None]) -> None:
        """Queue work that publishes one entry. Its number is used up first, so that work broken off
        in the middle is never taken for what comes after it."""
        self._awaited.append((self._ring.next_number, time.perf_counter()))
        self._ring.next_number += 1
        work()

    def step(self) -> None:
        """One step, operation by operation: what `issue` captures."""
        begin_step(self._pool.state)
        self._choose(self._forward.one(self._token))
        self._forward.await_prefetches()

    def _choose(self, x: torch.Tensor) -> None:
        self._token.copy_(self._sampler(self._forward.head(x)[0]))
        self._ring.put(self._token, self._pool.state)
