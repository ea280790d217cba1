"""Forecaster: a trained predictor that runs along with the steps, and what comes of it: how often
each expert is expected to be used in the next steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from seqmoe_cli.engine.decoding import GraphSteps
from seqmoe_cli.engine.memory import MemoryPlan, plan_memory
from seqmoe_cli.engine.streams import Beside
from seqmoe_cli.errors import PackedModelError, SeqmoeError, UsageError
from seqmoe_cli.forecast.predictor import Predictor
from seqmoe_cli.forecast.predictor_step import PredictorStep
from seqmoe_cli.forecast.stored import StoredPredictor, open_predictor
from seqmoe_cli.residency.eviction import Eviction
from seqmoe_cli.residency.pool import ExpertPool
from seqmoe_cli.residency.replayed import ReplayedRouting
from seqmoe_cli.settings import EngineOptions
from seqmoe_kernels.eviction.calibration import calibrate
from seqmoe_kernels.eviction.expected_use import ExpectedUse, update_expected_use
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.packed import PackedModel

PROMPT_STEPS = 64  # of a prompt, its last ones, that the predictor looks at
_HINT = "train one for it: seqmoe train MODEL"


class Forecaster:
    """What it forecasts is `expected_use`; nothing that a model says depends on it.

    `used`, int32 [L * K], is to be filled with the experts of a single token, and `routed`, int32
    [PROMPT_STEPS, L, K], with those of the last ones of many; flat ids.
    """

    def __init__(
        self,
        predictor: Predictor,
        pool: ExpertPool,
        expected_use: ExpectedUse,
        eviction: Eviction | None,
        use_graph: bool,
    ) -> None:
        """`eviction` by this forecast is compared with one by decayed counts. `use_graph`: the
        tokens of a prompt are read by a CUDA graph."""
        device, shape = pool.slots.device, predictor.shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.expected_use = expected_use
        self._step = PredictorStep(predictor, device, dtype)
        self._pool, self._top_k, self._beside = pool, shape.top_k, Beside(device)
        self._eviction = eviction
        self.used = self._step.used
        sizes = (PROMPT_STEPS, shape.num_layers, shape.top_k)
        self.routed = torch.zeros(sizes, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(PROMPT_STEPS, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._read_next = GraphSteps(self._read_one) if use_graph else self._read_one

    def begin(self, token: Tensor, replayed: ReplayedRouting | None = None) -> None:
        """A step begins that evaluates `token`, int64 [1], or the one that `replayed` knows; `used`
        is still what the one before it used. Can be captured in a CUDA graph."""
        ghost = None if self._eviction is None else self._eviction.ghost
        step = self._pool.state, self.expected_use, ghost
        self._beside.fork(lambda: calibrate(self.used, self._top_k, *step))
        self._predict(token if replayed is None else replayed.token(token))
        self._beside.join()
        update_expected_use(self._step.expected, *step)

    def rest(self) -> None:
        """A step without a forecast: those of before are not compared with what comes after it."""
        self.expected_use.steps.zero_()

    def read(self, tokens: Tensor, replayed: ReplayedRouting | None = None) -> None:
        """Tokens of a prompt, int64 [T], have been evaluated at once, and are in `routed`. What was
        expected before is not compared with what is used after them. Those before a routing that is
        `replayed` are of another text, and left out."""
        self.rest()
        if replayed is not None:
            return
        num = min(len(tokens), PROMPT_STEPS)
        if num < len(tokens):
            self._step.reset()
        self._tokens[-num:] = tokens[-num:]
        self._place.fill_(PROMPT_STEPS - num)
        for _ in range(num):
            self._read_next()

    def _read_one(self) -> None:
        """The next token of a prompt."""
        self._predict(self._tokens.index_select(0, self._place))
        self.used.copy_(self.routed.flatten(1).index_select(0, self._place)[0])
        self._place.add_(1)

    def reset(self) -> None:
        """Nothing is known of the past."""
        self._step.reset()
        for name in ("recent", "sums", "trust", "steps"):
            getattr(self.expected_use, name).zero_()

    def trust(self) -> list[float]:
        """In the predictor, for each window, from 0 to 1 (waits for the device)."""
        return [share / 256 for share in self.expected_use.trust.tolist()]

    def _predict(self, token: Tensor) -> None:
        self._step.token = token
        self._step()


def plan_with_predictor(
    model: PackedModel, options: EngineOptions, path: Path
) -> tuple[MemoryPlan, Predictor | None]:
    """The plan of a packed model, and the predictor that runs along. One that "auto" would use, but
    that is damaged or of another model, is left out and a line of the plan's fallbacks says so;
    one that was asked for raises what `predictor_for` does."""
    has_one = model.predictor is not None or options.predictor is not None
    plan = plan_memory(model, options, has_one)
    if not plan.forecasts:
        return plan, None
    try:
        config = model.config
        stored = predictor_for(options, path, config, model.name, config.vocab_size)
        stored.check_model(model.name, model.weights_sha256)
        return plan, stored.predictor
    except SeqmoeError as error:
        if options.forecasting or options.predictor is not None:
            raise
        plan = plan_memory(model, options)
        note = f"the model's predictor is not used: {error.message}"
        return replace(plan, fallbacks=(*plan.fallbacks, note)), None


def predictor_for(
    options: EngineOptions, own: Path | None, config: ModelConfig, model: str, num_tokens: int
) -> StoredPredictor:
    """That of a file if the options name one, else the model's own: `own` is the packed model, if
    it is one. It will be told token ids below `num_tokens`. Raises `PackedModelError` when there is
    none, `SeqmoeError` for one that cannot run along with the model."""
    source = options.predictor or own
    if source is None:
        raise UsageError(
            f"{options.forecasting} needs a predictor, which random weights do not have",
            "give one with --predictor FILE",
        )
    try:
        stored = open_predictor(source, torch.device("cpu"))
    except PackedModelError as error:
        raise PackedModelError(
            f"{options.forecasting or '--predictor'} needs a predictor: {error.message}", error.hint
        ) from error
    check_predictor(stored.predictor, config, model, num_tokens)
    return stored


def check_predictor(predictor: Predictor, config: ModelConfig, model: str, num_tokens: int) -> None:
    """Raise `SeqmoeError` for a predictor that cannot run along with a model."""
    shape = predictor.shape
    trained = (shape.num_layers, shape.num_experts, shape.top_k)
    present = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    if trained != present:
        texts = ["{} layers of {} experts, {} used".format(*sizes) for sizes in (trained, present)]
        raise SeqmoeError(f"the predictor is for {texts[0]}; {model} has {texts[1]}", _HINT)
    if 0 < shape.vocab_size < num_tokens:
        raise SeqmoeError(
            f"the predictor knows {shape.vocab_size:,} tokens, {model} has {num_tokens:,}", _HINT
        )
