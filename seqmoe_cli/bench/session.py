"""A run of `seqmoe bench`: what shall be measured, checked before anything is loaded; its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from seqmoe_cli.bench.blurred import FORECAST
from seqmoe_cli.bench.inventory import count_params
from seqmoe_cli.bench.machine import Machine
from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.measure import WARM, Plan, Tell, run_case
from seqmoe_cli.bench.recorded import RecordedRouting
from seqmoe_cli.bench.rows import Row, Setting, make_row, mean_rate, mean_step_s, pool_name
from seqmoe_cli.bench.source import RANDOM, Loaded, Source, opened
from seqmoe_cli.bench.traffic import bytes_read_per_token, kernels_per_token
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.forecaster import predictor_for
from seqmoe_cli.engine.memory import HOST_MARGIN_BYTES, MemoryPlan, gib, plan_memory
from seqmoe_cli.errors import PromptError, ResourceError, SeqmoeError
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_weights.memory import available_host_bytes


@dataclass(frozen=True)
class Setup:
    """An engine as it shall be opened."""

    options: EngineOptions
    plan: MemoryPlan
    predictor: StoredPredictor | None

    @property
    def simulates(self) -> bool:
        """Whether the trace that is replayed takes the place of a predictor."""
        return self.plan.prefetch == "full" and self.predictor is None

    @property
    def key(self) -> tuple[object, ...]:
        """Those with the same one would measure the same: what was asked for may come to nothing,
        and a pool of all experts has no victims."""
        policy = self.plan.policy if self.plan.has_victims else ""
        return self.options.pool, self.plan.prefetch, policy


@dataclass
class _Known:
    """Of the rows so far, what later ones are compared with: by case, tokens per second with all
    experts in the pool and none missing; by pool, policy, case and state, the time of a step
    without prefetch."""

    full_ts: dict[str, float] = field(default_factory=dict)
    plain_step_s: dict[tuple[str, str, str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """Cases in several setups, those first whose pool holds all experts, so that the others can be
    compared with them. Make one with `prepare`."""

    source: Source
    cases: Sequence[Case]
    setups: Sequence[Setup]
    plan: Plan
    routing: RecordedRouting | None

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
        """Check everything that can be checked without weights: raises `SeqmoeError` when the
        model has too short a context or not the trace's shape, or without a predictor that is
        needed, `PromptError` for too short a text, `ResourceError` when a pool does not fit.
        """
        if routing is not None:
            routing.check_fits(source.name, source.config)
            source = source.with_top_k(routing.trace.top_k)
        _check_context(source, cases)
        _check_text(source, cases)
        _check_host_memory(source)
        ctx_size = max(case.ctx_size for case in cases)
        setups: dict[tuple[object, ...], Setup] = {}
        predictor = None  # the same for all that have one
        for option in options:
            option = replace(option, ctx_size=ctx_size)
            has_predictor = source.has_predictor or option.predictor is not None
            plan = plan_memory(source, option, has_predictor)
            if plan.forecasts and predictor is None and not _is_simulated(source, option, routing):
                predictor = _predictor(source, option, routing)
            setup = Setup(option, plan, predictor if plan.forecasts else None)
            setups.setdefault(setup.key, setup)
        if predictor is None and any(option.predictor for option in options):
            raise SeqmoeError(
                "--predictor would not be used: the pools hold all experts", "give a smaller --pool"
            )
        ordered = sorted(setups.values(), key=lambda setup: setup.plan.has_victims)
        runs = Plan(source.ids, source.sampling, repetitions, warmup)
        return cls(source, cases, ordered, runs, routing)

    @property
    def coming(self) -> dict[str, list[str]]:
        """What `markdown` wants to know before the rows come."""
        ways = [(s.options.pool.text, s.plan.policy, s.plan.prefetch) for s in self.setups]
        return {"pool": [pool_name(*way) for way in ways], "test": [c.name for c in self.cases]}

    def rows(
        self, loaded: Loaded, tell: Tell, prepare: Callable[[Engine], None] | None = None
    ) -> Iterator[Row]:
        """Measure pool size by pool size; rows as they come. `prepare` gets each engine first."""
        known = _Known()
        for setup in self.setups:
            options, stored = setup.options, setup.predictor
            with opened(
                self.source,
                loaded,
                setup.plan,
                verify=options.verify,
                predictor=None if stored is None else stored.predictor,
            ) as engine:
                if prepare is not None:
                    prepare(engine)
                yield from self._rows_of_setup(engine, loaded, setup, known, tell)
            del engine  # its pool must be free before the next one is made

    def _rows_of_setup(
        self,
        engine: Engine,
        loaded: Loaded,
        setup: Setup,
        known: _Known,
        tell: Tell,
    ) -> Iterator[Row]:
        engine.hold()  # a row shows what policy and prefetch do, not when they are turned off
        replayed = None
        if self.routing is not None:
            slots = 0 if engine.prefetch is None else engine.plan.num_slots
            replayed = self.routing.replayed(engine.device, slots, setup.simulates)
            engine.replay(replayed)
        setting = self._describe(engine, loaded, setup)
        pool, holds_all = setup.options.pool, not setup.plan.has_victims
        num_kernels = None
        for case in self.cases:
            for state, samples in run_case(
                engine, case, self.plan, replayed, lambda text: tell(f"pool {pool.text}, {text}")
            ):
                if holds_all and state == WARM:
                    known.full_ts[case.name] = mean_rate(samples)
                beside = (pool.text, setup.plan.policy, case.name, state)
                if engine.prefetch is None:
                    known.plain_step_s[beside] = mean_step_s(samples)
                if case.num_gen and num_kernels is None:
                    num_kernels = kernels_per_token(engine)
                yield make_row(
                    setting,
                    case,
                    state,
                    datetime.now(UTC).isoformat(timespec="seconds"),
                    samples,
                    full_ts=known.full_ts.get(case.name),
                    bytes_read=self._bytes_read(engine, case),
                    num_kernels=num_kernels,
                    accuracy=None if engine.prefetch is None else engine.prefetch.accuracy(),
                    plain_step_s=known.plain_step_s.get(beside),
                )

    def _look_ahead(self, engine: Engine) -> str:
        if engine.prefetch is None:
            return ""
        return "routers" if self.routing is None else "simulated"

    def _bytes_read(self, engine: Engine, case: Case) -> int:
        source = self.source
        return bytes_read_per_token(source.config, source.layout, engine.dtype, case.mean_context)

    def _describe(self, engine: Engine, loaded: Loaded, setup: Setup) -> Setting:
        """What all rows of an opened engine share."""
        source, ceilings, options = self.source, loaded.ceilings, setup.options
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
            pool=options.pool.text,
            pool_bytes=engine.plan.pool_bytes,
            num_slots=engine.plan.num_slots,
            pool_share=engine.plan.num_slots / config.num_routed_experts,
            n_ctx=engine.ctx_size,
            verify=options.verify,
            policy=engine.plan.policy,
            prefetch=engine.plan.prefetch,
            prefetch_by=engine.plan.prefetch_by if engine.prefetch else "",
            predictor=_described(setup),
            look_ahead=self._look_ahead(engine),
            sampling=_sampling_text(self.plan.sampling),
            prompt_source=source.text,
            copy_gb_per_s=ceilings.copy_gb_per_s if ceilings else None,
            link_gb_per_s=ceilings.link_gb_per_s if ceilings else None,
            fallbacks=engine.fallbacks,
            **asdict(Machine.inspect(engine.device.type)),
        )


def _is_simulated(source: Source, options: EngineOptions, routing: RecordedRouting | None) -> bool:
    """A trace over random weights, which have no predictor, foretells itself; the prefetch can live
    on that, but no policy."""
    nobody = source.folder is None and options.predictor is None
    return nobody and routing is not None and options.policy != "forecast"


def _predictor(
    source: Source, options: EngineOptions, routing: RecordedRouting | None
) -> StoredPredictor:
    """What a replayed trace wants of it is known to its `check_trace`."""
    config = source.config
    num_tokens = config.vocab_size if routing is None else 0
    stored = predictor_for(options, source.folder, config, source.name, num_tokens)
    if routing is None:
        stored.check_model(source.name, source.weights_sha256)
    else:
        stored.check_trace(routing.trace)
    return stored


def _described(setup: Setup) -> str:
    """Where the predictor of a setup comes from; empty without one."""
    if setup.simulates:
        recall, precision = FORECAST
        return (
            f"simulated from the trace: {recall:.0%} of a step's misses named before it begins, "
            f"{precision:.0%} of the names right"
        )
    if setup.predictor is None:
        return ""
    facts, file = setup.predictor.facts, setup.options.predictor
    name = "the model's own" if file is None else str(file)
    text = ", ".join(facts.get("text", ["a text not named"]))
    return f"{name}, learned from {facts.get('num_tokens', 0):,} tokens of {text}"


def _check_context(source: Source, cases: Sequence[Case]) -> None:
    most = source.config.max_position_embeddings
    for case in cases:
        if case.ctx_size > most:
            raise SeqmoeError(
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
