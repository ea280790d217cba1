"""Small predictors of the routing that `tests.traces.written_trace` writes."""

from __future__ import annotations

import torch

from seqmoe_cli.forecast.predictor import Predictor, PredictorShape
from tests.traces import EXPERTS, LAYERS, TOP_K, VOCAB


def small_shape(**sizes: int) -> PredictorShape:
    given = {"token_rank": 6, "vocab_size": VOCAB, "width": 16} | sizes
    return PredictorShape(LAYERS, EXPERTS, TOP_K, **given)


def random_predictor(shape: PredictorShape) -> Predictor:
    torch.manual_seed(1)
    predictor = Predictor(shape).eval()
    std = 0.3 * (16 / shape.width) ** 0.5  # in wider layers, larger ones make a chaos of the state
    for weight in predictor.parameters():
        torch.nn.init.normal_(weight, std=std)
    return predictor
