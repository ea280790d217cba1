"""A predictor runs along: no bit changes, whatever it says; victims are those of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.engine.stats import TurnStats
from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.predictor import WINDOWS, Predictor, PredictorShape
from seqmoe_cli.forecast.stored import StoredPredictor
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.residency import prefetch as prefetch_module
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.residency.stats import StepStats
from seqmoe_cli.residency.switch import EvictionVerdict, Switch
from seqmoe_cli.settings import PREFETCHES, EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels import Request, state
from seqmoe_kernels.eviction.expected_use import SPAN
from seqmoe_kernels.eviction.units import ONE
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import packed_model
from tests.engine.troubled_copies import Troubled, deadly, late, lost
from tools.simulator.forecast_eviction import Blend, ForecastEviction
from tools.simulator.replay import replay

SAMPLING = SamplingParams(temperature=1.0, seed=5)
PROMPT = [i * 7 % 200 for i in range(90)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS, EXPERTS, TOP_K = 6, 12, 2
SHAPE = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS}


def attach(packed: Path, kind: str) -> None:
    vocab_size = PackedModel.open(packed).config.vocab_size
    StoredPredictor(predictor_of(vocab_size, kind), {}).attach(packed)


def predictor_of(vocab_size: int, kind: str, top_k: int = TOP_K) -> Predictor:
    """Random; or one that is sure of what it says: that all are used, or none."""
    torch.manual_seed(2)
    shape = PredictorShape(LAYERS, EXPERTS, top_k, vocab_size, token_rank=8, width=32)
    predictor = Predictor(shape)
    for weight in predictor.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    if kind != "random":
        torch.nn.init.constant_(predictor.base, 1e4 if kind == "all" else -1e4)
    return predictor.eval()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("forecaster") / "model", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_engine(
    packed: Path,
    device: str,
    policy: str,
    prefetch: str = "off",
    pool: str = "30%",
    by: str = "auto",
) -> Engine:
    options = EngineOptions(
        PoolSize.parse(pool),
        device,
        "float32",
        400,
        verify=True,
        policy=policy,
        prefetch=prefetch,
        prefetch_by=by,
    )
    return Engine.open(packed, options)


def say(engine: Engine, length: int = 12) -> tuple[list[int | None], TurnStats]:
    """Two turns of one conversation, the pool's state as it is."""
    engine.reset_kv()
    stats, tokens = TurnStats(), list[int | None]()
    for prompt in (PROMPT, [*PROMPT, 5, 6, 7], PROMPT[:1]):
        for step in engine.generate(prompt, SAMPLING, max_tokens=length):
            tokens.append(step.token_id)
            stats.add(step)
    return tokens, stats


@pytest.fixture(scope="module")
def plain(packed: Path, device: str) -> list[int | None]:
    engine = open_engine(packed, device, "lru", pool="all")
    assert engine.forecaster is None
    tokens, _ = say(engine)
    engine.close()
    return tokens


@pytest.mark.parametrize("prefetch", PREFETCHES[1:])
@pytest.mark.parametrize("policy", ["decayed", "forecast"])
@pytest.mark.parametrize("kind", ["random", "all", "none"])
def test_the_same_tokens_whatever_is_foreseen(
    packed: Path, device: str, plain: list[int | None], kind: str, policy: str, prefetch: str
) -> None:
    attach(packed, kind)
    engine = open_engine(packed, device, policy, prefetch)
    assert (engine.forecaster is None) == (policy == "decayed" and prefetch != "full")
    for _ in range(2):
        assert say(engine)[0] == plain
        engine.reset_pool()
    engine.close()


@pytest.mark.parametrize("trouble", [late, lost, deadly])
@pytest.mark.parametrize("kind", ["random", "all"])
def test_the_same_tokens_whatever_the_thread_does(
    packed: Path,
    device: str,
    plain: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Troubled, Request], bool],
    kind: str,
) -> None:
    """Delayed, lost or dead, with everything on that asks for copies."""
    copier = type("Copier", (Troubled,), {"trouble": trouble})
    monkeypatch.setattr(prefetch_module, "HostCopier", copier)
    monkeypatch.setattr(prefetch_module, "DmaCopier", copier)
    attach(packed, kind)
    engine = open_engine(packed, device, "forecast", "full", by="thread")
    tokens, _ = say(engine)
    assert tokens == plain and engine.pool.counters()[state.PREFETCHES] > 0
    assert bool(engine.fallbacks) == (trouble is deadly)
    engine.close()


