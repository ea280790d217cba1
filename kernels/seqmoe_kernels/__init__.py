"""Every operation of the decoder as a verb over tensors: Triton on CUDA, plain torch elsewhere.

A leaf package: it knows tensors, ints and the structures of `formats`, no model and no engine.
"""

from __future__ import annotations

from seqmoe_kernels.attention_step import attention_step
from seqmoe_kernels.choice import Chosen, RecordedIds, Routing, choose
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
    PoolState,
)
from seqmoe_kernels.fp8 import dequantize
from seqmoe_kernels.gemv import Matrix, linear, linears, normed_linear
from seqmoe_kernels.lookup import Resolved, resolve
from seqmoe_kernels.mixture import combine
from seqmoe_kernels.norm import Norm, rms_norm
from seqmoe_kernels.proof import Fault, verify_slots
from seqmoe_kernels.publish import ENTRY_WORDS, begin_step, publish, read_entry
from seqmoe_kernels.rope import Rotation, rotary
from seqmoe_kernels.router import route
from seqmoe_kernels.sampling import sample
from seqmoe_kernels.sampling_state import SamplingState
from seqmoe_kernels.transfer import fetch

__all__ = [
    "EMPTY",
    "ENTRY_WORDS",
    "FETCHING",
    "HITS",
    "MISSES",
    "NO_VICTIM",
    "READY",
    "Chosen",
    "ExpertFormat",
    "Fault",
    "Matrix",
    "Norm",
    "PoolState",
    "RecordedIds",
    "Resolved",
    "Rotation",
    "Routing",
    "SamplingState",
    "attention_step",
    "begin_step",
    "choose",
    "combine",
    "dequantize",
    "expert_mlp",
    "expert_pairs",
    "fetch",
    "linear",
    "linears",
    "normed_linear",
    "publish",
    "read_entry",
    "resolve",
    "rms_norm",
    "rotary",
    "route",
    "sample",
    "verify_slots",
]
