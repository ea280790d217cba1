"""Every kernel is tested on two devices: Triton's interpreter over CPU tensors, and CUDA.

Without a GPU the interpreter is switched on here, before triton is imported; with one, the process
compiles for the GPU and the interpreter's half is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    import triton

    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name == "interpret" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles in this process; TRITON_INTERPRET=1 interprets")
    return torch.device("cpu" if name == "interpret" else name)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` hands out NaN (or the largest integer), so that unwritten elements show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each kernel beside a step waits so long for the last layer, which does not come."""
    from seqmoe_kernels.pool import lock

    monkeypatch.setattr(lock, "LIMIT_NS", 10**6)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(20)
