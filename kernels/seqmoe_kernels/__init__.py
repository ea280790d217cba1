"""Every operation of the decoder as a verb over tensors: Triton on CUDA, plain torch elsewhere.

A leaf package: it knows tensors, ints and the structures of `state`, no model and no engine.
"""

from __future__ import annotations

from seqmoe_kernels.attention.decode import attention_step
from seqmoe_kernels.attention.rope import Rotation, rotary
from seqmoe_kernels.dense.linear import Matrix, linear, linears, normed_linear
from seqmoe_kernels.dense.norm import Norm, rms_norm
from seqmoe_kernels.experts.combine import combine
from seqmoe_kernels.experts.mlp import expert_mlp
from seqmoe_kernels.experts.prefill import expert_pairs
from seqmoe_kernels.experts.record import ExpertFormat, expert_format
from seqmoe_kernels.pool.choose import RecordedIds, Routing, choose
from seqmoe_kernels.pool.fetch import AllCopied, Signals, fetch
from seqmoe_kernels.pool.lock import Handover
from seqmoe_kernels.pool.resolve import Resolved, resolve
from seqmoe_kernels.pool.route import route
from seqmoe_kernels.pool.step_ring import ENTRY_WORDS, begin_step, publish, read_entry
from seqmoe_kernels.pool.verify import Fault, verify_slots
from seqmoe_kernels.predictor.embed import StepInput, TokenInput, sum_rows
from seqmoe_kernels.predictor.gru import GruWeights, gru_step
from seqmoe_kernels.predictor.heads import ExpertHeads, UseHistory, expected_uses
from seqmoe_kernels.predictor.horizons import window_vectors
from seqmoe_kernels.prefetch.candidates import StepForecast, pick_candidates
from seqmoe_kernels.prefetch.copy_kernels import copy_prefetches
from seqmoe_kernels.prefetch.lookahead import Predictions
from seqmoe_kernels.prefetch.requests import Request, read_request
from seqmoe_kernels.prefetch.schedule import schedule_prefetches
from seqmoe_kernels.sampling.sample import sample
from seqmoe_kernels.sampling.state import SamplingState
from seqmoe_kernels.state import (
    READY,
    Flights,
    PoolState,
)

__all__ = [
    "ENTRY_WORDS",
    "READY",
    "AllCopied",
    "ExpertFormat",
    "ExpertHeads",
    "Fault",
    "Flights",
    "GruWeights",
    "Handover",
    "Matrix",
    "Norm",
    "PoolState",
    "Predictions",
    "RecordedIds",
    "Request",
    "Resolved",
    "Rotation",
    "Routing",
    "SamplingState",
    "Signals",
    "StepForecast",
    "StepInput",
    "TokenInput",
    "UseHistory",
    "attention_step",
    "begin_step",
    "choose",
    "combine",
    "copy_prefetches",
    "expected_uses",
    "expert_format",
    "expert_mlp",
    "expert_pairs",
    "fetch",
    "gru_step",
    "linear",
    "linears",
    "normed_linear",
    "pick_candidates",
    "publish",
    "read_entry",
    "read_request",
    "resolve",
    "rms_norm",
    "rotary",
    "route",
    "sample",
    "schedule_prefetches",
    "sum_rows",
    "verify_slots",
    "window_vectors",
]
