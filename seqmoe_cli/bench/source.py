"""Source: a model to be measured, a packed one or a shape of random weights, loaded once for all
pool sizes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from seqmoe_cli.bench.machine import Ceilings
from seqmoe_cli.bench.random_weights import random_store, random_tensors
from seqmoe_cli.bench.shapes import Shape, find_shape
from seqmoe_cli.engine.engine import Engine, LoadProgress
from seqmoe_cli.engine.memory import MemoryPlan
from seqmoe_cli.forecast.predictor import Predictor
from seqmoe_cli.settings import SamplingParams
from seqmoe_cli.text.sampling import SamplingSettings, checkpoint_settings
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.layout import RecordLayout
from seqmoe_weights.packed import PackedModel
from seqmoe_weights.store import HostStore

_SEED = {"seed": 0}


@dataclass
class Loaded:
    """The weights of a source: experts in host memory, resident tensors on `device`."""

    store: HostStore
    tensors: dict[str, torch.Tensor]
    device: torch.device

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """What the machine's memory and link can do; None on a CPU, which has neither."""
        if self.device.type != "cuda":
            return None
        return Ceilings.measure(self.store.records, self.device)


@dataclass(frozen=True)
class Source:
    """What is measured, before it is in memory: a packed model, or a shape for random weights.
    `config` is its own, but for what a replayed trace changes; `ids` is the text that cases read,
    `text` the name that rows give it."""

    model: PackedModel | Shape
    config: ModelConfig
    ids: Sequence[int]
    text: str
    sampling: SamplingParams

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        return self.model.layouts

    @property
    def packed(self) -> PackedModel | None:
        """The model, if it is one."""
        return self.model if isinstance(self.model, PackedModel) else None

    def with_top_k(self, top_k: int) -> Source:
        """The same model, but a token uses `top_k` experts of each layer."""
        return replace(self, config=replace(self.config, num_experts_per_tok=top_k))

    @contextmanager
    def loaded(self, plan: MemoryPlan, progress: LoadProgress | None = None) -> Iterator[Loaded]:
        """Load all weights where `plan`, which may be of any pool size, wants them."""
        pin = plan.device.type == "cuda"
        model = self.model

        experts, others = (
            partial(progress, stage) if progress else None for stage in ("experts", "weights")
        )
        if isinstance(model, PackedModel):
            store = HostStore.load(model, pin, experts)
        else:
            store = random_store(model, pin, experts)
        try:
            if isinstance(model, PackedModel):
                tensors = model.load_resident(plan.device, plan.dtype, others)
            else:
                tensors = random_tensors(model, plan.dtype, plan.device, others)
            yield Loaded(store, tensors, plan.device)
        finally:
            if pin:
                torch.cuda.synchronize(plan.device)
            store.close()


def packed_source(folder: Path, text: str, text_name: str) -> Source:
    """A packed model, with its own tokenizer and sampling settings and a fixed seed."""
    model = PackedModel.open(folder)
    sampling = SamplingSettings(_SEED, checkpoint_settings(folder)).params
    return Source(model, model.config, Tokenizer.open(folder).encode(text), text_name, sampling)


def random_source(shape_name: str) -> Source:
    """A shape of `SHAPES`, filled with random weights; its text is random token ids."""
    shape = find_shape(shape_name)
    config = shape.config
    generator = torch.Generator().manual_seed(0)
    count = (config.max_position_embeddings,)
    ids = torch.randint(config.vocab_size, count, generator=generator).tolist()
    return Source(shape, config, ids, "random token ids", SamplingSettings(_SEED, {}).params)


@contextmanager
def opened(
    source: Source,
    loaded: Loaded,
    plan: MemoryPlan,
    *,
    eager: bool = False,
    verify: bool = False,
    predictor: Predictor | None = None,
) -> Iterator[Engine]:
    """An engine over weights that are already there, and stay when it goes."""
    gc.collect()  # the pool of the engine before this one, whose parts refer to each other
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(
        source,
        loaded.store,
        plan,
        loaded.tensors,
        eager=eager,
        verify=verify,
        predictor=predictor,
    )
    try:
        yield engine
    finally:
        engine.end_threads()
        if loaded.device.type == "cuda":
            torch.cuda.synchronize(loaded.device)  # nothing may run when the engine goes