class Alternating(Switch[EvictionVerdict]):
    """Changes its mind every five steps."""

    seen = 0

    def observe(self, step: StepStats, regime: str = "on") -> bool:
        self.seen += 1
        self.is_on = self.seen % 10 < 5
        return self.is_on


@pytest.mark.parametrize("prefetch", PREFETCHES[1:])
@pytest.mark.parametrize("kind", ["random", "all"])
def test_the_same_tokens_with_a_forecast_now_and_then(
    packed: Path, device: str, plain: list[int | None], kind: str, prefetch: str
) -> None:
    """Off in the middle of answers and on again: the tokens remain, what is compared goes on, and
    at rest the predictor is told nothing unless a prefetch lives on it."""
    attach(packed, kind)
    engine = open_engine(packed, device, "forecast", prefetch)
    eviction, forecaster = engine.eviction, engine.forecaster
    assert eviction is not None and forecaster is not None
    eviction.switch = Alternating(EvictionVerdict)
    compared = 0
    for _ in range(2):
        tokens, stats = say(engine)
        assert tokens == plain
        assert 0 < stats.decode.eviction_rested_tokens < stats.decode.num_tokens
        counters = engine.pool.counters()
        missed = counters[state.MISSED_BY_COUNTS], counters[state.MISSED_BY_FORECAST]
        assert min(missed) > compared
        compared = max(missed)
    eviction.switch = Switch(EvictionVerdict)
    engine.hold()
    assert say(engine)[1].decode.eviction_rested_tokens == 0
    engine.close()
    engine = open_engine(packed, device, "forecast", prefetch)
    assert engine.eviction is not None and engine.forecaster is not None
    engine.eviction.switch.is_on = False
    engine.eviction.switch.rests, engine.eviction.switch._left = True, 10**6
    if engine.prefetch is not None:
        engine.prefetch.switch.is_held = True
    tokens, stats = say(engine)
    assert tokens == plain and engine.eviction.status == "resting"
    assert stats.decode.eviction_saved_misses is None
    assert bool(engine.forecaster.expected_use.steps[1]) == (prefetch == "full")
    engine.close()


def test_at_rest_victims_are_those_of_decayed_counts(packed: Path, device: str) -> None:
    attach(packed, "random")
    missed = []
    for policy in ("decayed", "forecast"):
        engine = open_engine(packed, device, policy)
        if engine.eviction is not None:
            engine.eviction.switch.is_on = False
            engine.eviction.switch.rests, engine.eviction.switch._left = True, 10**6
        steps = list(engine.generate(PROMPT, SAMPLING, max_tokens=60))
        missed.append([step.stats.misses for step in steps])
        engine.close()
    assert missed[0] == missed[1] and sum(missed[0]) > 60


def recorded(seed: int, steps: int) -> np.ndarray:
    """Ids [steps, L, K] with as much locality as a pool needs."""
    rng = np.random.default_rng(seed)
    ids = rng.random((steps, LAYERS, EXPERTS)).argsort(2)[..., :TOP_K]
    for step in range(1, steps):
        again = rng.random(LAYERS) < 0.4
        ids[step, again] = ids[step - 1, again]
    return ids


