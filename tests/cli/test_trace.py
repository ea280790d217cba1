"""seqmoe trace: the tokens of seqmoe chat's answers, the same file every time, all or nothing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.forecast.trace import Trace
from seqmoe_cli.main import main
from seqmoe_cli.text.tokenizer import Tokenizer
from tests.chat.models import endless_model
from tests.chat.screen import Program

CPU = ["--device", "cpu", "--dtype", "float32"]
PROMPTS: list[Any] = ["Hello", "Hello you", ["Tell me more", "And then?"]]
Record = Callable[..., Trace]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture
def record(tmp_path: Path, endless: Path, capsys: pytest.CaptureFixture[str]) -> Record:
    """Runs `seqmoe trace` on some prompts; the file it wrote is OUT in the test's folder."""

    def run(prompts: list[Any], *argv: str, model: Path = endless) -> Trace:
        (tmp_path / "p.json").write_text(json.dumps(prompts))
        files = ["--prompts", str(tmp_path / "p.json"), "-o", str(tmp_path / "OUT")]
        code = main(["trace", str(model), *files, *CPU, *argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        trace = Trace.load(tmp_path / "OUT")
        num_bytes = (tmp_path / "OUT").stat().st_size
        assert out == (
            f"{tmp_path / 'OUT'}: {len(trace):,} tokens in {trace.num_sequences} sequences, "
            f"{num_bytes:,} bytes\n"
        )
        return trace

    return run


def chat_tokens(
    model: Path, argv: list[str], capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> tuple[list[int], list[int], str]:
    """What `seqmoe chat --json` says of one answer: ids of the prompt, of the answer, its text."""
    patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["chat", str(model), "--json", *CPU, *argv]) == 0
    answer = json.loads(capsys.readouterr().out)
    return answer["prompt_token_ids"], answer["token_ids"], answer["text"]


def test_tokens_are_those_of_chat(
    record: Record,
    endless: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = record(PROMPTS, "-n", "9", "--seed", "40", "--temp", "1.5")
    assert (trace.model, trace.family) == ("endless", "qwen3_moe")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (3, 8, 2)
    assert trace.hidden is None and trace.weights is None
    assert trace.token_ids is not None and trace.num_sequences == 4
    flags = ["-n", "9", "--temp", "1.5", "--seed"]
    for n, text in enumerate(["Hello", "Hello you", "Tell me more"]):
        prompt, answer, said = chat_tokens(
            endless, ["-p", text, *flags, str(40 + n)], capsys, monkeypatch
        )
        part = trace.select(trace.sequence == n)
        assert part.token_ids is not None
        assert part.token_ids.tolist() == prompt + answer[:-1]  # nothing follows the last one
        assert part.phase.tolist() == [0] * len(prompt) + [1] * 8
    conversation = [
        {"role": "user", "content": "Tell me more"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And then?"},
    ]
    prompt = Tokenizer.open(endless).encode(ChatTemplate.open(endless).render(conversation))
    last = trace.token_ids[trace.sequence == 3].tolist()
    assert last[: len(prompt)] == prompt and len(last) == len(prompt) + 8


def test_an_answer_that_ends_is_whole(
    record: Record, packed: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = packed("qwen3_moe")
    wild = ["--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    prompt, answer, _ = chat_tokens(model, ["-p", "x", *wild, "--seed", "0"], capsys, monkeypatch)
    trace = record(["x"], *wild, model=model)
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == prompt + answer


def test_the_same_bytes_whatever_the_pool(record: Record, tmp_path: Path) -> None:
    flags = ("-n", "6", "--hidden", "5", "--weights", "--pool")
    files = []
    for pool in ("all", "all", "2slots"):
        trace = record(PROMPTS, *flags, pool)
        files.append((tmp_path / "OUT").read_bytes())
    assert files[0] == files[1] == files[2]
    assert trace.hidden is not None and trace.hidden.shape == (len(trace), 5)
    assert trace.weights is not None
    np.testing.assert_allclose(trace.weights.sum(2), 1, atol=2e-3)
    record(PROMPTS, *flags, "all", "--seed", "1")
    assert (tmp_path / "OUT").read_bytes() != files[0]


def test_lines_and_messages(record: Record, endless: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    expected = record(["Hello", messages], "-n", "1")
    lines = tmp_path / "p.jsonl"
    lines.write_text('"Hello"\n' + json.dumps(messages) + "\n")
    argv = ["trace", str(endless), *CPU, "-n", "1", "-o", str(tmp_path / "second")]
    assert main([*argv, "--prompts", str(lines)]) == 0
    assert (tmp_path / "second").read_bytes() == (tmp_path / "OUT").read_bytes()
    rendered = ChatTemplate.open(endless).render(messages)
    assert expected.token_ids is not None
    ids = expected.token_ids[expected.sequence == 1].tolist()
    assert ids == Tokenizer.open(endless).encode(rendered)


def test_ctrl_c_leaves_the_old_file(endless: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('["Hello"]')
    (tmp_path / "OUT").write_text("old")
    files = ["--prompts", str(tmp_path / "p.json"), "-o", str(tmp_path / "OUT")]
    argv = ["trace", str(endless), *files, "-c", "30000", *CPU]
    program = Program([sys.executable, "-m", "seqmoe_cli", *argv])
    try:
        program.wait(lambda screen: any("prompt 1 of 1: " in line for line in screen.lines))
        program.send("\x03")
        assert program.finish(60) == 130
        assert not any("prompt 1" in line for line in program.screen.lines)  # it was progress
    finally:
        program.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OUT", "p.json"]
    assert (tmp_path / "OUT").read_text() == "old"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"--prompts": "/no/such/file"}, 1, "--prompts /no/such/file"),
        ({"-o": "."}, 1, "-o . is no file"),
        ({"-o": "/dev/null"}, 1, "-o /dev/null is no file"),
        ({"-o": "/no/such/folder/x"}, 1, "/no/such/folder/x"),
        ({"-n": "0"}, 2, "--predict 0"),
        ({"--temp": "-1"}, 2, "--temp -1"),
        ({"--hidden": "129"}, 1, "--hidden 129"),
        ({"--hidden": "0"}, 2, "--hidden 0"),
        ({"--think": "maybe"}, 2, "--think 'maybe'"),
        ({"--pool": "lots"}, 2, "--pool"),
        ({"-c": "12"}, 1, "prompt 1: the prompt has"),
    ],
)
def test_refused_before_anything_is_loaded(
    changes: dict[str, str], code: int, words: str, endless: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("seqmoe_cli.engine.engine.Engine.open", lambda *_: pytest.fail("loaded"))
    (tmp_path / "p.json").write_text('["Hello"]')
    flags = {"--prompts": str(tmp_path / "p.json"), "-o": str(tmp_path / "OUT")} | changes
    assert main(["trace", str(endless), *(part for flag in flags.items() for part in flag)]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_conversation_that_outgrows_the_context(
    endless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text('[["Hello", "and on"]]')
    argv = ["trace", str(endless), "--prompts", str(tmp_path / "p.json"), *CPU, "-c", "40"]
    assert main([*argv, "-o", str(tmp_path / "OUT")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "prompt 1: the prompt has" in err and "holds 40" in err
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
