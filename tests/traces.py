"""Traces for tests: routing at random, and routing that follows a rule."""

from __future__ import annotations

import numpy as np

from seqmoe_cli.forecast.trace import Trace

# Of the routing that follows a rule.
LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 24


def random_trace(seed: int, tokens: int, layers: int, num_experts: int, top_k: int) -> Trace:
    """Routing with favourites, so that pools of every size have hits and misses."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(num_experts, 0.5), layers) + 1e-3
    chances /= chances.sum(1, keepdims=True)
    picks = [
        [rng.choice(num_experts, top_k, False, chances[layer]) for layer in range(layers)]
        for _ in range(tokens)
    ]
    return Trace(
        model="random",
        family="none",
        num_experts=num_experts,
        experts=np.array(picks, np.uint8),
        sequence=np.zeros(tokens, np.uint32),
        phase=np.ones(tokens, np.uint8),
    )


def written_trace(num_sequences: int = 12, length: int = 60, seed: int = 0) -> Trace:
    """Routing with a rule: in layer 0 the token decides, in layer 1 the one before it, in layer 2
    the one two steps back. The first five tokens of a sequence are a prompt."""
    rng = np.random.default_rng(seed)
    token = rng.integers(0, VOCAB, (num_sequences, length))
    tokens = [np.roll(token, back, axis=1) for back in range(LAYERS)]
    first = np.stack(tokens, 2) % EXPERTS
    second = (first + 1 + np.stack(tokens, 2) // EXPERTS) % EXPERTS
    experts = np.stack((first, second), 3).reshape(-1, LAYERS, TOP_K).astype(np.uint8)
    sequence = np.repeat(np.arange(num_sequences, dtype=np.uint32), length)
    phase = np.tile(np.arange(length) >= 5, num_sequences).astype(np.uint8)
    ids = token.ravel().astype(np.uint32)
    hidden = rng.standard_normal((len(ids), 4)).astype(np.float16)
    axes = np.eye(6, 4, dtype=np.float32)
    return Trace("rule", "none", EXPERTS, experts, sequence, phase, ids, None, hidden, axes, 0)
