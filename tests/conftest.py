"""What every test stands on: no network, no file of the user touched, Triton interpreted when there
is no GPU, and tiny models that are built once per test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from seqmoe_cli.environment import prepare_torch
from tests.shared_folders import made_once, name_of

if TYPE_CHECKING:
    from seqmoe_cli.text.tokenizer import Tokenizer

prepare_torch()

import torch  # noqa: E402 - reads the environment

ROOT = Path(__file__).parents[1]
HAS_GPU = torch.cuda.is_available()

os.environ["HF_HUB_OFFLINE"] = "1"
# For the programs that tests start: the packages, also where they are not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "weights"))
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when a kernel is defined
torch.set_num_threads(1)  # on tiny tensors a second thread only waits for the first

# A busy machine is no reason to fail.
hypothesis.settings.register_profile(
    "seqmoe", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("seqmoe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seqmoe_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder in place of the user's own history, sessions and models."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SEQMOE_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **options)`: a tiny Hugging Face checkpoint, written once per test run.
    Tests must not change it. The options are those of `checkpoints.write_checkpoint`."""
    from tests.checkpoints import write_checkpoint

    def get(family: str, **options: Any) -> Path:
        def build(folder: Path) -> None:
            write_checkpoint(folder / "checkpoint", family, **options)

        return made_once(tmp_path_factory, name_of(family, options), build) / "checkpoint"

    return get


@pytest.fixture(scope="session")
def packed(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`packed(family, **options)`: the same checkpoint, converted. Tests must not change it."""
    from seqmoe_weights.convert import convert

    def get(family: str, quantize: str = "keep", **options: Any) -> Path:
        def build(folder: Path) -> None:
            convert(checkpoint(family, **options), folder / "packed", quantize, False)

        name = name_of(f"{family}-packed-{quantize}", options)
        return made_once(tmp_path_factory, name, build) / "packed"

    return get


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, split, as a Hugging Face checkpoint; skipped when its source is not installed."""
    pytest.importorskip("gguf")
    from tools.demo_model.split import make_checkpoint

    def build(folder: Path) -> None:
        make_checkpoint(folder / "checkpoint")

    try:
        return made_once(tmp_path_factory, "demo", build) / "checkpoint"
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_model(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split model, converted. Tests must not change it."""
    from seqmoe_weights.convert import convert

    def build(folder: Path) -> None:
        convert(demo_checkpoint, folder / "packed", "keep", False)

    return made_once(tmp_path_factory, "demo-packed", build) / "packed"


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny packed model that ends no answer by itself. Tests must not change it."""
    from tests.chat.models import endless_model

    return endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="session")
def tokenizer(endless: Path) -> Tokenizer:
    from seqmoe_cli.text.tokenizer import Tokenizer

    return Tokenizer.open(endless)