@pytest.mark.parametrize("kind", ["random", "none"])
def test_victims_are_those_of_the_simulator(
    packed: Path, device: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Told the same forecasts, both miss as often in every step; another policy does not."""
    steps = 60
    ids = recorded(1, steps)
    trace = Trace(
        "x", "qwen3_moe", EXPERTS, ids.astype(np.uint8), np.zeros(steps, np.uint32),
        np.ones(steps, np.uint8), np.arange(steps, dtype=np.uint32),
    )  # fmt: skip
    attach(packed, kind)
    missed, made, size = {}, [], PoolSize.parse("30%")
    compared = StepStats("decode")
    for policy in ("decayed", "forecast"):
        engine = Engine.open(
            packed,
            EngineOptions(size, device, "float32", 400, policy=policy, prefetch="off"),
            eager=True,
        )
        engine.replay(
            ReplayedRouting(torch.from_numpy(ids), engine.device, tokens=torch.arange(steps))
        )
        if engine.forecaster is not None:
            made = told(engine, monkeypatch)
            assert engine.eviction is not None
            engine.hold()
        stats = list(engine.generate([1], SAMPLING, max_tokens=steps))
        missed[policy] = [step.stats.misses for step in stats]
        compared = sum((step.stats for step in stats), StepStats("decode"))
        num_slots = engine.plan.num_slots
        engine.close()
    assert len(made) == steps and made[5].shape == (len(WINDOWS), LAYERS * EXPERTS)
    assert (made[7].max() > ONE // 2) == (kind == "random")
    blend = Blend(LAYERS * EXPERTS, lambda step: made[step])
    done = replay(trace, num_slots, lambda *_: ForecastEviction(LAYERS, blend), blend=blend)
    assert missed["forecast"] == done.loads.sum(1).tolist()
    assert missed["forecast"] != missed["decayed"]
    assert compared.missed_by_forecast == sum(missed["forecast"][:-1])
    assert compared.missed_by_counts == pytest.approx(sum(missed["decayed"][:-1]), rel=0.03)


@pytest.mark.gpu
def test_a_graph_foresees_what_single_steps_do(packed: Path) -> None:
    """The same misses and the same forecasts, run after run."""
    attach(packed, "random")
    size = PoolSize.parse("30%")
    options = EngineOptions(size, "cuda", "float32", 400, policy="forecast", prefetch="off")
    found = []
    for eager in (True, False):
        engine = Engine.open(packed, options, eager=eager)
        assert engine.forecaster is not None and engine.eviction is not None
        engine.hold()
        for _ in range(2):
            engine.reset_kv()
            engine.reset_pool()
            steps = list(engine.generate(PROMPT, SAMPLING, max_tokens=40))
            torch.cuda.synchronize()
            found.append([step.stats.misses for step in steps])
        engine.close()
    assert found[0] == found[1] == found[2] == found[3]


def told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the engine was told at the beginning of each step, as it goes on."""
    forecaster, made = engine.forecaster, list[np.ndarray]()
    assert forecaster is not None
    begin = forecaster.begin

    def watched(token: torch.Tensor, replayed: ReplayedRouting | None = None) -> None:
        begin(token, replayed)
        place = int(forecaster.expected_use.steps[0]) % SPAN
        made.append(forecaster.expected_use.made[place].cpu().numpy().copy())

    monkeypatch.setattr(forecaster, "begin", watched)
    return made


def test_a_prompt_at_once_is_read_token_by_token(packed: Path) -> None:
    """What is expected after it does not depend on how the prompt was evaluated."""
    attach(packed, "random")
    found = []
    for pieces in ([PROMPT[:30]], [PROMPT[:20], PROMPT[20:30]], [[t] for t in PROMPT[:30]]):
        engine = open_engine(packed, "cpu", "forecast", pool="60%")
        assert engine.forecaster is not None
        held: list[int] = []
        with torch.inference_mode():
            for piece in pieces:
                list(engine._forward.chunks(piece))
                held += piece
            engine.forecaster.begin(torch.tensor([3]))
        found.append(engine.forecaster._step.expected.clone())
        engine.close()
    for expected in found[1:]:
        torch.testing.assert_close(expected, found[0])


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"top_k": 3}, "the predictor is for 6 layers of 12 experts, 3 used; packed has"),
        ({"vocab_size": 20}, "the predictor knows 20 tokens, packed has"),
    ],
)
def test_a_predictor_of_another_model(
    tmp_path: Path, packed: Path, changes: dict[str, int], words: str
) -> None:
    predictor = predictor_of(**({"vocab_size": 10**4, "kind": "random"} | changes))  # type: ignore[arg-type]
    file = tmp_path / "p"
    StoredPredictor(predictor, {}).save(file)
    options = EngineOptions(PoolSize.parse("30%"), "cpu", policy="forecast", predictor=file)
    with pytest.raises(SeqmoeError, match=words):
        Engine.open(packed, options)


@pytest.mark.parametrize(
    "flags", [{"policy": "forecast"}, {"policy": "decayed", "prefetch": "full"}]
)
def test_without_a_predictor(tmp_path: Path, flags: dict[str, str]) -> None:
    bare = packed_model(tmp_path / "bare", "olmoe", **SHAPE)
    flag = "--policy forecast" if flags["policy"] == "forecast" else "--prefetch full"
    with pytest.raises(
        SeqmoeError, match=f"{flag} needs a predictor: .*bare/packed has no"
    ) as found:
        Engine.open(bare, EngineOptions(PoolSize.parse("30%"), "cpu", **flags))
    assert found.value.hint == "make one with: seqmoe train MODEL"
    engine = Engine.open(bare, EngineOptions(PoolSize.parse("all"), "cpu", **flags))
    assert engine.forecaster is None  # there is nothing to decide
    engine.close()
