"""KVState: truncation, and attention against one plain softmax."""

from __future__ import annotations

import pytest
import torch

from seqmoe_cli.engine.kv_state import KVState
from seqmoe_kernels import Rotation
from seqmoe_weights.config import ModelConfig

CONFIG = ModelConfig(
    family="qwen3_moe",
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    max_position_embeddings=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    dense_format="BF16",
)


STILL = Rotation(torch.zeros(8), None, None, 0.0)  # by no angle, after no norm


def make() -> KVState:
    return KVState(CONFIG, 40, torch.float32, torch.device("cpu"))


def qkv(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, 6 * 16, generator=g),
        torch.randn(num_tokens, 2 * 16, generator=g),
        torch.randn(num_tokens, 2 * 16, generator=g),
    )


def run(state: KVState, num_tokens: int, seed: int) -> torch.Tensor:
    state.begin(num_tokens)
    outs = [state(layer, *qkv(num_tokens, seed + layer), STILL) for layer in range(2)]
    state.commit(list(range(num_tokens)))
    return torch.stack(outs)


@pytest.mark.parametrize("split", [[9], [8, 1], [4, 5], [1] * 9, [3, 1, 5]])
def test_attention_is_causal_softmax(split: list[int]) -> None:
    flat = qkv(9, 3)
    q, k, v = (x.view(9, -1, 16) for x in flat)
    scores = torch.einsum("tnd,snd->nts", q, k.repeat_interleave(3, 1)) / 4
    scores.masked_fill_(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = torch.einsum("nts,snd->tnd", scores.softmax(-1), v.repeat_interleave(3, 1))
    state, outs, at = make(), [], 0
    for size in split:
        state.begin(size)
        outs.append(state(1, *(x[at : at + size] for x in flat), STILL))
        state.commit([0] * size)
        at += size
    torch.testing.assert_close(torch.cat(outs), expected.reshape(9, -1))


def test_what_was_truncated_leaves_no_trace() -> None:
    state, other = make(), make()
    run(state, 4, 1)
    run(state, 3, 50)
    state.truncate(4)
    run(other, 4, 1)
    assert state.length == 4
    assert torch.equal(run(state, 3, 90), run(other, 3, 90))


def test_abandoned_forward_does_not_count() -> None:
    state = make()
    run(state, 5, 1)
    state.begin(6)
    state(0, *qkv(6, 8), STILL)
    assert state.length == 5
    other = make()
    run(other, 5, 1)
    assert torch.equal(run(state, 2, 30), run(other, 2, 30))


def test_full_context_is_refused() -> None:
    with pytest.raises(ValueError, match="41 tokens"):
        make().begin(41)
