"""TraceRecorder: watches the forwards of an engine and keeps the routing of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe_cli.forecast.trace import DECODE, PREFILL, Trace, expert_dtype
from seqmoe_weights.config import ModelConfig

PROJECTION_SEED = 0


class TraceRecorder:
    """Given to `Engine.record`. A forward counts when it is evaluated to its end.

    `weights` keeps the routing weights; `hidden_rank` R > 0 keeps the output of the final norm,
    which is what the head reads, projected to R dimensions. `weights_sha256` is that of the
    `PackedModel`, if there is one.
    """

    def __init__(
        self,
        model: str,
        config: ModelConfig,
        *,
        weights: bool = False,
        hidden_rank: int = 0,
        weights_sha256: str | None = None,
    ) -> None:
        self._model, self._config, self._weights_sha256 = model, config, weights_sha256
        self._keep_weights = weights
        self._projection = projection(config.hidden_size, hidden_rank) if hidden_rank else None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._columns: dict[str, list[NDArray[Any]]] = {}
        self._num_prompt_tokens = self._position = 0
        self.num_tokens = self.num_sequences = 0

    def begin(self, num_prompt_tokens: int) -> None:
        """What comes now is a sequence of its own, after an empty KV state."""
        self._num_prompt_tokens, self._position = num_prompt_tokens, 0
        self.num_sequences += 1

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """One layer of the forward under way: ids int32 [T, K], weights f32 [T, K]."""
        if layer == 0:
            self._layers.clear()  # of a forward that was broken off
        self._layers.append((ids, weights))

    def evaluated(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """The forward of these tokens is complete; hidden [T, H] is behind the final norm."""
        count = len(token_ids)
        position = np.arange(self._position, self._position + count)
        self._keep("token_ids", np.array(token_ids, np.uint32))
        self._keep("sequence", np.full(count, self.num_sequences - 1, np.uint32))
        decode = position >= self._num_prompt_tokens
        self._keep("phase", np.where(decode, DECODE, PREFILL).astype(np.uint8))
        experts, weights = (torch.stack(part, 1) for part in zip(*self._layers, strict=True))
        self._keep("experts", experts.cpu().numpy().astype(expert_dtype(self._config.num_experts)))
        if self._keep_weights:
            self._keep("weights", weights.half().cpu().numpy())
        if self._projection is not None:
            projected = hidden.float() @ torch.from_numpy(self._projection).to(hidden.device)
            self._keep("hidden", projected.half().cpu().numpy())
        self._layers.clear()
        self._position += count
        self.num_tokens += count

    def trace(self) -> Trace:
        """All that was recorded; there must be at least one token."""
        columns: dict[str, Any] = {k: np.concatenate(v) for k, v in self._columns.items()}
        columns["weights_sha256"] = self._weights_sha256
        if self._projection is not None:
            columns |= {"projection": self._projection, "projection_seed": PROJECTION_SEED}
        return Trace(self._model, self._config.family, self._config.num_experts, **columns)

    def _keep(self, name: str, rows: NDArray[Any]) -> None:
        self._columns.setdefault(name, []).append(rows)


def projection(hidden_size: int, rank: int, seed: int = PROJECTION_SEED) -> NDArray[np.float32]:
    """Random orthonormal columns, f32 [hidden_size, rank], rank <= hidden_size."""
    gauss = np.random.default_rng(seed).standard_normal((hidden_size, rank))
    return np.linalg.qr(gauss)[0].astype(np.float32)
