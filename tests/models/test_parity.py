"""Our decoders against transformers, from checkpoints in real names and quantised layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from tests.checkpoints import packed_model, write_checkpoint

GREEDY = SamplingParams(temperature=0)
CASES = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"fp8": True}),
    ("qwen3_moe", {"fp8": True, "scale_dtype": "F32"}),
    ("qwen3_moe", {"tie": True, "norm_topk_prob": False}),
    ("mixtral", {}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True}),
]


@pytest.mark.parametrize(("family", "kwargs"), CASES)
def test_matches_transformers(family: str, kwargs: dict[str, object], tmp_path: Path) -> None:
    """Logits of every position, a cached decode against the full forward, and greedy text."""
    transformers = pytest.importorskip("transformers")
    source = write_checkpoint(tmp_path / "source", family, **kwargs)
    packed = packed_model(tmp_path / "packed", family, **kwargs)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    reference.eval()
    engine = Engine.open(packed, EngineOptions(PoolSize.parse("40%"), "cpu", "float32"))
    ids = torch.randint(0, engine.config.vocab_size, (300,), generator=torch.manual_seed(1))

    with torch.inference_mode():
        logits = reference(ids.unsqueeze(0), use_cache=False).logits[0]
    expected = logits.log_softmax(1)[:-1].gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    assert logits.std() > 0.3  # a flat distribution would compare nothing
    torch.testing.assert_close(engine.log_likelihoods(ids.tolist()), expected, atol=2e-4, rtol=1e-4)

    prompt = ids[:20].tolist()
    with torch.inference_mode():
        text = reference.generate(
            ids[:20].unsqueeze(0), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, 20:].tolist()
    engine.reset_kv()
    steps = list(engine.generate(prompt, GREEDY, max_tokens=24))
    assert [step.token_id for step in steps] == text

    # the KV state that decoding left behind gives the next token of a full forward
    again = next(engine.generate(prompt + text[:-1], GREEDY, max_tokens=1))
    assert again.stats.num_tokens == 1
    assert again.token_id == text[-1]
