"""The sparse demo model's tools on a tiny dense model: exact at the start of training, pruned to
equal experts, and cut into the Mixtral that was trained. transformers is the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.demo_model.sparse.build import sparse_config, sparse_tensors
from tools.demo_model.sparse.decoder import Decoder, dense_decoder, hidden_states
from tools.demo_model.sparse.delta import read_delta, round_delta
from tools.demo_model.sparse.distill import Distiller, Weights
from tools.demo_model.sparse.evaluate import expert_load
from tools.demo_model.sparse.routing import first_routers, prune, saliency
from tools.demo_model.sparse.sampler import FREE, Flow, Request, sample
from tools.demo_model.sparse.student import Student, new_student, stacked_base

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
    optimizer = torch.optim.Adam(student.parameters.values(), lr=3e-3)
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


def test_built_checkpoint_is_the_trained_model(
    teacher: Decoder, student: Student, tensors: dict[str, Tensor], rows: Tensor
) -> None:
    prune(student, saliency(student.decoder(), rows), WIDTH)
    train(teacher, student, rows)
    delta = round_delta(student.parameters, student.support)
    parameters, support = read_delta(delta, CONFIG["intermediate_size"])
    assert torch.equal(support, student.support)
    rounded = Student(
        student.shape, student.embedding, student.base, parameters, support, TOP_K
    ).decoder()
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


def test_sampler_follows_prompts_flow_and_the_model(teacher: Decoder) -> None:
    # State 0 samples; the end token 2 (or the state behind it) is followed by 7, then 0 again.
    flow = Flow(torch.tensor([FREE, 7]), torch.tensor([0, 0]), torch.tensor([1, 0]), (2,))
    prompts = torch.full((2, 12), FREE)
    prompts[0, :3] = torch.tensor([5, 2, 9])
    prompts[1, :1] = 11
    request = Request(prompts, torch.tensor([0, 1]), torch.zeros(2))
    found = sample(teacher, request, flow, min_p=0.0)
    assert found[0, :3].tolist() == [5, 2, 9]
    assert found[1, :2].tolist() == [11, 7]
    greedy = logits(teacher, found).argmax(dim=-1)
    for row, start in ((0, 3), (1, 2)):
        for place in range(start, 12):
            previous = int(found[row, place - 1])
            expected = 7 if previous == 2 and place > start else int(greedy[row, place - 1])
            assert int(found[row, place]) == expected
    assert math.isfinite(float(greedy.sum()))
