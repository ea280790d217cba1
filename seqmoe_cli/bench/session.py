"""A run of `seqmoe bench`: what shall be measured, checked before anything is loaded; its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from seqmoe_cli.bench.inventory import count_params
from seqmoe_cli.bench.machine import Machine
from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.measure import WARM, Plan, Tell, run_case
from seqmoe_cli.bench.recorded import RecordedRouting
from seqmoe_cli.bench.rows import Row, Setting, make_row, mean_rate
from seqmoe_cli.bench.source import RANDOM, Loaded, Source, opened
from seqmoe_cli.bench.traffic import bytes_read_per_token, kernels_per_token
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.memory import HOST_MARGIN_BYTES, MemoryPlan, gib, plan_memory
from seqmoe_cli.errors import PromptError, ResourceError, UsageError
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_weights.memory import available_host_bytes


@dataclass(frozen=True)
class Session:
    """Cases at several pool sizes, the largest first where it holds all experts, so that the others
    can be compared with it. Make one with `prepare`."""

    source: Source
    cases: Sequence[Case]
    pools: Sequence[tuple[PoolSize, MemoryPlan]]
    plan: Plan
    routing: RecordedRouting | None
    verify: bool
    policy: str

    @classmethod
    def prepare(
        cls,
        source: Source,
        cases: Sequence[Case],
        options: Sequence[EngineOptions],
        repetitions: int,
        warmup: bool = True,
        routing: RecordedRouting | None = None,
    ) -> Session:
        """Check everything that can be checked without weights: raises `UsageError` when the model
        has too short a context or not the trace's shape, `PromptError` for too short a text,
        `ResourceError` when a pool does not fit."""
        if routing is not None:
            routing.check_fits(source.name, source.config)
            source = source.with_top_k(routing.trace.top_k)
        _check_context(source, cases)
        _check_text(source, cases)
        _check_host_memory(source)
        ctx_size = max(case.ctx_size for case in cases)
        sized = [replace(option, ctx_size=ctx_size) for option in options]
        pools = [(option.pool, plan_memory(source, option)) for option in sized]
        most = source.config.num_routed_experts
        pools.sort(key=lambda pool: pool[1].num_slots != most)  # stable: others stay in order
        plan = Plan(source.ids, source.sampling, repetitions, warmup)
        verify, policy = options[0].verify, options[0].policy
        return cls(source, cases, pools, plan, routing, verify, policy)

    def rows(self, loaded: Loaded, tell: Tell) -> Iterator[Row]:
        """Measure pool size by pool size; rows as they come."""
        full_ts: dict[str, float] = {}  # by case, with all experts in the pool and none missing
        for pool, plan in self.pools:
            verify, policy = self.verify, self.policy
            with opened(self.source, loaded, plan, verify=verify, policy=policy) as engine:
                yield from self._rows_of_pool(engine, loaded, pool, full_ts, tell)
            del engine  # its pool must be free before the next one is made

    def _rows_of_pool(
        self,
        engine: Engine,
        loaded: Loaded,
        pool: PoolSize,
        full_ts: dict[str, float],
        tell: Tell,
    ) -> Iterator[Row]:
        replayed = None
        if self.routing is not None:
            replayed = self.routing.replayed(engine.device)
            engine.replay(replayed)
        setting = self._describe(engine, loaded, pool)
        holds_all = setting.num_slots == engine.config.num_routed_experts
        num_kernels = None
        for case in self.cases:
            for state, samples in run_case(
                engine, case, self.plan, replayed, lambda text: tell(f"pool {pool.text}, {text}")
            ):
                if holds_all and state == WARM:
                    full_ts[case.name] = mean_rate(samples)
                if case.num_gen and num_kernels is None:
                    num_kernels = kernels_per_token(engine)
                yield make_row(
                    setting,
                    case,
                    state,
                    datetime.now(UTC).isoformat(timespec="seconds"),
                    samples,
                    full_ts=full_ts.get(case.name),
                    bytes_read=self._bytes_read(engine, case),
                    num_kernels=num_kernels,
                )

    def _bytes_read(self, engine: Engine, case: Case) -> int:
        source = self.source
        return bytes_read_per_token(source.config, source.layout, engine.dtype, case.mean_context)

    def _describe(self, engine: Engine, loaded: Loaded, pool: PoolSize) -> Setting:
        """What all rows of an opened engine share."""
        source, ceilings = self.source, loaded.ceilings
        config = source.config
        kind = f"{config.family} {source.layout['gate'].dtype}"
        return Setting(
            model_filename=source.name,
            model_type=f"{kind}, random weights" if source.weights == RANDOM else kind,
            weights=source.weights,
            model_size=source.num_bytes,
            model_n_params=count_params(config).total,
            n_expert=config.num_experts,
            n_expert_used=config.num_experts_per_tok,
            trace=self.routing.name if self.routing else "",
            device=engine.device.type,
            dtype=str(engine.dtype).removeprefix("torch."),
            pool=pool.text,
            pool_bytes=engine.plan.pool_bytes,
            num_slots=engine.plan.num_slots,
            pool_share=engine.plan.num_slots / config.num_routed_experts,
            n_ctx=engine.ctx_size,
            verify=self.verify,
            policy=self.policy,
            sampling=_sampling_text(self.plan.sampling),
            prompt_source=source.text,
            copy_gb_per_s=ceilings.copy_gb_per_s if ceilings else None,
            link_gb_per_s=ceilings.link_gb_per_s if ceilings else None,
            fallbacks=engine.fallbacks,
            **asdict(Machine.inspect(engine.device.type)),
        )


def _check_context(source: Source, cases: Sequence[Case]) -> None:
    most = source.config.max_position_embeddings
    for case in cases:
        if case.ctx_size > most:
            raise UsageError(
                f"{case.name} needs a context of {case.ctx_size:,} tokens, the model has {most:,}",
                "lower -d, -p or -n",
            )


def _check_host_memory(source: Source) -> None:
    """The store comes first: without it nothing else matters."""
    needed = source.config.num_routed_experts * source.layout.record_bytes
    available = available_host_bytes()
    if needed + HOST_MARGIN_BYTES > available:
        raise ResourceError(
            f"{source.name}: all experts take {gib(needed)} of host RAM, beside a margin of "
            f"{gib(HOST_MARGIN_BYTES)}; {gib(available)} are available",
            "close other programs, or measure something smaller",
        )


def _check_text(source: Source, cases: Sequence[Case]) -> None:
    longest = max(cases, key=lambda case: case.text_tokens)
    if longest.text_tokens > len(source.ids):
        raise PromptError(
            f"{longest.name} reads {longest.text_tokens:,} tokens, {source.text} has "
            f"{len(source.ids):,}",
            "give a longer text with --prompt-file, or lower -p or -d",
        )


def _sampling_text(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    return (
        f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, "
        f"min-p {params.min_p:g}, seed {params.seed}"
    )
