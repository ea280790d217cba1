"""The predictor: one step at a time it says what it says of whole sequences, its batches hold what
the trace says, training goes on where it was, and it finds what counting cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from seqmoe_cli.errors import SeqmoeError
from seqmoe_cli.forecast.beginning import begin
from seqmoe_cli.forecast.corpus import Corpus, divide, joined
from seqmoe_cli.forecast.predictions import Predictions
from seqmoe_cli.forecast.predictor import (
    HALF_LIVES,
    LEAST_RATE,
    MAX_BYTES,
    WINDOWS,
    Inputs,
    Predictor,
    PredictorShape,
    expected_uses,
)
from seqmoe_cli.forecast.predictor_step import PredictorStep
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.forecast.training import Plan, Progress, Training
from seqmoe_kernels.predictor import heads
from tests.forecast.predictors import random_predictor, small_shape
from tests.traces import EXPERTS, LAYERS, TOP_K, VOCAB, written_trace
from tools.simulator.recall_study import best_by_counting, recall

CPU = torch.device("cpu")


def test_the_least_rate_is_the_same_everywhere() -> None:
    assert LEAST_RATE == heads.LEAST_RATE


@pytest.mark.parametrize("sizes", [{}, {"vocab_size": 0, "token_rank": 0}])
def test_steps_say_what_sequences_say(sizes: dict[str, int]) -> None:
    shape = small_shape(**sizes)
    predictor, corpus = random_predictor(shape), Corpus(written_trace(1, 40), CPU)
    inputs = known = corpus.inputs(torch.arange(40)[None])
    with torch.no_grad():
        logits, _ = predictor(inputs, predictor.start(1))
        whole = expected_uses(logits[0])
        parts = [
            Inputs(*(x if x is None else x[:, a:b] for x in inputs)) for a, b in ((0, 25), (25, 40))
        ]
        _, middle = predictor(parts[0], predictor.start(1))
        again, _ = predictor(parts[1], middle)
    torch.testing.assert_close(expected_uses(again[0]), whole[25:])

    step = PredictorStep(predictor, CPU, torch.float32)
    tensors = (step.used, step.token, step.expected)
    addresses = [tensor.data_ptr() for tensor in tensors]

    def run(first: int) -> None:
        for t in range(first, 40):
            step.used.copy_(known.used[0, t])
            step.token.copy_(known.token[0, t : t + 1])  # type: ignore[index]
            step()
            torch.testing.assert_close(step.expected, whole[t], atol=1e-5, rtol=1e-4)

    run(0)
    step.reset()
    run(0)
    step.load(middle)
    run(25)
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_a_step_in_bfloat16_is_near() -> None:
    predictor, corpus = random_predictor(small_shape()), Corpus(written_trace(1, 20), CPU)
    exact = PredictorStep(predictor, CPU, torch.float32)
    rough = PredictorStep(predictor, CPU, torch.bfloat16)
    inputs = corpus.inputs(torch.arange(20)[None])
    for t in range(20):
        for step in (exact, rough):
            step.used.copy_(inputs.used[0, t])
            step.token.copy_(inputs.token[0, t : t + 1])  # type: ignore[index]
            step()
    torch.testing.assert_close(rough.expected, exact.expected, atol=0.05, rtol=0.05)
    assert not torch.equal(rough.expected, exact.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 768])
def test_a_step_in_a_graph(width: int) -> None:
    device = torch.device("cuda")
    predictor, corpus = (
        random_predictor(small_shape(width=width)),
        Corpus(written_trace(1, 20), CPU),
    )
    on_cpu = PredictorStep(predictor, CPU, torch.bfloat16)
    eager = PredictorStep(predictor, device, torch.bfloat16)
    captured = PredictorStep(predictor, device, torch.bfloat16)
    captured()  # compiles and allocates
    captured.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    inputs = corpus.inputs(torch.arange(20)[None])
    for t in range(20):
        for step in (eager, captured, on_cpu):
            step.used.copy_(inputs.used[0, t])
            step.token.copy_(inputs.token[0, t : t + 1])  # type: ignore[index]
        eager()
        graph.replay()
        on_cpu()
        assert torch.equal(captured.expected, eager.expected)
        # (A last bit of a sum in another order may tip the rounding of a state to bfloat16.)
        torch.testing.assert_close(captured.expected.cpu(), on_cpu.expected, atol=0.01, rtol=0.01)


def test_sizes() -> None:
    qwen3 = {"num_layers": 48, "num_experts": 128, "top_k": 8, "vocab_size": 151_936}
    shape = PredictorShape.fitting(**qwen3)
    assert shape.width == 768 and shape.token_rank >= 32 and 50e6 < shape.num_bytes <= MAX_BYTES
    assert PredictorShape.fitting(**qwen3 | {"vocab_size": 0}).token_rank == 0
    with pytest.raises(SeqmoeError, match="64 are the limit"):
        PredictorShape.fitting(**qwen3, width=2048)
    assert PredictorShape.from_dict(shape.as_dict()) == shape
    for wrong in ({}, shape.as_dict() | {"width": "wide"}, shape.as_dict() | {"top_k": 129}):
        with pytest.raises(ValueError, match="sizes"):
            PredictorShape.from_dict(wrong)


def test_batches_hold_what_the_trace_says() -> None:
    trace = written_trace(3, 30)
    corpus = Corpus(trace, CPU)
    flat = trace.experts.astype(int) + EXPERTS * np.arange(LAYERS)[:, None]
    batch = corpus.batch(torch.tensor([0, 38, 85]), 12, warm=2)
    for row, start in enumerate((0, 38, 85)):
        begins, ends = start // 30 * 30, start // 30 * 30 + 30
        counts = np.zeros((len(HALF_LIVES), LAYERS * EXPERTS))
        for token in range(begins, start - 1):
            for j, half_life in enumerate(HALF_LIVES):
                counts[j, flat[token].ravel()] += 2 ** (-(start - 2 - token) / half_life)
        np.testing.assert_allclose(batch.counts[row], counts, atol=1e-5)
        for t in range(12):
            token = start + t
            if token >= ends:
                assert not batch.counted[row, t].any()
                continue
            expected = flat[token - 1].ravel() if token > begins else [LAYERS * EXPERTS] * 6
            assert batch.inputs.used[row, t].tolist() == list(expected)
            assert batch.inputs.token is not None and trace.token_ids is not None
            assert batch.inputs.token[row, t] == trace.token_ids[token]
            judged = token - begins >= 5 and (t >= 2 or start == begins)
            for w, (near, far) in enumerate(WINDOWS):
                known = judged and token + far <= ends
                assert batch.counted[row, t, w] == known
                if known:
                    share = np.zeros(LAYERS * EXPERTS)
                    for ahead in range(near - 1, far):
                        share[flat[token + ahead].ravel()] += 1 / (far - near + 1)
                    np.testing.assert_allclose(batch.target[row, t, w], share, atol=1e-6)


def test_rows_cover_every_token() -> None:
    corpus = Corpus(written_trace(3, 50), CPU)
    rows = corpus.rows(16, torch.Generator().manual_seed(0))
    covered = {
        t for start in rows.tolist() for t in range(start, min(start + 16, start // 50 * 50 + 50))
    }
    assert covered >= {t for t in range(150) if t % 50 < 49}
    assert rows.tolist() != corpus.rows(16, torch.Generator().manual_seed(1)).tolist()


def test_division_and_joining() -> None:
    trace = written_trace(20, 30)
    learned, held_out = divide(trace)
    assert (learned.num_sequences, held_out.num_sequences) == (18, 2)
    assert set(held_out.sequence) == {18, 19}
    one = written_trace(1, 60)
    assert [len(part) for part in divide(one)] == [45, 15]
    both = joined([held_out, learned])
    assert both.num_sequences == 20 and len(both) == len(trace)
    assert (both.experts[:60] == held_out.experts).all()
    sums = [replace(trace, weights_sha256=sha256) for sha256 in ("a", "b")]
    assert joined([trace, sums[0], sums[0]]).weights_sha256 == "a"
    with pytest.raises(SeqmoeError, match="different models"):
        joined([sums[0], trace, sums[1]])
    with pytest.raises(SeqmoeError, match="different shapes"):
        joined([trace, Trace("x", "none", 8, trace.experts[:, :2], trace.sequence, trace.phase)])
    with pytest.raises(SeqmoeError, match="too few"):
        divide(trace.select(np.arange(len(trace)) < 12))


def test_training_begins_where_counting_ends() -> None:
    """Without a step of training, what the token says is there; for tokens that were never seen, it
    comes out of the embedding."""
    trace = written_trace(40, 60)
    assert trace.token_ids is not None
    learned = Corpus(trace.select(np.isin(trace.sequence, range(30)) & (trace.token_ids != 3)), CPU)
    torch.manual_seed(0)
    # The rule of layer 0 is linear in these: which residue, and which third.
    ids = torch.arange(VOCAB)
    embedding = torch.cat(
        (torch.nn.functional.one_hot(ids % EXPERTS, 8), torch.nn.functional.one_hot(ids // 8, 3)), 1
    ).float()
    shape = small_shape(token_rank=16)
    predictor = Predictor(shape).eval()
    begin(predictor, learned, embedding)
    used = torch.full((1, 1, LAYERS * TOP_K), LAYERS * EXPERTS)
    right = []
    for token in range(VOCAB):
        with torch.no_grad():
            logits, _ = predictor(Inputs(used, torch.tensor([[token]])), predictor.start(1))
        named = set(logits[0, 0, 0, :EXPERTS].topk(TOP_K).indices.tolist())
        first = token % EXPERTS
        right.append(named == {first, (first + 1 + token // EXPERTS) % EXPERTS})
    assert sum(right) >= VOCAB - 2


def test_it_finds_what_counting_cannot() -> None:
    learned, held_out = divide(written_trace(120, 60))
    torch.manual_seed(0)
    predictor = Predictor(small_shape(width=48, token_rank=16))
    corpus = Corpus(learned, CPU)
    begin(predictor, corpus)
    plan = Plan(minutes=10, passes=6, rate=1e-2, batch_tokens=512, length=64, dropout=0.0, warm=4)
    training = Training(predictor, corpus, Corpus(held_out, CPU), plan)
    before = training.held_out_loss()
    training.run()
    assert training.held_out_loss() < 0.8 * before
    found = recall(learned, held_out, Predictions(predictor, held_out).blocks)
    own, best = found.scores[-1], best_by_counting(found.scores)
    assert best.forecast.startswith("token table")
    assert best.by_depth[0, 0, 0] > 0.95 and own.by_depth[0, 0, 0] > 0.95  # the token decides
    assert own.overall[0, 0] > 1.2 * best.overall[0, 0]
    assert own.by_depth[1, 2, 0] > 0.6 > best.by_depth[1, 2, 0]  # layer 2 is known steps ahead


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    learned, held_out = (Corpus(part, CPU) for part in divide(written_trace(12, 60)))
    plan = Plan(passes=4, batch_tokens=128, length=32, looks=40, dropout=0.0)
    shape = small_shape()

    def fresh() -> Predictor:
        torch.manual_seed(0)
        return Predictor(shape)

    def stop(now: Progress) -> None:
        if now.passes > 1.5:
            raise KeyboardInterrupt

    whole = Training(fresh(), learned, held_out, plan)
    whole.run()
    file = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        Training(fresh(), learned, held_out, plan, file).run(stop)
    told: list[Progress] = []
    again = Training(Predictor(shape), learned, held_out, plan, file)
    again.run(told.append)
    assert told[0].passes > 1 and told[-1].passes == 4
    for a, b in zip(whole.predictor.parameters(), again.predictor.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    with pytest.raises(SeqmoeError, match="another shape"):
        Training(Predictor(small_shape(width=32)), learned, held_out, plan, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SeqmoeError, match="no checkpoint"):
        Training(fresh(), learned, held_out, plan, file)


def test_traces_that_do_not_fit() -> None:
    trace, predictor = written_trace(2, 30), random_predictor(small_shape())
    bare = Trace("x", "none", EXPERTS, trace.experts, trace.sequence, trace.phase)
    for wrong, words in (
        (bare, "no token ids"),
        (Trace("x", "none", 8, trace.experts[:, :2], trace.sequence, trace.phase), "2 layers of 8"),
    ):
        with pytest.raises(SeqmoeError, match=words):
            Predictions(predictor, wrong)
