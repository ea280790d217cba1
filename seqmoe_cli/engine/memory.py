"""The memory plan: resident weights, KV state and workspace first, the pool gets the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from seqmoe_cli.engine.device import choose_placement, free_device_bytes
from seqmoe_cli.engine.look_ahead import look_ahead_bytes
from seqmoe_cli.errors import ResourceError, UsageError
from seqmoe_cli.forecast.predictor import MAX_BYTES
from seqmoe_cli.residency.prefetch import DISTANCE, least_slots
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import find_family, held_bytes
from seqmoe_weights.files import readable_size
from seqmoe_weights.layout import RecordLayout
from seqmoe_weights.memory import available_host_bytes

GIB = 2**30
MARGIN_BYTES = GIB // 2  # left free on the device for the driver and the desktop
HOST_MARGIN_BYTES = GIB  # left free in RAM
PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}  # tokens; a bigger chunk reads every expert less often
HEAD_CHUNK = 256  # tokens whose logits are held at once
PROSPECT_BYTES = 256  # of each expert, for what is expected of it


class ModelShape(Protocol):
    """What a plan needs to know of a model: no weights."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def layouts(self) -> tuple[RecordLayout, ...]: ...  # by layer; all of one size


@dataclass(frozen=True)
class PlanLine:
    """One line of the plan: what takes how much, and why that much."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory in bytes (on a CPU: host memory), beside `records_bytes` of host memory.
    `policy` and `prefetch`: what becomes of those of `EngineOptions`, never "auto"; `prefetch_by`
    "gpu" or "thread"; `forecasts`: a predictor runs along. What they need is in
    `workspace_bytes`."""

    device: torch.device
    dtype: torch.dtype
    ctx_size: int
    num_slots: int
    record_bytes: int
    resident_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int
    records_bytes: int
    pool_reason: str
    budget_reason: str
    fallbacks: tuple[str, ...]
    policy: str = "lru"
    prefetch: str = "off"
    prefetch_by: str = "thread"
    forecasts: bool = False

    @property
    def has_victims(self) -> bool:
        """Whether an expert may have to leave the pool for another one."""
        return self.num_slots * self.record_bytes < self.records_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_slots * self.record_bytes

    @property
    def lines(self) -> list[PlanLine]:
        """The plan as people read it."""
        place = "host memory" if self.device.type == "cpu" else "device memory"
        return [
            PlanLine("resident", self.resident_bytes, "attention, norms, router, embedding, head"),
            PlanLine("kv state", self.kv_bytes, f"{self.ctx_size:,} tokens of context (-c)"),
            PlanLine("workspace", self.workspace_bytes, "one prefill chunk and its logits"),
            PlanLine("pool", self.pool_bytes, self.pool_reason),
            PlanLine("budget", self.budget_bytes, f"{place}: {self.budget_reason}"),
            PlanLine("store", self.records_bytes, "host memory: all expert records"),
        ]


def plan_memory(
    model: ModelShape, options: EngineOptions, has_predictor: bool = False
) -> MemoryPlan:
    """Divide the memory; raises `ResourceError` with the numbers and the flag to change when the
    model does not fit or `--pool` is below the largest demand of one layer. `has_predictor`: there
    is a trained one, which "auto" may use."""
    device, dtype, fallbacks = choose_placement(options)
    policy, prefetch = resolve_auto(options, device, has_predictor)
    ctx_size, max_ctx = options.ctx_size, model.config.max_position_embeddings
    if ctx_size > max_ctx:
        if ctx_size != EngineOptions.ctx_size:
            fallbacks.append(f"-c {ctx_size} is more than the model's {max_ctx}: using {max_ctx}")
        ctx_size = max_ctx
    records = model.config.num_routed_experts * model.layouts[0].record_bytes
    resident = _resident_bytes(model.config, dtype)
    kv = _kv_bytes(model, ctx_size, dtype)
    workspace = _workspace_bytes(model, ctx_size, dtype, device)
    forecasts = policy == "forecast" or prefetch == "full"
    extra = _forecast_bytes(model.config, prefetch, forecasts, dtype)
    budget, budget_reason = _budget(records, options, device)
    num_slots, pool_reason = _num_slots(
        model, options.pool, budget - resident - kv - workspace - extra
    )
    least = least_slots(model.config.num_experts_per_tok)
    if num_slots >= model.config.num_routed_experts:  # nothing to be decided
        prefetch, policy = "off", "lru" if options.policy == "auto" else policy
        forecasts = False
    elif prefetch != "off" and num_slots < least:
        if options.prefetch != "auto":
            short = f"--prefetch {prefetch} needs a pool of {least} slots, not {num_slots}"
            fallbacks.append(f"{short}: prefetch is off")
        prefetch, forecasts = "off", policy == "forecast"
    elif prefetch == "off" and options.prefetch_by != "auto":
        by = f"--prefetch-by {options.prefetch_by}"
        fallbacks.append(f"{by} does nothing: nothing is prefetched (--prefetch lookahead does)")
    plan = MemoryPlan(
        device=device,
        dtype=dtype,
        ctx_size=ctx_size,
        num_slots=num_slots,
        record_bytes=model.layouts[0].record_bytes,
        resident_bytes=resident,
        kv_bytes=kv,
        workspace_bytes=workspace + _forecast_bytes(model.config, prefetch, forecasts, dtype),
        budget_bytes=budget,
        records_bytes=records,
        pool_reason=pool_reason,
        budget_reason=budget_reason,
        fallbacks=tuple(fallbacks),
        policy=policy,
        prefetch=prefetch,
        prefetch_by=_prefetch_by(options.prefetch_by, device),
        forecasts=forecasts,
    )
    _check_fits(plan)
    return plan


