from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize


@pytest.fixture(scope="session")
def engine(endless: Path) -> Iterator[Engine]:
    engine = Engine.open(endless, EngineOptions(PoolSize.parse("12slots"), ctx_size=256))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def template(endless: Path) -> ChatTemplate:
    return ChatTemplate.open(endless)
