"""Forward: token ids through all layers, over the KV state and the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from seqmoe_cli.engine.beside import Beside
from seqmoe_cli.engine.forecaster import Forecaster
from seqmoe_cli.engine.kv_state import KVState
from seqmoe_cli.engine.memory import PREFILL_CHUNK
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.models.decoder import Decoder
from seqmoe_cli.residency.experts import PooledExperts
from seqmoe_cli.residency.replayed import ReplayedRouting

PrefillProgress = Callable[[int, int], None]


class InterruptedForward(Exception):
    """The caller asked to stop; the forward under way has not been committed."""


class Forward:
    """Evaluates tokens. Gives the final residual stream; `head` turns rows of it into logits."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVState,
        experts: PooledExperts,
        forecaster: Forecaster | None = None,
    ) -> None:
        self.head = decoder.head
        self._decoder = decoder
        self._kv = kv
        self._experts = experts
        self._foresight = forecaster
        if forecaster is not None:
            experts.used, experts.routed = forecaster.used, forecaster.routed
        self._beside = Beside(kv.keys.device)
        self._prefetch_streams = Beside(kv.keys.device, -1), Beside(kv.keys.device, -2)
        self._are_prefetches_out = False
        self._expectation = None if experts.prefetch is None else experts.prefetch.step_forecast
        self._num_layers = decoder.config.num_hidden_layers
        self._recorder: TraceRecorder | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the host looks into every forward, so that none may run without it."""
        return self._recorder is not None

    def record(self, recorder: TraceRecorder | None) -> None:
        """Let `recorder` see the routing and the end of every forward; None ends it."""
        self._recorder = recorder
        self._experts.observer = None if recorder is None else recorder.routed

    def replay(self, routing: ReplayedRouting | None) -> None:
        """Let `routing` choose the experts of every single token; None gives the router its say."""
        self._experts.replayed = routing
        if (prefetch := self._experts.prefetch) is not None:
            prefetch.predicted = None if routing is None else routing.named
            foreseen = None if routing is None else routing.step_forecast
            prefetch.step_forecast = foreseen or self._expectation
        if self._foresight is not None:
            self._foresight.replayed = routing

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
            if self._foresight is not None and len(chunk) == 1:
                self._foresight.begin(tokens)
            x = self._decoder.embed(tokens)
            for n in range(self._num_layers):
                if len(chunk) > 1 and stop():
                    raise InterruptedForward
                x = self._decoder.layer(n, x, self._kv, self._experts)
                if on_prefill:
                    on_prefill(start + len(chunk) * (n + 1) // self._num_layers, len(ids))
            is_last = start + len(chunk) == len(ids)
            if self._foresight is not None and is_last and len(chunk) > 1:
                self._foresight.read(tokens)
            self._advance(len(chunk))
            self._kv.commit(chunk)
            self._tell_recorder(chunk, x)
            yield x

    def one(self, token: torch.Tensor) -> torch.Tensor:
        """Evaluate `token`, int64 [1], after all that the device has seen: [1, H]. Reads nothing
        back and depends on no number of the host; the caller commits."""
        if self._foresight is not None and not self._is_foresight_wanted:
            self._foresight.rest()
        elif self._foresight is not None:
            # Nobody asks for what is foreseen before the first layer has chosen its experts.
            self._beside.fork(lambda: self._foresee(token))
            self._experts.ready = self._beside.join
        else:
            self._foresee(token)
        x = self._decoder.embed(token)
        for n in range(self._num_layers):
            x = self._decoder.layer(n, x, self._kv, self._experts)
            if n == 0:
                self._start_prefetches()
        self._advance(1)
        if self._recorder is not None:
            self._tell_recorder([int(token)], x)
        return x

    def await_prefetches(self) -> None:
        """What is queued from now on waits for what runs beside the step of `one`."""
        if self._are_prefetches_out:
            for beside in self._prefetch_streams:
                beside.join()
        self._are_prefetches_out = False

    def _start_prefetches(self) -> None:
        """Prefetches are asked for and copied beside the layers that are still to come."""
        prefetch, expected_use = self._experts.prefetch, self._experts.expected_use
        if prefetch is None or prefetch.handover is None or not prefetch.is_on:
            return
        ask, copy = self._prefetch_streams
        ask.fork(lambda: prefetch.ask(expected_use))
        copy.fork(prefetch.copy)
        self._are_prefetches_out = True

    @property
    def kind(self) -> tuple[bool, bool]:
        """What makes a step another one, with other kernels: whether prefetch is on, and whether a
        forecast chooses victims."""
        return self._experts.pool.flights is not None, self._experts.expected_use is not None

    @property
    def _is_foresight_wanted(self) -> bool:
        """By eviction, or by a prefetch, as far as they do not rest."""
        prefetches, evicts = self.kind
        return evicts or (prefetches and self._expectation is not None)

    def _foresee(self, token: torch.Tensor) -> None:
        """What the step's kernels may know of it beforehand."""
        if self._foresight is not None:
            self._foresight.begin(token)
        if (prefetch := self._experts.prefetch) is not None and prefetch.is_on:
            prefetch.begin_step()

    def _advance(self, num_tokens: int) -> None:
        self._kv.advance(num_tokens)
        if num_tokens == 1 and self._experts.replayed is not None:
            self._experts.replayed.advance()

    def _tell_recorder(self, ids: Sequence[int], x: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.evaluated(ids, self._decoder.normed("model.norm", x))
