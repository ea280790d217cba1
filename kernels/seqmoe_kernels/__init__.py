"""Every operation of the decoder as a verb over tensors: Triton on CUDA, plain torch elsewhere.

A leaf package: it knows tensors, ints and the structures of `formats`, no model and no engine.
"""

from __future__ import annotations

from seqmoe_kernels.attention_step import attention_step
from seqmoe_kernels.choice import Chosen, RecordedIds, Routing, choose
from seqmoe_kernels.courier import ask_beside, copy_beside
from seqmoe_kernels.expert_mlp import expert_mlp
from seqmoe_kernels.expert_pairs import expert_pairs
from seqmoe_kernels.formats import (
    EMPTY,
    FETCHING,
    HITS,
    MISSES,
    NO_VICTIM,
    READY,
    ExpertFormat,
    Flights,
    PoolState,
)
from seqmoe_kernels.fp8 import dequantize
from seqmoe_kernels.gate import Courier
from seqmoe_kernels.gemv import Matrix, linear, linears
from seqmoe_kernels.gru import GruWeights, gru_step
from seqmoe_kernels.hints import Expectation, note_hints
from seqmoe_kernels.lookahead import Ahead, Asking
from seqmoe_kernels.lookup import Resolved, resolve
from seqmoe_kernels.mixture import combine
from seqmoe_kernels.norm import Norm, rms_norm
from seqmoe_kernels.normed import normed_linear
from seqmoe_kernels.outlook import ExpertHeads, UseHistory, expected_uses
from seqmoe_kernels.proof import Fault, verify_slots
from seqmoe_kernels.publish import ENTRY_WORDS, begin_step, publish, read_entry
from seqmoe_kernels.requests import Request, read_request
from seqmoe_kernels.rope import Rotation, rotary
from seqmoe_kernels.router import route
from seqmoe_kernels.row_sums import HiddenInput, TokenInput, sum_rows
from seqmoe_kernels.sampling import sample
from seqmoe_kernels.sampling_state import SamplingState
from seqmoe_kernels.transfer import Prefetching, fetch
from seqmoe_kernels.windows import window_vectors

__all__ = [
    "EMPTY",
    "ENTRY_WORDS",
    "FETCHING",
    "HITS",
    "MISSES",
    "NO_VICTIM",
    "READY",
    "Ahead",
    "Asking",
    "Chosen",
    "Courier",
    "Expectation",
    "ExpertFormat",
    "ExpertHeads",
    "Fault",
    "Flights",
    "GruWeights",
    "HiddenInput",
    "Matrix",
    "Norm",
    "PoolState",
    "Prefetching",
    "RecordedIds",
    "Request",
    "Resolved",
    "Rotation",
    "Routing",
    "SamplingState",
    "TokenInput",
    "UseHistory",
    "ask_beside",
    "attention_step",
    "begin_step",
    "choose",
    "combine",
    "copy_beside",
    "dequantize",
    "expected_uses",
    "expert_mlp",
    "expert_pairs",
    "fetch",
    "gru_step",
    "linear",
    "linears",
    "normed_linear",
    "note_hints",
    "publish",
    "read_entry",
    "read_request",
    "resolve",
    "rms_norm",
    "rotary",
    "route",
    "sample",
    "sum_rows",
    "verify_slots",
    "window_vectors",
]