def resolve_auto(
    options: EngineOptions, device: torch.device, has_predictor: bool
) -> tuple[str, str]:
    """Policy and prefetch for a pool of less than all experts, "auto" resolved. A forecast for
    prefetches needs a policy that knows counts to compare with."""
    policy, prefetch, on_gpu = options.policy, options.prefetch, device.type == "cuda"
    if policy == "auto":
        counts = "decayed" if on_gpu or prefetch == "full" else "lru"
        policy = "forecast" if on_gpu and has_predictor else counts
    if prefetch == "auto":
        level = "full" if has_predictor and policy != "lru" else "lookahead"
        prefetch = level if on_gpu else "off"
    return policy, prefetch


def _prefetch_by(wanted: str, device: torch.device) -> str:
    if wanted == "gpu" and device.type != "cuda":
        raise UsageError("--prefetch-by gpu: this is a CPU", "leave it out, or write thread")
    if wanted == "auto":
        return "gpu" if device.type == "cuda" else "thread"
    return wanted


def _forecast_bytes(config: ModelConfig, prefetch: str, forecasts: bool, dtype: torch.dtype) -> int:
    """Of the routers that look ahead, and of a predictor with what comes of it."""
    routers = look_ahead_bytes(config, DISTANCE, dtype) if prefetch != "off" else 0
    return routers + forecasts * (MAX_BYTES + PROSPECT_BYTES * config.num_routed_experts)


def _resident_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """FP8 linears keep their bits and have F32 scales; everything else is held in `dtype`."""
    specs = find_family(config.family).resident_tensors(config)
    return sum(held_bytes(spec, config, dtype.itemsize) for spec in specs)


def _kv_bytes(model: ModelShape, ctx_size: int, dtype: torch.dtype) -> int:
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * ctx_size * dtype.itemsize


def _workspace_bytes(
    model: ModelShape, ctx_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """An upper bound of what a forward of one prefill chunk holds at once beside the state."""
    config = model.config
    tokens = min(PREFILL_CHUNK[device.type], ctx_size)
    width = config.num_attention_heads * config.head_dim
    activations = tokens * (6 * config.hidden_size + 4 * width) * dtype.itemsize
    pairs = 2 * tokens * config.num_experts_per_tok * config.hidden_size * 4
    scores = tokens * ctx_size * (1 + 4 * config.num_attention_heads * (device.type == "cpu"))
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 4
    logits = 3 * min(HEAD_CHUNK, tokens) * config.vocab_size * 4
    return activations + pairs + scores + expert + logits


def _budget(records: int, options: EngineOptions, device: torch.device) -> tuple[int, str]:
    if options.vram_gib is not None:
        return int(options.vram_gib * GIB), f"--vram {options.vram_gib:g}"
    if device.type == "cuda":
        free = free_device_bytes(device)
        margin = readable_size(MARGIN_BYTES)
        return max(0, free - MARGIN_BYTES), f"{readable_size(free)} free, {margin} left alone"
    free = available_host_bytes()
    rest = free - records - HOST_MARGIN_BYTES
    margin = readable_size(HOST_MARGIN_BYTES)
    return max(0, rest), f"{readable_size(free)} available, less the store and {margin}"


def _num_slots(model: ModelShape, pool: PoolSize, room: int) -> tuple[int, str]:
    record = model.layouts[0].record_bytes
    total, least = model.config.num_routed_experts, model.config.num_experts_per_tok
    if pool.kind == "auto":
        slots = max(least, min(total, room // record))  # too little is refused with all numbers
        return slots, f"{slots:,} slots of {total:,} experts: what the budget leaves"
    slots = {
        "all": total,
        "percent": int(total * pool.value / 100 + 1e-9),
        "bytes": int(pool.value) // record,
        "slots": int(pool.value),
    }[pool.kind]
    if slots < least:
        raise ResourceError(
            f"--pool {pool.text} holds {slots} experts; one layer needs {least} at once",
            f"use at least --pool {least}slots ({readable_size(least * record)})",
        )
    slots = min(total, slots)
    return slots, f"{slots:,} slots of {total:,} experts: --pool {pool.text}"


def _check_fits(plan: MemoryPlan) -> None:
    fixed = plan.resident_bytes + plan.kv_bytes + plan.workspace_bytes
    if fixed + plan.pool_bytes <= plan.budget_bytes:
        return
    sizes = (plan.resident_bytes, plan.kv_bytes, plan.workspace_bytes, plan.pool_bytes)
    resident, kv, workspace, pool = map(readable_size, sizes)
    raise ResourceError(
        f"not enough {'RAM' if plan.device.type == 'cpu' else 'VRAM'}: resident weights "
        f"{resident}, KV state {kv}, workspace {workspace} and pool {pool} exceed the budget of "
        f"{readable_size(plan.budget_bytes)} ({plan.budget_reason})",
        "lower --pool or -c, or raise --vram",
    )
