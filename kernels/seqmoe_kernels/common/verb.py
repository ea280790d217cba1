"""A verb: one function over tensors. Its body launches Triton kernels; beside it stands a reference
in plain torch, which runs where the tensors are not on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import triton

P = ParamSpec("P")
R = TypeVar("R")


class Verb(Generic[P, R]):
    """Called, it launches on a GPU and runs the reference elsewhere. `launch` and `reference` are
    the two by themselves, for tests: in Triton's interpreter `launch` takes tensors of the CPU."""

    def __init__(self, launch: Callable[P, R], reference: Callable[P, R]) -> None:
        self._launch, self.reference = launch, reference
        functools.update_wrapper(self, launch)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self._launch if _on_gpu((*args, *kwargs.values())) else self.reference
        return run(*args, **kwargs)

    def launch(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises ValueError for tensors of the CPU, unless Triton interprets."""
        if not (triton.knobs.runtime.interpret or _on_gpu((*args, *kwargs.values()))):
            raise ValueError("a Triton kernel needs CUDA tensors, got those of a cpu")
        return self._launch(*args, **kwargs)


def verb(reference: Callable[P, R]) -> Callable[[Callable[P, R]], Verb[P, R]]:
    """Makes a verb of the function below it, which takes the same arguments as `reference`."""
    return lambda launch: Verb(launch, reference)


_HOLDERS = (torch.Tensor, tuple, list)


def _on_gpu(values: Any) -> bool:
    """Whether a tensor is on a GPU, also inside of tuples."""
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else _on_gpu(value)
        for value in values
        if isinstance(value, _HOLDERS)
    )
