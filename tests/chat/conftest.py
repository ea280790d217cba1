from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize
from seqmoe_cli.text.tokenizer import Tokenizer
from tests.chat.models import endless_model


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="session")
def engine(endless: Path) -> Iterator[Engine]:
    engine = Engine.open(endless, EngineOptions(PoolSize.parse("12slots"), ctx_size=256))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tokenizer(endless: Path) -> Tokenizer:
    return Tokenizer.open(endless)


@pytest.fixture(scope="session")
def template(endless: Path) -> ChatTemplate:
    return ChatTemplate.open(endless)
