"""Engine: opens a packed model and turns token ids into a stream of steps.

Knows no tokenizer, no template and no terminal.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from seqmoe_cli.engine.kv_state import KVState
from seqmoe_cli.engine.memory import (
    HEAD_CHUNK,
    PREFILL_CHUNK,
    MemoryPlan,
    ModelShape,
    plan_memory,
)
from seqmoe_cli.engine.sampler import Sampler
from seqmoe_cli.engine.stats import Step, StepStats
from seqmoe_cli.errors import PromptError
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.models import build_decoder
from seqmoe_cli.residency.experts import PooledExperts
from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_kernels.formats import ExpertFormat
from seqmoe_weights.layout import RecordLayout
from seqmoe_weights.packed import PackedModel
from seqmoe_weights.store import HostStore

LoadProgress = Callable[[str, int, int], None]
PrefillProgress = Callable[[int, int], None]
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


class _InterruptedForward(Exception):
    """The caller asked to stop; the forward under way has not been committed."""


class Engine:
    """One model, one conversation state, one pool. Not thread-safe."""

    def __init__(
        self,
        model: ModelShape,
        store: HostStore,
        plan: MemoryPlan,
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.model = model
        self.config = model.config
        self.plan = plan
        self.device = plan.device
        self.dtype = plan.dtype
        self.ctx_size = plan.ctx_size
        self.fallbacks = list(plan.fallbacks)
        self.store = store
        self.kv = KVState(self.config, plan.ctx_size, plan.dtype, plan.device)
        self.pool = ExpertPool(plan.num_slots, store.records, plan.device)
        self._decoder = build_decoder(self.config, weights)
        self._experts = PooledExperts(
            self.pool, expert_format(model.layout), self.config.num_experts
        )
        self._recorder: TraceRecorder | None = None

    @classmethod
    def open(
        cls, path: Path, options: EngineOptions, progress: LoadProgress | None = None
    ) -> Engine:
        """Load a packed model. `progress` gets (stage, done bytes, total bytes).

        Raises `PackedModelError` for a missing, unfinished or damaged model and `ResourceError`
        when memory does not suffice.
        """
        report = progress or (lambda stage, done, total: None)
        model = PackedModel.open(path)
        plan = plan_memory(model, options)
        pin = plan.device.type == "cuda"
        store = HostStore.load(model, pin, lambda done, total: report("experts", done, total))
        weights = model.load_resident(
            plan.device, plan.dtype, lambda done, total: report("weights", done, total)
        )
        return cls(model, store, plan, weights)

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose KV state is held."""
        return self.kv.token_ids

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        on_prefill: PrefillProgress | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[Step]:
        """Answer a prompt, one `Step` per forward; the first also carries the prefill.

        The KV state of the longest common prefix with what is held is used again. `on_prefill`
        gets (done, total) prompt tokens. `interrupted` is asked between layers of the prefill and
        between steps; when it says yes the stream ends with a step of finish reason
        "interrupted". The KV state stays consistent if the stream is closed early.
        Raises `PromptError` when the prompt is empty or leaves no room in the context.
        """
        self._check_prompt(prompt_ids)
        stop = interrupted or (lambda: False)
        self.kv.truncate(_common_prefix(self.kv.token_ids, prompt_ids[:-1]))
        sampler = Sampler(sampling, self.config.vocab_size, prompt_ids, self.device)
        stats, token = self._step(
            "prefill", prompt_ids[self.kv.length :], sampler, stop, on_prefill
        )
        for produced in itertools.count(1):
            if token is None:
                reason = "interrupted"
            elif token in stop_ids:
                token, reason = None, "stop"
            elif produced == max_tokens or self.kv.length == self.ctx_size:
                reason = "length"
            else:
                yield Step(token, None, stats)
                stats, token = self._step("decode", [token], sampler, stop)
                continue
            yield Step(token, reason, stats)
            return

    def _step(
        self,
        phase: str,
        ids: Sequence[int],
        sampler: Sampler,
        stop: Callable[[], bool],
        on_prefill: PrefillProgress | None = None,
    ) -> tuple[StepStats, int | None]:
        """Evaluate ids and choose the token after them; None when the caller asked to stop."""
        started, before, held = time.perf_counter(), self.pool.counters(), self.kv.length
        token = None
        with contextlib.suppress(_InterruptedForward):
            if stop():
                raise _InterruptedForward
            for x in self._forward_chunks(ids, on_prefill, stop):
                last = x[-1:]
            token = int(sampler(self._decoder.head(last)[0]))
        after = self.pool.counters()
        misses = after.misses - before.misses
        stats = StepStats(
            phase=phase,
            num_tokens=self.kv.length - held,
            hits=after.hits - before.hits,
            misses=misses,
            fetched_bytes=misses * self.plan.record_bytes,
            elapsed_s=time.perf_counter() - started,
        )
        return stats, token

    @torch.inference_mode()
    def log_likelihoods(
        self, ids: Sequence[int], on_prefill: PrefillProgress | None = None
    ) -> torch.Tensor:
        """f32 [len(ids) - 1] on the host: natural log of the probability of ids[i + 1] given
        ids[: i + 1]. One window: at most `ctx_size` tokens; replaces the KV state."""
        self._check_prompt(ids, room=0)
        self.reset_kv()
        targets = torch.tensor(ids[1:], dtype=torch.int64, device=self.device)
        likelihoods = torch.empty(len(targets), device=self.device)
        done = 0
        for x in self._forward_chunks(ids, on_prefill, lambda: False):
            for rows in torch.split(x, HEAD_CHUNK):
                wanted = targets[done : done + len(rows)]
                if len(wanted) == 0:  # the last token predicts nothing that is known
                    break
                logp = self._decoder.head(rows[: len(wanted)]).log_softmax(1)
                likelihoods[done : done + len(wanted)] = logp.gather(1, wanted[:, None])[:, 0]
                done += len(wanted)
        return likelihoods.cpu()

    def record(self, recorder: TraceRecorder | None) -> None:
        """Let `recorder` see every forward from now on; None ends it."""
        self._recorder = recorder
        self._experts.observer = None if recorder is None else recorder.routed

    def reset_pool(self) -> None:
        """Make the pool cold."""
        self.pool.reset()

    def reset_kv(self) -> None:
        """Forget the conversation."""
        self.kv.truncate(0)

    def close(self) -> None:
        """Give the pinned memory back. The engine cannot be used afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()

    def _check_prompt(self, ids: Sequence[int], room: int = 1) -> None:
        if not ids:
            raise PromptError("the prompt has no tokens", "give it some text")
        if len(ids) + room > self.ctx_size:
            raise PromptError(
                f"the prompt has {len(ids):,} tokens, the context holds {self.ctx_size:,}",
                "shorten it, or raise -c (up to the model's "
                f"{self.config.max_position_embeddings:,})",
            )
        if max(ids) >= self.config.vocab_size:
            raise PromptError(
                f"token id {max(ids)} is outside the vocabulary of {self.config.vocab_size:,}",
                "tokenizer.json and config.json do not belong together",
            )

    def _forward_chunks(
        self, ids: Sequence[int], on_prefill: PrefillProgress | None, stop: Callable[[], bool]
    ) -> Iterator[torch.Tensor]:
        """Final residual stream [T, H] chunk by chunk; the chunk size does not depend on the
        pool, so neither do the bits of the result."""
        size = PREFILL_CHUNK[self.device.type]
        layers = self.config.num_hidden_layers
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            positions = self.kv.begin(len(chunk))
            x = self._decoder.embed(torch.tensor(chunk, dtype=torch.int64, device=self.device))
            for n in range(layers):
                if len(chunk) > 1 and stop():
                    raise _InterruptedForward
                x = self._decoder.layer(n, x, positions, self.kv, self._experts)
                if on_prefill:
                    on_prefill(start + len(chunk) * (n + 1) // layers, len(ids))
            self.kv.commit(chunk)
            if self._recorder is not None:
                self._recorder.evaluated(chunk, self._decoder.norm("model.norm", x))
            yield x


def expert_format(layout: RecordLayout) -> ExpertFormat:
    """The record layout in the form that kernels take."""

    def offset(name: str) -> int:
        return layout[name].offset if name in layout else -1

    gate = layout["gate"]
    inter, hidden = gate.shape
    return ExpertFormat(
        weight_dtype=_DTYPES[gate.dtype],
        hidden=hidden,
        inter=inter,
        gate=gate.offset,
        up=layout["up"].offset,
        down=layout["down"].offset,
        gate_scale=offset("gate_scale"),
        up_scale=offset("up_scale"),
        down_scale=offset("down_scale"),
        stamp=layout["stamp"].offset,
        record_bytes=layout.record_bytes,
    )


def _common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for a, b in zip(held, wanted, strict=False):
        if a != b:
            break
        count += 1
    return count
