"""A run of `seqmoe bench`: what shall be measured, checked before anything is loaded; its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from seqmoe_cli.bench.inventory import bytes_read_per_token, count_params
from seqmoe_cli.bench.machine import machine_facts
from seqmoe_cli.bench.matrix import Case
from seqmoe_cli.bench.measure import WARM, Runs, Tell, kernels_per_token
from seqmoe_cli.bench.recorded import FORECAST, RecordedRouting
from seqmoe_cli.bench.rows import Measured, pool_name
from seqmoe_cli.bench.source import Loaded, Source, opened
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.forecaster import predictor_for
from seqmoe_cli.engine.memory import HOST_MARGIN_BYTES, MemoryPlan, plan_memory
from seqmoe_cli.errors import PromptError, ResourceError, SeqmoeError
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_cli.terminal.table import Row
from seqmoe_weights.files import readable_size
from seqmoe_weights.layout import format_text
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
class _Beside:
    """What later rows are compared with: by case, tokens per second with all experts in the pool
    and none missing; by pool, policy, case and state, the time of a step without prefetch."""

    full_ts: dict[str, float] = field(default_factory=dict)
    plain_step_s: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    def row(self, done: Measured, setting: Row, setup: Setup) -> dict[str, Any]:
        name = done.case.name
        way = (setup.options.pool.text, setup.plan.policy, name, done.state)
        if not setup.plan.has_victims and done.state == WARM:
            self.full_ts[name] = done.mean_rate
        if done.accuracy is None:
            self.plain_step_s[way] = done.mean_step_s
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return done.row(setting, now, self.full_ts.get(name), self.plain_step_s.get(way))


@dataclass(frozen=True)
class Session:
    """Cases in several setups, those first whose pool holds all experts, so that the others can be
    compared with them. Make one with `prepare`."""

    source: Source
    cases: Sequence[Case]
    setups: Sequence[Setup]
    repetitions: int
    warmup: bool
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
            has_predictor = option.predictor is not None or (
                source.packed is not None and source.packed.predictor is not None
            )
            plan = plan_memory(source, option, has_predictor)
            if plan.forecasts and predictor is None and not _is_simulated(source, option, routing):
                predictor = _predictor(source, option, routing)
            setup = Setup(option, plan, predictor if plan.forecasts else None)
            setups.setdefault(setup.key, setup)
        given = next((option.predictor for option in options if option.predictor), None)
        if given is not None and predictor is None:
            raise SeqmoeError(
                f"--predictor {given} would not be used",
                "add --policy forecast or --prefetch full, and give a --pool of less than all",
            )
        ordered = sorted(setups.values(), key=lambda setup: setup.plan.has_victims)
        return cls(source, cases, ordered, repetitions, warmup, routing)

    @property
    def known(self) -> dict[str, list[str]]:
        """What is known of the table before the rows come, see `markdown`."""
        ways = [(s.options.pool.text, s.plan.policy, s.plan.prefetch) for s in self.setups]
        return {"pool": [pool_name(*way) for way in ways], "test": [c.name for c in self.cases]}

    def rows(
        self, loaded: Loaded, tell: Tell, prepare: Callable[[Engine], None] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Measure pool size by pool size; rows as they come. `prepare` gets each engine first."""
        beside = _Beside()
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
                replayed = self._make_ready(engine, setup)
                setting = self._describe(engine, loaded, setup)
                for done in self._measure(engine, replayed, setup, tell):
                    yield beside.row(done, setting, setup)
            del engine  # its pool must be free before the next one is made

    def _make_ready(self, engine: Engine, setup: Setup) -> ReplayedRouting | None:
        """Rows show what prefetch and a policy do, not when they are turned off."""
        engine.hold()
        if self.routing is None:
            return None
        slots = 0 if engine.prefetch is None else engine.plan.num_slots
        replayed = self.routing.replayed(engine.device, slots, setup.simulates)
        engine.replay(replayed)
        return replayed

    def _measure(
        self, engine: Engine, replayed: ReplayedRouting | None, setup: Setup, tell: Tell
    ) -> Iterator[Measured]:
        source, num_kernels, pool = self.source, None, setup.options.pool.text
        runs = Runs(
            engine, source.ids, source.sampling, self.repetitions, self.warmup, replayed
        )  # fmt: skip
        for case in self.cases:
            for state, samples in runs.samples(case, lambda text: tell(f"pool {pool}, {text}")):
                if case.num_gen and num_kernels is None:
                    num_kernels = kernels_per_token(engine)
                bytes_read = bytes_read_per_token(
                    source.config, source.layouts, engine.dtype, case.mean_context
                )
                accuracy = None if engine.prefetch is None else engine.prefetch.accuracy()
                yield Measured(case, state, samples, bytes_read, num_kernels, accuracy)

    def _describe(self, engine: Engine, loaded: Loaded, setup: Setup) -> dict[str, Any]:
        """What all rows of an opened engine share."""
        source, ceilings, options = self.source, loaded.ceilings, setup.options
        config, plan = source.config, engine.plan
        kind, packed = f"{config.family} {format_text(source.layouts)}", source.packed
        look_ahead = "routers" if self.routing is None else "simulated"
        return {
            "model_filename": source.name,
            "model_type": kind if packed else f"{kind}, random weights",
            "weights": "packed" if packed else "random",
            "model_size": source.model.num_bytes,
            "model_n_params": count_params(config).total,
            "n_expert": config.num_experts,
            "n_expert_used": config.num_experts_per_tok,
            "trace": self.routing.name if self.routing else "",
            "device": engine.device.type,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "pool": options.pool.text,
            "pool_bytes": plan.pool_bytes,
            "num_slots": plan.num_slots,
            "pool_share": plan.num_slots / config.num_routed_experts,
            "n_ctx": engine.ctx_size,
            "verify": options.verify,
            "policy": plan.policy,
            "prefetch": plan.prefetch,
            "prefetch_by": plan.prefetch_by if engine.prefetch else "",
            "look_ahead": look_ahead if engine.prefetch else "",
            "predictor": _described(setup),
            "sampling": _sampling_text(source.sampling),
            "prompt_source": source.text,
            **machine_facts(engine.device.type),
            "copy_gb_per_s": ceilings.copy_gb_per_s if ceilings else None,
            "link_gb_per_s": ceilings.link_gb_per_s if ceilings else None,
            "fallbacks": engine.fallbacks,
        }


def _is_simulated(source: Source, options: EngineOptions, routing: RecordedRouting | None) -> bool:
    """A trace over random weights, which have no predictor, can tell its own future; that is enough
    for prefetch, but not for a policy."""
    has_none = source.packed is None and options.predictor is None
    return has_none and routing is not None and options.policy != "forecast"


def _predictor(
    source: Source, options: EngineOptions, routing: RecordedRouting | None
) -> StoredPredictor:
    """What a replayed trace wants of it is known to its `check_trace`."""
    config, packed = source.config, source.packed
    own = packed.path if packed else None
    num_tokens = config.vocab_size if routing is None else 0
    stored = predictor_for(options, own, config, source.name, num_tokens)
    if routing is None:
        stored.check_model(source.name, packed.weights_sha256 if packed else None)
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
    needed = source.config.num_routed_experts * source.layouts[0].record_bytes
    available = available_host_bytes()
    if needed + HOST_MARGIN_BYTES > available:
        raise ResourceError(
            f"{source.name}: all experts take {readable_size(needed)} of host RAM, beside a margin "
            f"of {readable_size(HOST_MARGIN_BYTES)}; {readable_size(available)} are available",
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
