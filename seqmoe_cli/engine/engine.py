"""Engine: opens a packed model and turns token ids into a stream of steps.

Knows no tokenizer, no template and no terminal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch

from seqmoe_cli.engine.decoding import Decoding, Sampler
from seqmoe_cli.engine.experts import PooledExperts, StepContext
from seqmoe_cli.engine.forecaster import Forecaster, plan_with_predictor
from seqmoe_cli.engine.forward import Forward, InterruptedForward, PrefillProgress
from seqmoe_cli.engine.kv_state import KVState
from seqmoe_cli.engine.look_ahead import look_ahead_routers
from seqmoe_cli.engine.memory import HEAD_CHUNK, MemoryPlan, ModelShape
from seqmoe_cli.engine.stats import Step
from seqmoe_cli.engine.streams import Beside
from seqmoe_cli.errors import PromptError
from seqmoe_cli.forecast.predictor import Predictor
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.models import build_decoder
from seqmoe_cli.residency.eviction import Eviction
from seqmoe_cli.residency.pool import ExpertPool, Stamps, make_expected_use
from seqmoe_cli.residency.prefetch import DISTANCE, Prefetch
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_kernels import Routing, StepForecast, expert_format
from seqmoe_kernels.eviction.ghost_cache import GhostCache
from seqmoe_weights.packed import PackedModel
from seqmoe_weights.store import HostStore

LoadProgress = Callable[[str, int, int], None]


class Engine:
    """One model, one conversation state, one pool. Not thread-safe."""

    def __init__(
        self,
        model: ModelShape,
        store: HostStore,
        plan: MemoryPlan,
        weights: dict[str, torch.Tensor],
        *,
        eager: bool = False,
        verify: bool = False,
        predictor: Predictor | None = None,
    ) -> None:
        """`eager`: also a GPU decodes operation by operation, without a CUDA graph. `verify`: see
        `EngineOptions`. `predictor`: see `predictor_for`; without one nothing is forecast."""
        self.model, self.config = model, model.config
        self.plan, self.store = plan, store
        self.device, self.dtype, self.ctx_size = plan.device, plan.dtype, plan.ctx_size
        self.fallbacks = list(plan.fallbacks)
        self.is_warm = False  # something was in the pool before the first answer
        config, use_graph = self.config, plan.device.type == "cuda" and not eager
        num_layers, num_experts = config.num_hidden_layers, config.num_experts
        routing = Routing(num_experts, config.num_experts_per_tok, config.norm_topk_prob)
        formats = [expert_format(layout) for layout in model.layouts]

        self.kv = KVState(config, plan.ctx_size, plan.dtype, plan.device)
        stamps = Stamps(formats[0].stamp, num_experts) if verify else None
        self.pool = ExpertPool(plan.num_slots, store.records, plan.device, stamps, plan.policy)
        self.eviction, self.forecaster = self._build_forecast(predictor, use_graph)
        used = None if self.forecaster is None else self.forecaster.used
        self.prefetch = None
        if plan.prefetch != "off":
            self.prefetch = Prefetch(self.pool, num_layers, routing, plan.prefetch_by, used)
        context = StepContext(
            self.pool,
            routing,
            forecast=Beside(plan.device),
            prefetch=self.prefetch,
            eviction=self.eviction,
            step_forecast=self._step_forecast(),
            used=used,
            routed=None if self.forecaster is None else self.forecaster.routed,
        )
        decoder = build_decoder(config, weights)
        look_ahead = None if self.prefetch is None else look_ahead_routers(decoder, DISTANCE)
        experts = PooledExperts(context, formats)
        self._context = context
        self._forward = Forward(decoder, self.kv, context, experts, self.forecaster, look_ahead)
        sampler = Sampler(config.vocab_size, plan.device)
        self.decoding = Decoding(self._forward, sampler, context, use_graph)
        self._usage_before = self.pool.state.usage.clone()

    def _build_forecast(
        self, predictor: Predictor | None, use_graph: bool
    ) -> tuple[Eviction | None, Forecaster | None]:
        """What runs a predictor along, and eviction by what it says."""
        if predictor is None or not self.plan.forecasts:
            return None, None
        num_experts, device = self.config.num_routed_experts, self.device
        expected_use = make_expected_use(num_experts, self.plan.num_slots, device)
        eviction = None
        if self.plan.policy == "forecast":
            eviction = Eviction(expected_use, GhostCache.unknown(num_experts, device))
        return eviction, Forecaster(predictor, self.pool, expected_use, eviction, use_graph)

    def _step_forecast(self) -> StepForecast | None:
        if self.forecaster is None or self.plan.prefetch != "full":
            return None
        return StepForecast(self.forecaster.expected_use.likely, None)

    @classmethod
    def open(
        cls,
        path: Path,
        options: EngineOptions,
        progress: LoadProgress | None = None,
        *,
        eager: bool = False,
    ) -> Engine:
        """Load a packed model. `progress` gets (stage, done bytes, total bytes); for `eager` see
        the constructor.

        Raises `PackedModelError` for a missing, unfinished or damaged model and `ResourceError`
        when memory does not suffice.
        """
        report = progress or (lambda stage, done, total: None)
        model = PackedModel.open(path)
        plan, predictor = plan_with_predictor(model, options, path)
        pin = plan.device.type == "cuda"
        store = HostStore.load(model, pin, lambda done, total: report("experts", done, total))
        weights = model.load_resident(
            plan.device, plan.dtype, lambda done, total: report("weights", done, total)
        )
        return cls(
            model,
            store,
            plan,
            weights,
            eager=eager,
            verify=options.verify,
            predictor=predictor,
        )

    @torch.inference_mode()
    def warm(self, ranking: Sequence[int]) -> None:
        """Fill the cold pool with the first experts of a ranking, flat ids."""
        if len(ranking):
            self.pool.fill(torch.as_tensor(ranking, dtype=torch.int32, device=self.device))
            self.is_warm = True

    def used_in_answer(self) -> list[bool]:
        """Which experts, by flat id, the last answer has used, its prompt not counted (waits for
        the device)."""
        used: list[bool] = (self.pool.state.usage != self._usage_before).tolist()
        return used

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
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
        most = self.ctx_size - len(prompt_ids) + 1  # the last token need not fit the context
        limit = most if max_tokens is None else min(max_tokens, most)
        pairs = zip(self.kv.token_ids, prompt_ids[:-1], strict=False)
        self.kv.truncate(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self.decoding.begin(sampling, prompt_ids, limit - 1)
        steps = self._steps(prompt_ids, on_prefill, interrupted or (lambda: False))
        for produced, (stats, token) in enumerate(steps, 1):
            reason = None
            if token is None:
                reason = "interrupted"
            elif token in stop_ids:
                token, reason = None, "stop"
            elif produced == limit:
                reason = "length"
            yield Step(token, reason, stats)
            if reason:
                return

    def _steps(
        self,
        prompt_ids: Sequence[int],
        on_prefill: PrefillProgress | None,
        stop: Callable[[], bool],
    ) -> Iterator[tuple[StepStats, int | None]]:
        """What each forward cost and the token chosen after it, None when the caller asked to
        stop. The prompt is the first forward; taking a token evaluates the one before it."""
        started, before, held = time.perf_counter(), self.pool.counters(), self.kv.length
        taken = None
        with contextlib.suppress(InterruptedForward):
            if stop():
                raise InterruptedForward
            for x in self._forward.chunks(prompt_ids[held:], on_prefill, stop):
                last = x[-1:]
            self._usage_before.copy_(self.pool.state.usage)
            self.decoding.choose_first(last)
            taken = self.decoding.take()
        after = taken.counters if taken else self.pool.counters()
        num_tokens, elapsed_s = self.kv.length - held, time.perf_counter() - started
        record_bytes = self.plan.record_bytes
        stats = StepStats.between(before, after, record_bytes, "prefill", num_tokens, elapsed_s)
        yield stats, taken.token if taken else None
        while taken and not stop():
            before, token = taken.counters, taken.token
            taken = self.decoding.take()
            self.kv.commit([token])
            stats = StepStats.between(
                before, taken.counters, record_bytes, "decode", 1, taken.elapsed_s
            )
            yield self._observe(stats), taken.token
        yield StepStats("decode"), None

    def _observe(self, step: StepStats) -> StepStats:
        """Let eviction and prefetch learn from a decode step, and note in it which of them rested.
        Say so once there will be no more prefetches."""
        prefetch, eviction = self.prefetch, self.eviction
        if prefetch is None and eviction is None:
            return step
        step = replace(
            step,
            prefetch_rested_tokens=int(prefetch is not None and not prefetch.is_on),
            eviction_rested_tokens=int(eviction is not None and not eviction.switch.is_on),
        )
        if eviction is not None:
            eviction.observe(step, "off" if prefetch is None else prefetch.status)
        if prefetch is not None:
            prefetch.observe(step)
            if prefetch.failure is not None:
                line = f"prefetch has stopped ({prefetch.failure}): every miss is fetched"
                if line not in self.fallbacks:
                    self.fallbacks.append(line)
        return step

    def hold(self) -> None:
        """Let prefetch and eviction by a forecast stay on, whether they pay or not: to be
        measured."""
        for part in (self.prefetch, self.eviction):
            if part is not None:
                part.switch.is_held = True

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
        for x in self._forward.chunks(ids, on_prefill):
            for rows in torch.split(x, HEAD_CHUNK):
                wanted = targets[done : done + len(rows)]
                if len(wanted) == 0:  # the last token predicts nothing that is known
                    break
                logp = self._forward.head(rows[: len(wanted)]).log_softmax(1)
                likelihoods[done : done + len(wanted)] = logp.gather(1, wanted[:, None])[:, 0]
                done += len(wanted)
        self.pool.counters()  # raises if they are worth nothing
        return likelihoods.cpu()

    def record(self, recorder: TraceRecorder | None) -> None:
        """Let `recorder` see every forward from now on, without a CUDA graph; None ends it."""
        self._forward.record(recorder)

    def replay(self, routing: ReplayedRouting | None) -> None:
        """Let `routing` choose the experts of every single token in the place of the router, which
        still runs and weighs them. To be called before the first answer: a captured CUDA graph
        keeps the choice that it was captured with."""
        self._context.replayed = routing

    def reset_pool(self) -> None:
        """Make the pool cold, and forget what was forecast for it."""
        self.pool.reset()
        if self.forecaster is not None:
            self.forecaster.reset()

    def reset_kv(self) -> None:
        """Forget the conversation."""
        self.kv.truncate(0)

    def close(self) -> None:
        """Give the pinned memory back. The engine cannot be used afterwards."""
        self.end_threads()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()

    def end_threads(self) -> None:
        """End what runs beside the caller's thread; no step may run afterwards."""
        if self.prefetch is not None:
            self.prefetch.close()

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
