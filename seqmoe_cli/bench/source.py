"""Source: a model to be measured, a packed one or a shape of random weights, loaded once for all
pool sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from seqmoe_cli.bench.ceilings import Ceilings
from seqmoe_cli.bench.random_weights import random_store, random_tensors
from seqmoe_cli.bench.shapes import find_shape
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

RANDOM, PACKED = "random", "packed"
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
    """What is measured, before it is in memory. `weights` is RANDOM or PACKED, `num_bytes` the size
    of all weights; `ids` is the text that cases read, `text` the name that rows give it."""

    name: str
    weights: str
    config: ModelConfig
    layout: RecordLayout
    num_bytes: int
    ids: Sequence[int]
    text: str
    sampling: SamplingParams
    folder: Path | None  # of a packed model
    weights_sha256: str | None  # of a packed model
    has_predictor: bool
    load_store: Callable[[bool, Callable[[int, int], None]], HostStore]
    load_tensors: Callable[
        [torch.device, torch.dtype, Callable[[int, int], None]], dict[str, torch.Tensor]
    ]

    def with_top_k(self, top_k: int) -> Source:
        """The same model, but a token uses `top_k` experts of each layer."""
        return replace(self, config=replace(self.config, num_experts_per_tok=top_k))

    @contextmanager
    def loaded(self, plan: MemoryPlan, progress: LoadProgress | None = None) -> Iterator[Loaded]:
        """Load all weights where `plan`, which may be of any pool size, wants them."""
        tell = progress or (lambda stage, done, total: None)
        pin = plan.device.type == "cuda"
        store = self.load_store(pin, lambda done, total: tell("experts", done, total))
        try:
            tensors = self.load_tensors(
                plan.device, plan.dtype, lambda done, total: tell("weights", done, total)
            )
            yield Loaded(store, tensors, plan.device)
        finally:
            if pin:
                torch.cuda.synchronize(plan.device)
            store.close()


def packed_source(folder: Path, text: str, text_name: str) -> Source:
    """A packed model, with its own tokenizer and sampling settings and a fixed seed."""
    model = PackedModel.open(folder)
    return Source(
        name=model.name,
        weights=PACKED,
        config=model.config,
        layout=model.layout,
        num_bytes=model.resident_bytes + model.records_bytes,
        ids=Tokenizer.open(folder).encode(text),
        text=text_name,
        sampling=SamplingSettings(_SEED, checkpoint_settings(folder)).params,
        folder=folder,
        weights_sha256=model.weights_sha256,
        has_predictor=model.predictor is not None,
        load_store=lambda pin, progress: HostStore.load(model, pin, progress),
        load_tensors=model.load_resident,
    )


def random_source(shape_name: str) -> Source:
    """A shape of `SHAPES`, filled with random weights; its text is random token ids."""
    shape = find_shape(shape_name)
    config = shape.config
    generator = torch.Generator().manual_seed(0)
    count = (config.max_position_embeddings,)
    return Source(
        name=shape.name,
        weights=RANDOM,
        config=config,
        layout=shape.layout,
        num_bytes=shape.num_bytes,
        ids=torch.randint(config.vocab_size, count, generator=generator).tolist(),
        text="random token ids",
        sampling=SamplingSettings(_SEED, {}).params,
        folder=None,
        weights_sha256=None,
        has_predictor=False,
        load_store=lambda pin, progress: random_store(shape, pin, progress),
        load_tensors=lambda device, dtype, progress: random_tensors(shape, dtype, device, progress),
    )


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
