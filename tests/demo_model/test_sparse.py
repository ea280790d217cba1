"""The sparse demo model's tools on a tiny dense model: exact at the start of training, pruned to
equal experts, healed, and cut into the Mixtral that was trained. transformers is the oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.demo_model.sparse.build import sparse_config, sparse_tensors
from tools.demo_model.sparse.corrections import (
    LOWERED,
    MOST,
    MOST_LOWERED,
    RAISED,
    Marks,
    correct,
)
from tools.demo_model.sparse.decoder import Decoder, dense_decoder, hidden_states
from tools.demo_model.sparse.delta import is_healed, read_delta, round_delta
from tools.demo_model.sparse.distill import Distiller, Weights
from tools.demo_model.sparse.evaluate import LoadCount, expert_load, perplexity
from tools.demo_model.sparse.routing import first_routers, prune, saliency
from tools.demo_model.sparse.sampler import FREE, Choice, Flow, Request, penalised, sample
from tools.demo_model.sparse.schedule import Corrected, Training
from tools.demo_model.sparse.student import (
    Student,
    delta_student,
    healing_student,
    new_student,
    stacked_base,
)
from tools.demo_model.sparse.text import Batches, Text
from tools.demo_model.sparse.writer import Clock

transformers = pytest.importorskip("transformers")

NUM_EXPERTS, TOP_K, WIDTH = 6, 2, 20
CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = torch.device("cpu")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    for name, tensor in oracle.named_parameters():
        torch.nn.init.normal_(tensor, 1.0 if "norm" in name else 0.0, 0.25)
    return {name: t.detach() for name, t in oracle.state_dict().items() if "lm_head" not in name}


@pytest.fixture
def teacher(tensors: dict[str, Tensor]) -> Decoder:
    return dense_decoder(CONFIG, tensors, CPU, torch.float32)


@pytest.fixture
def rows() -> Tensor:
    return torch.randint(97, (6, 24), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def student(teacher: Decoder, tensors: dict[str, Tensor], rows: Tensor) -> Student:
    router = first_routers(teacher, rows, NUM_EXPERTS)
    return new_student(teacher, stacked_base(tensors, 3, CPU), router, TOP_K)


def logits(model: Decoder, rows: Tensor) -> Tensor:
    return hidden_states(model, rows).detach() @ model.embedding.T


def test_dense_decoder_is_a_llama(
    teacher: Decoder, tensors: dict[str, Tensor], rows: Tensor
) -> None:
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    oracle.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    expected = oracle(rows).logits.detach()
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(teacher, rows), expected, atol=1e-4, rtol=1e-4)


def test_new_student_is_its_teacher(teacher: Decoder, student: Student, rows: Tensor) -> None:
    expected = logits(teacher, rows)
    torch.testing.assert_close(logits(student.decoder(), rows), expected, atol=1e-4, rtol=1e-4)


def train(teacher: Decoder, student: Student, rows: Tensor) -> list[float]:
    distiller = Distiller(teacher, student, compiled=False)
    trained = [t for t in student.parameters.values() if t.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    divergences = []
    for _ in range(30):
        losses = distiller.backward(rows, Weights(distance=0.5, balance=0.01))
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(float(losses.divergence))
    return divergences


def test_pruned_student_learns(teacher: Decoder, student: Student, rows: Tensor) -> None:
    for width in (36, WIDTH):
        prune(student, saliency(student.decoder(), rows), width)
    assert (student.support.sum(dim=-1) == WIDTH).all()
    divergences = train(teacher, student, rows)
    assert divergences[0] > 0.05
    assert divergences[-1] < 0.5 * divergences[0]


def test_divergence_and_its_gradient(teacher: Decoder, student: Student, rows: Tensor) -> None:
    prune(student, saliency(student.decoder(), rows), WIDTH)
    losses = Distiller(teacher, student, False).backward(rows, Weights(0.0, 0.0))
    found = student.parameters["router"].grad
    student.parameters["router"].grad = None
    ours = hidden_states(student.decoder(), rows) @ teacher.embedding.T
    theirs = hidden_states(teacher, rows) @ teacher.embedding.T
    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
    )
    divergence = expected.sum(-1).mean()
    divergence.backward()
    torch.testing.assert_close(losses.divergence, divergence.detach(), atol=1e-5, rtol=1e-4)
    expected_grad = student.parameters["router"].grad
    assert found is not None and expected_grad is not None and expected_grad.abs().max() > 1e-4
    torch.testing.assert_close(found, expected_grad, atol=1e-6, rtol=1e-3)


def test_corrections_of_a_row_that_repeats_itself() -> None:
    marks = Marks(end=2, header=(1, 30, 20))
    said = [*range(40, 48)]
    answer = [*said, *said, 50, *said, 2, *said]
    row = [1, 31, 20, *said, 2, 1, 30, 20, *answer, 2, 1]
    token, lowered, end, raised = correct(torch.tensor([row, row, row]), marks, num_rows=2)
    assert end == marks.end
    assert torch.equal(lowered[0], lowered[1])
    assert not lowered[2].any() and not raised[2].any()  # not asked for
    assert lowered[0].any() and raised[0].any()
    begun = row.index(30)
    for now in range(len(row)):
        six = row[now - 5 : now + 1]
        usual = now >= 5 and min(six) > 16
        before = [then for then in range(5, now) if usual and row[then - 5 : then + 1] == six]
        following = row[before[-1] + 1] if before else 0
        repeats = max(len(before) - 1, 0)
        assert lowered[0, now] == LOWERED * min(repeats, MOST_LOWERED) * (following > 16)
        assert not lowered[0, now] or token[0, now] == following
        inside = begun + 1 < now < row.index(2, begun)
        assert raised[0, now] == RAISED * min(repeats, MOST) * inside


def test_the_end_is_made_likelier_in_long_answers_only() -> None:
    marks = Marks(end=2, header=(1, 30, 20))
    turn = torch.arange(20, 420).tolist()  # nothing repeats itself
    rows = torch.tensor([[1, 31, 19, *turn, 2, 1, 30, 19, *turn, 2]])
    raised = correct(rows, marks, num_rows=1).raised[0]
    assert not raised[: len(turn) + 8 + 190].any()
    assert 0 < raised[len(turn) + 8 + 250] < raised[-2]
    assert raised[-1] == 0


def test_student_learns_a_correction(teacher: Decoder, student: Student, rows: Tensor) -> None:
    marks = Marks(end=94, header=(95, 93, 20))
    looping = rows.clamp(17, 92)
    looping[:, :3] = torch.tensor([95, 93, 20])
    looping[:, 10:17] = looping[:, 17:24] = looping[:, 3:10]
    correction = correct(looping, marks, len(rows))
    assert correction.lowered.any()
    free = Distiller(teacher, student, False).backward(looping, Weights(0.0, 0.0)).divergence
    bound = Distiller(teacher, student, False).backward(looping, Weights(0.0, 0.0), correction)
    ours = theirs = hidden_states(teacher, looping) @ teacher.embedding.T
    token = torch.nn.functional.one_hot(correction.token, theirs.shape[-1])
    theirs = theirs - token * correction.lowered[..., None]
    theirs[..., marks.end] += correction.raised
    theirs = theirs.log_softmax(-1)
    expected = (theirs.exp() * (theirs - ours.log_softmax(-1))).sum(-1).mean()
    assert free < 1e-6 < 1e-4 < expected
    torch.testing.assert_close(bound.divergence, expected, atol=1e-5, rtol=1e-3)


def test_healing_changes_its_part_of_the_delta_only(
    teacher: Decoder, student: Student, rows: Tensor
) -> None:
    prune(student, saliency(student.decoder(), rows), WIDTH)
    train(teacher, student, rows)
    delta = round_delta(student.parameters, student.support)
    first = delta_student(teacher, student.base, delta, TOP_K).decoder()
    healed = healing_student(teacher, student.base, delta, TOP_K, rank=40)
    before = logits(first, rows)
    torch.testing.assert_close(logits(healed.decoder(), rows), before, atol=1e-4, rtol=1e-4)
    divergences = train(teacher, healed, rows)
    assert divergences[-1] < divergences[0]
    rounded = round_delta(healed.parameters, healed.support)
    healing = {name: tensor for name, tensor in rounded.items() if is_healed(name)}
    assert healing["q.a"].shape[1] == 40
    assert delta.keys() - healing.keys() == {
        *(
            f"{key}.{part}{step}"
            for key in ("gate", "up", "down")
            for part in "ab"
            for step in ("", ".step")
        ),
        "neurons",
    }
    shipped = delta_student(teacher, student.base, delta | healing, TOP_K).decoder()
    after, wanted = logits(shipped, rows), logits(healed.decoder(), rows)
    assert (after - wanted).norm() < 0.2 * (after - before).norm()


class CountingClock(Clock):
    """Says that a second has passed since it was last asked."""

    def __init__(self) -> None:
        self._asked = 0

    def seconds(self) -> float:
        self._asked += 1
        return float(self._asked)


def test_training_goes_on_in_rounds_and_leaves_the_rest_alone(
    teacher: Decoder, student: Student, rows: Tensor
) -> None:
    prune(student, saliency(student.decoder(), rows), WIDTH)
    delta = round_delta(student.parameters, student.support)
    healed = healing_student(teacher, student.base, delta, TOP_K, rank=40)
    before = {name: t.detach().clone() for name, t in healed.parameters.items()}
    options = SimpleNamespace(batch_rows=4, compile=False, width=WIDTH, distance=0.0, balance=0.1)
    corrected = Corrected(Marks(end=94, header=(95, 93, 20)), share=0.75)
    training = Training(teacher, healed, options, 1.0, CountingClock(), 40, corrected)
    batches = Batches({"own": rows, "corpus": rows}, {"own": 0.75, "corpus": 0.25})
    text = Text(chats=rows, corpus=rows, held_out_chats=rows, held_out_corpus=rows)
    half = training.run(batches, text, until=0.5)
    whole = training.run(batches, text, until=1.0)
    assert 0 < half["steps"] < whole["steps"] < 40
    assert whole["tokens"] == whole["steps"] * 4 * rows.shape[1]
    for name, old in before.items():
        assert torch.equal(healed.parameters[name], old) != is_healed(name)
    assert (healed.support.sum(dim=-1) == WIDTH).all()


def test_batches_hold_the_share_of_every_source() -> None:
    sources = {"a": torch.arange(3)[:, None], "b": 100 + torch.arange(50)[:, None]}
    batches = Batches(sources, {"a": 0.25, "b": 0.75})
    found = batches.next(12)
    assert sorted(found[:3].flatten().tolist()) == [0, 1, 2]
    assert len(set(found[3:].flatten().tolist())) == 9 and int(found[3:].min()) >= 100
    batches.replace("a", torch.tensor([[7]]))
    assert batches.next(12)[:3].flatten().tolist() == [7, 7, 7]


def test_built_checkpoint_is_the_trained_model(
    teacher: Decoder, student: Student, tensors: dict[str, Tensor], rows: Tensor
) -> None:
    prune(student, saliency(student.decoder(), rows), WIDTH)
    train(teacher, student, rows)
    delta = round_delta(student.parameters, student.support)
    assert torch.equal(read_delta(delta, CONFIG["intermediate_size"])[1], student.support)
    rounded = delta_student(teacher, student.base, delta, TOP_K).decoder()
    settings = sparse_config(CONFIG, delta, TOP_K)
    oracle = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)).float()
    built = {name: t.float() for name, t in sparse_tensors(tensors, delta).items()}
    fused = fuse(built)
    oracle.load_state_dict({**fused, "lm_head.weight": fused["model.embed_tokens.weight"]})
    expected = oracle(rows).logits.detach()
    # bfloat16 rounds the built weights; a wrong neuron or factor moves logits by their own size
    error = (logits(rounded, rows) - expected).norm() / expected.norm()
    assert error < 0.03
    assert (logits(teacher, rows) - expected).norm() / expected.norm() > 3 * error


def fuse(built: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as transformers 5 holds them: an expert dimension, gate and up in one."""
    fused = {
        n.replace("block_sparse_moe", "mlp"): t for n, t in built.items() if "experts" not in n
    }
    for i in range(CONFIG["num_hidden_layers"]):
        old, new = f"model.layers.{i}.block_sparse_moe", f"model.layers.{i}.mlp.experts"
        w1, w2, w3 = (
            torch.stack([built[f"{old}.experts.{e}.{w}.weight"] for e in range(NUM_EXPERTS)])
            for w in ("w1", "w2", "w3")
        )
        fused[f"{new}.gate_up_proj"], fused[f"{new}.down_proj"] = torch.cat([w1, w3], 1), w2
    return fused


