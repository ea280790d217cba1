"""How many files of the program one decode step runs through: few enough to read in one sitting."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize
from tests.checkpoints import packed_model
from tests.engine.conversations import PROMPT, SAMPLING, SHAPE

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'seqmoe_cli'}/"
MOST_FILES = 12


def files_of_one_step(engine: Engine) -> list[str]:
    """The files under seqmoe_cli whose functions the calling thread enters in the fifth decode
    step, in the order in which they are entered first."""
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            entered[file.removeprefix(PACKAGE)] = None

    steps = engine.generate(PROMPT, SAMPLING, max_tokens=9)
    for _ in range(5):  # the prompt, and four steps
        next(steps)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step = next(steps)
    finally:
        sys.setprofile(before)
    steps.close()
    assert step.token_id is not None and step.stats.phase == "decode"
    return [*entered]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = packed_model(tmp_path_factory.mktemp("one_step") / "model", "qwen3_moe", **SHAPE)
    pool = PoolSize.parse("30%")
    options = EngineOptions(pool, "cpu", "float32", 400, policy="decayed", prefetch="lookahead")
    engine = Engine.open(model, options)
    assert engine.prefetch is not None
    found = files_of_one_step(engine)
    engine.close()
    return found


def test_one_step_runs_through_few_files(files: list[str]) -> None:
    assert files[0] == "engine/engine.py" and "residency/prefetch.py" in files
    assert len(files) <= MOST_FILES, files


def test_the_documentation_lists_them_in_this_order(files: list[str]) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.split("## One decode step\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    assert [found[1] for line in table if (found := re.search(r"`(\w+/\w+\.py)`", line))] == files
