"""Forward: token ids through all layers, over the KV state and the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from seqmoe_cli.engine.experts import PooledExperts, StepContext
from seqmoe_cli.engine.kv_state import KVState
from seqmoe_cli.engine.memory import PREFILL_CHUNK
from seqmoe_cli.engine.streams import Beside
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.models.decoder import Decoder
from seqmoe_kernels import Matrix

if TYPE_CHECKING:
    from seqmoe_cli.engine.forecaster import Forecaster

PrefillProgress = Callable[[int, int], None]


class InterruptedForward(Exception):
    """The caller asked to stop; the forward under way has not been committed."""


class Forward:
    """Evaluates tokens. Gives the final residual stream; `head` turns rows of it into logits."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVState,
        context: StepContext,
        experts: PooledExperts,
        forecaster: Forecaster | None = None,
        look_ahead: Sequence[Matrix | None] | None = None,
    ) -> None:
        self.head = decoder.head
        self._decoder, self._kv, self._context = decoder, kv, context
        self._experts, self._forecaster = experts, forecaster
        self._look_ahead = look_ahead
        device = kv.keys.device
        self._schedule, self._copies = Beside(device, -1), Beside(device, -2)
        self._num_layers = decoder.config.num_hidden_layers
        self._recorder: TraceRecorder | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the host looks into every forward, so that none may run without it."""
        return self._recorder is not None

    def record(self, recorder: TraceRecorder | None) -> None:
        """Let `recorder` see the routing and the end of every forward; None ends it."""
        self._recorder = recorder
        self._context.observer = None if recorder is None else recorder.routed

    def chunks(
        self,
        ids: Sequence[int],
        on_prefill: PrefillProgress | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[torch.Tensor]:
        """Evaluate and commit `ids` chunk by chunk, [T, H] each. The chunk size does not depend on
        the pool, so neither do the bits of the result. Raises `InterruptedForward`."""
        device = self._kv.keys.device
        size = PREFILL_CHUNK[device.type]
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            self._kv.begin(len(chunk))
            tokens = torch.tensor(chunk, dtype=torch.int64, device=device)
            if self._forecaster is not None and len(chunk) == 1:
                self._forecaster.begin(tokens, self._context.replayed)
            x = self._decoder.embed(tokens)
            for n in range(self._num_layers):
                if len(chunk) > 1 and stop():
                    raise InterruptedForward
                x = self._layer(n, x)
                if on_prefill:
                    on_prefill(start + len(chunk) * (n + 1) // self._num_layers, len(ids))
            is_last = start + len(chunk) == len(ids)
            if self._forecaster is not None and is_last and len(chunk) > 1:
                self._forecaster.read(tokens, self._context.replayed)
            self._advance(len(chunk))
            self._kv.commit(chunk)
            self._tell_recorder(chunk, x)
            yield x

    def one(self, token: torch.Tensor) -> torch.Tensor:
        """Evaluate `token`, int64 [1], after all that the device has seen: [1, H]. Reads nothing
        back and depends on no number of the host; the caller commits."""
        self._forecast(token)
        x = self._decoder.embed(token)
        for n in range(self._num_layers):
            x = self._layer(n, x)
            if n == 0:
                self._start_prefetches()
        self._advance(1)
        if self._recorder is not None:
            self._tell_recorder([int(token)], x)
        return x

    def await_prefetches(self) -> None:
        """What is queued from now on waits for what runs beside the step of `one`."""
        self._schedule.join()
        self._copies.join()

    def _forecast(self, token: torch.Tensor) -> None:
        """What the step's kernels may know of it beforehand."""
        context, forecaster = self._context, self._forecaster
        prefetch = context.prefetch if context.pool.flights is not None else None

        def work() -> None:
            if forecaster is not None:
                forecaster.begin(token, context.replayed)
            if prefetch is not None:
                prefetch.begin_step(context.candidates)

        if forecaster is None:
            work()
        elif context.is_forecast_wanted:  # not before the first choice of experts
            context.forecast.fork(work)
        else:
            forecaster.rest()

    def _start_prefetches(self) -> None:
        """Prefetches are asked for and copied beside the layers that are still to come."""
        context = self._context
        prefetch = context.prefetch if context.pool.flights is not None else None
        if prefetch is None or self._kv.keys.device.type != "cuda":
            return
        self._schedule.fork(lambda: prefetch.ask(context))
        if prefetch.thread is None:
            self._copies.fork(prefetch.copy)

    def _layer(self, n: int, x: torch.Tensor) -> torch.Tensor:
        """Layer n; that of a single token looks ahead while prefetch is on."""
        ahead = None
        if self._look_ahead and len(x) == 1 and self._context.pool.flights is not None:
            ahead = self._look_ahead[n]
        return self._decoder.layer(n, x, self._kv, self._experts, ahead)

    def _advance(self, num_tokens: int) -> None:
        self._kv.advance(num_tokens)
        if num_tokens == 1 and self._context.replayed is not None:
            self._context.replayed.advance()

    def _tell_recorder(self, ids: Sequence[int], x: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.evaluated(ids, self._decoder.final_norm(x))