def test_expert_load_counts_choices(student: Student, rows: Tensor) -> None:
    load = expert_load(student.decoder(), rows)
    assert load.shape == (3, NUM_EXPERTS)
    torch.testing.assert_close(load.mean(dim=1), torch.ones(3))
    assert load.std() > 0.1


def test_perplexity_is_that_of_the_logits(student: Student, rows: Tensor) -> None:
    model = student.decoder()
    count = LoadCount(model)
    found = perplexity(model, rows, count)
    wanted = logits(model, rows)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(wanted, rows[:, 1:].flatten())
    assert found == pytest.approx(math.exp(expected), rel=1e-4)
    assert torch.equal(count.load(), expert_load(model, rows))


def test_sampler_follows_prompts_flow_and_the_model(teacher: Decoder) -> None:
    # State 0 samples; the end token 2 (or the state behind it) is followed by 7, then 0 again.
    flow = Flow(torch.tensor([FREE, 7]), torch.tensor([0, 0]), torch.tensor([1, 0]), (2,))
    prompts = torch.full((2, 12), FREE)
    prompts[0, :3] = torch.tensor([5, 2, 9])
    prompts[1, :1] = 11
    request = Request(prompts, torch.tensor([0, 1]), torch.zeros(2))
    found = sample(teacher, request, flow, Choice(min_p=0.0))
    assert found[0, :3].tolist() == [5, 2, 9]
    assert found[1, :2].tolist() == [11, 7]
    greedy = logits(teacher, found).argmax(dim=-1)
    for row, start in ((0, 3), (1, 2)):
        for place in range(start, 12):
            previous = int(found[row, place - 1])
            expected = 7 if previous == 2 and place > start else int(greedy[row, place - 1])
            assert int(found[row, place]) == expected
    assert math.isfinite(float(greedy.sum()))


def test_repetition_penalty_is_that_of_transformers() -> None:
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    said = torch.tensor([[3, 4, 4], [9, 0, 3]])
    seen = torch.zeros(2, 50, dtype=torch.bool).scatter(1, said, True)
    oracle = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    assert torch.equal(penalised(scores, seen, 1.3), oracle(said, scores.clone()))
