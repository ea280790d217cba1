"""Where routing comes from: routers out of clusters of tokens, and the neurons experts keep.

Tokens whose feed-forward inputs point the same way go to the same experts. While the model is
trained, every expert drops the neurons that matter least for the tokens that it gets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.sparse.decoder import Decoder, ffn, hidden_states, route
from tools.demo_model.sparse.student import Student

KMEANS_ROUNDS = 25


@torch.no_grad()
def first_routers(dense: Decoder, rows: Tensor, num_experts: int) -> Tensor:
    """Routers [L, E, H] that tell clusters of the feed-forward inputs of `rows` apart."""
    routers = []

    def visit(_: int, inputs: Tensor) -> None:
        routers.append(cluster_router(inputs.flatten(0, 1).float(), num_experts))

    hidden_states(dense, rows, visit)
    return torch.stack(routers)


def cluster_router(inputs: Tensor, num_experts: int) -> Tensor:
    """Linear map [E, H] whose largest output names the cluster of an input; inputs [S, H].

    Its outputs have unit variance over the inputs.
    """
    clusters = balanced_clusters(inputs - inputs.mean(dim=0), num_experts)
    wanted = F.one_hot(clusters, num_experts).float() - 1 / num_experts
    moments = inputs.T @ inputs / len(inputs)
    moments.diagonal().add_(1e-2 * moments.diagonal().mean())
    router: Tensor = torch.linalg.solve(moments, inputs.T @ wanted / len(inputs)).T
    return router / (inputs @ router.T).std()


def balanced_clusters(points: Tensor, num_clusters: int) -> Tensor:
    """k-means on directions, with a handicap for big clusters: cluster of each point, int64 [S]."""
    points = F.normalize(points, dim=-1)
    picked = torch.randperm(len(points), device=points.device)[:num_clusters]
    centres, handicap = points[picked], points.new_zeros(num_clusters)
    for _ in range(KMEANS_ROUNDS):
        nearest = (points @ centres.T - handicap).argmax(dim=-1)
        share = torch.bincount(nearest, minlength=num_clusters) * num_clusters / len(points)
        handicap = handicap + 0.03 * (share.clamp(max=4) - 1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(share[:, None] > 0, F.normalize(sums, dim=-1), centres)
    return nearest


@torch.no_grad()
def saliency(model: Decoder, rows: Tensor) -> Tensor:
    """How much of its layer's output each expert's copy of a neuron makes: [L, E, N].

    The mean over tokens of its squared contribution, relative to the squared output. A token that
    an expert does not get counts as zero.
    """
    found = []

    def visit(i: int, inputs: Tensor) -> None:
        layer, experts = model.layers[i], model.routing(i)
        assert experts is not None
        x = inputs.flatten(0, 1)
        activation = F.silu(F.linear(x, layer.gate)) * F.linear(x, layer.up)
        weights, _ = route(x, experts.router, model.top_k)
        size = ffn(x, layer, experts, model.top_k)[0].float().square().sum(dim=-1, keepdim=True)
        by_expert = weights.square().T @ (activation.float().square() / size) / len(x)
        column = layer.down.float().square().sum(dim=0)
        found.append(by_expert * experts.scale.float().square() * column)

    hidden_states(model, rows, visit)
    return torch.stack(found)


@torch.no_grad()
def prune(student: Student, found: Tensor, width: int) -> None:
    """Let every expert keep the `width` most salient neurons that it holds."""
    held = found.masked_fill(~student.support, -1.0)
    best = held.topk(width, dim=-1).indices
    student.support = torch.zeros_like(student.support).scatter(-1, best, True) & student.support
