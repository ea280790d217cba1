"""What sampling looks at beside the logits: settings, random numbers, and the tokens so far."""

from __future__ import annotations

from typing import NamedTuple

import torch

from seqmoe_kernels.common.checks import FLOATS, check

NUM_SETTINGS = 7
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPEAT, PRESENCE, FREQUENCY = range(NUM_SETTINGS)


class SamplingState(NamedTuple):
    """One answer's settings and memory, all tensors on one device. V tokens in the vocabulary.

    `settings`: temperature (0: greedy), top_k (0: off), top_p, min_p, repeat, presence and
    frequency penalty.
    """

    settings: torch.Tensor  # f32 [7]
    stream: torch.Tensor  # int64 [2]: seed, number of tokens chosen so far
    counts: torch.Tensor  # f32 [V]: how often a token is in the answer
    seen: torch.Tensor  # bool [V]: whether a token is in the prompt or the answer


def check_sampling(logits: torch.Tensor, state: SamplingState) -> None:
    check("logits", logits, FLOATS, (-1,), logits.device)
    if len(logits) == 0:
        raise ValueError("logits is empty, expected one for each token")
    check("settings", state.settings, torch.float32, (NUM_SETTINGS,), logits.device)
    check("stream", state.stream, torch.int64, (2,), logits.device)
    check("counts", state.counts, torch.float32, (len(logits),), logits.device)
    check("seen", state.seen, torch.bool, (len(logits),), logits.device)
