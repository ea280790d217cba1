"""Engine: opens a packed model and turns token ids into a stream of steps.

Knows no tokenizer, no template and no terminal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seqmoe_cli.engine.decode_graph import Decoding, GraphSteps
from seqmoe_cli.engine.forecaster import Forecaster, predictor_for
from seqmoe_cli.engine.forward import Forward, InterruptedForward, PrefillProgress
from seqmoe_cli.engine.kv_state import KVState
from seqmoe_cli.engine.memory import HEAD_CHUNK, MemoryPlan, ModelShape, plan_memory
from seqmoe_cli.engine.record_format import expert_format
from seqmoe_cli.engine.sampler import Sampler
from seqmoe_cli.engine.stats import Step, StepStats
from seqmoe_cli.errors import PromptError
from seqmoe_cli.forecast.predictor import Predictor
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.models import build_decoder
from seqmoe_cli.residency.eviction import Eviction
from seqmoe_cli.residency.experts import PooledExperts
from seqmoe_cli.residency.pool import ExpertPool, PoolCounters, Stamps
from seqmoe_cli.residency.prefetch import DISTANCE, Prefetch
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_kernels import Routing, StepForecast
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
        policy: str = "lru",
        predictor: Predictor | None = None,
    ) -> None:
        """`eager`: also a GPU decodes operation by operation, without a CUDA graph. `verify` and
        `policy`: see `EngineOptions`. `predictor`: see `predictor_for`; without one nothing is
        foreseen."""
        self.model = model
        self.config = model.config
        self.plan = plan
        self.device = plan.device
        self.dtype = plan.dtype
        self.ctx_size = plan.ctx_size
        self.fallbacks = list(plan.fallbacks)
        self.store = store
        self.kv = KVState(self.config, plan.ctx_size, plan.dtype, plan.device)
        fmt, num_experts = expert_format(model.layout), self.config.num_experts
        stamps = Stamps(fmt.stamp, num_experts) if verify else None
        self.pool = ExpertPool(plan.num_slots, store.records, plan.device, stamps, policy)
        routing = Routing(num_experts, self.config.num_experts_per_tok, self.config.norm_topk_prob)
        experts = PooledExperts(self.pool, fmt, routing)
        decoder = build_decoder(self.config, weights)
        self.prefetch: Prefetch | None = None
        if plan.prefetch != "off":
            num_layers = self.config.num_hidden_layers
            self.prefetch = Prefetch(self.pool, num_layers, routing, plan.prefetch_by)
            experts.prefetch = self.prefetch
            decoder.look_ahead(DISTANCE, lambda: self.pool.flights is not None)
        self.forecaster: Forecaster | None = None
        self.eviction: Eviction | None = None  # by a forecast
        use_graph = plan.device.type == "cuda" and not eager
        if plan.forecasts and predictor is not None:
            self.forecaster = Forecaster(predictor, self.pool)
            expected_use = self.forecaster.expected_use
            if use_graph:
                self.forecaster.issue = GraphSteps(self.forecaster.read_one)
            if policy == "forecast":
                ghost = GhostCache.unknown(self.config.num_routed_experts, plan.device)
                self.eviction = Eviction(expected_use, ghost)
                experts.eviction = self.forecaster.eviction = self.eviction
            if self.prefetch is not None and self.prefetch.handover is not None:
                handover = self.prefetch.handover._replace(used=self.forecaster.used)
                self.prefetch.handover = handover
            if self.prefetch is not None and plan.prefetch == "full":
                self.prefetch.step_forecast = StepForecast(expected_use.likely, None)
        self._forward = Forward(decoder, self.kv, experts, self.forecaster)
        sampler = Sampler(self.config.vocab_size, plan.device)
        self._usage_before = self.pool.state.usage.clone()
        self.is_warm = False  # something was in the pool before the first answer
        self.decoding = Decoding(self._forward, sampler, self.pool, plan.device, not use_graph)

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
        plan = plan_memory(model, options)
        predictor = None
        if plan.forecasts:
            config = model.config
            stored = predictor_for(options, path, config, model.name, config.vocab_size)
            stored.check_model(model.name, model.weights_sha256)
            predictor = stored.predictor
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
            policy=options.policy,
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
        self.kv.truncate(_common_prefix(self.kv.token_ids, prompt_ids[:-1]))
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
        costs = self._costs("prefill", self.kv.length - held, before, after)
        costs = replace(costs, elapsed_s=time.perf_counter() - started)
        yield costs, taken.token if taken else None
        while taken and not stop():
            before, token = taken.counters, taken.token
            taken = self.decoding.take()
            self.kv.commit([token])
            costs = self._costs("decode", 1, before, taken.counters)
            self._observe(costs, taken.counters.since(before).gave_up > 0)
            yield replace(costs, elapsed_s=taken.elapsed_s), taken.token
        yield StepStats("decode"), None

    def _costs(
        self, phase: str, num_tokens: int, before: PoolCounters, after: PoolCounters
    ) -> StepStats:
        rests = self.prefetch is not None and not self.prefetch.is_on and phase == "decode"
        unforeseen = self.eviction is not None and not self.eviction.is_on and phase == "decode"
        spent = after.since(before)
        return StepStats.of(phase, num_tokens, spent, self.plan.record_bytes, rests, unforeseen)

    def _observe(self, costs: StepStats, gave_up: bool) -> None:
        """Let eviction and prefetch learn from a decode step, a handover having given up before its
        end or not; say so once there will be no more prefetches."""
        if self.eviction is not None:
            prefetches = self.prefetch is not None and self.prefetch.is_on
            self.eviction.observe(costs.eviction_costs, prefetches)
        if self.prefetch is None:
            return
        self.prefetch.observe(costs.prefetch_costs(self.plan.record_bytes), gave_up)
        if self.prefetch.failure is not None:
            line = f"prefetch has stopped ({self.prefetch.failure}): every miss is fetched"
            if line not in self.fallbacks:
                self.fallbacks.append(line)

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
        self._forward.replay(routing)

    def reset_pool(self) -> None:
        """Make the pool cold, and forget what was foreseen for it."""
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


def _common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for a, b in zip(held, wanted, strict=False):
        if a != b:
            break
        count += 1
    return count
