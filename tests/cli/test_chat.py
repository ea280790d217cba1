"""`seqmoe chat`: what is refused, how short, and before anything is loaded."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmoe_cli.main import main
from seqmoe_weights.convert import convert

Refused = Callable[..., str]


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Refused:
    """`refused(*flags, code=2)`: the message of a run that fails; MODEL does not even exist."""

    def run(*flags: str, code: int = 2, model: str = "no-such-model", stdin: bytes = b"") -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert main(["chat", model, *flags]) == code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("seqmoe: ") and 1 <= err.count("\n") <= 2
        return err

    return run


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--temp", ["nan", "-0.1", "inf", "1e9", "warm"]),
        ("--top-k", ["-1", "1.5", "99999999999"]),
        ("--top-p", ["nan", "0", "1.01", "-1"]),
        ("--min-p", ["nan", "1.5", "-0.1"]),
        ("--repeat-penalty", ["nan", "0", "-1", "1e6"]),
        ("--presence-penalty", ["nan", "-1", "1e6"]),
        ("--frequency-penalty", ["nan", "-1", "1e6"]),
        ("--seed", ["-1", "nan", str(2**64)]),
        ("--predict", ["0", "-1", "99999999999", "many"]),
        ("--ctx-size", ["0", "-5", "99999999999"]),
        ("--vram", ["nan", "0", "-1", "inf"]),
        ("--pool", ["nan%", "-1slots", "0%", "101%", "0slots", "1.5slots", "lots", ""]),
        ("--device", ["gpu", ""]),
        ("--dtype", ["float16"]),
        ("--think", ["maybe"]),
    ],
)
def test_absurd_values(refused: Refused, flag: str, values: list[str]) -> None:
    for value in values:
        assert flag in refused("-p", "x", f"{flag}={value}"), value


def test_no_prompt(refused: Refused) -> None:
    assert "there is no prompt" in refused()
    assert "there is no prompt" in refused("--json")
    assert "there is no prompt" in refused("-p", "")
    assert "--raw" in refused("--raw", "-s", "x", "-p", "y")
    assert "--file" in refused("-f", "/no/such/file", code=1)
    assert "no such option" in refused("--no-such-flag", "-p", "x").lower()


def test_a_model_that_is_not_there(refused: Refused, seqmoe_home: Path, tmp_path: Path) -> None:
    message = refused("-p", "x", code=1)
    assert "no model 'no-such-model'" in message and "seqmoe convert" in message
    (seqmoe_home / "models" / "other").mkdir(parents=True)
    assert "models there: other" in refused("-p", "x", code=1)
    assert "other" in refused("-p", "x", code=1, model="other")  # an empty folder
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is a file" in refused("-p", "x", code=1, model=str(file))


def test_a_model_by_its_name(
    packed: Callable[..., Path],
    seqmoe_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (seqmoe_home / "models").mkdir()
    (seqmoe_home / "models" / "tiny").symlink_to(packed("qwen3_moe"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["chat", "tiny", "-p", "hi", "-n", "2"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_a_model_without_a_template(
    refused: Refused,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in checkpoint("qwen3_moe").iterdir():
        (source / file.name).symlink_to(file)
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (source / "tokenizer_config.json").unlink()
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    model = tmp_path / "model"
    convert(source, model, "keep", False)
    assert "--raw" in refused("-p", "x", code=1, model=str(model))
    assert main(["chat", str(model), "--raw", "-p", "hi", "-n", "2"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_nothing_heavy_is_imported_for_a_usage_error() -> None:
    program = (
        "import sys; from seqmoe_cli.main import main;"
        "code = main(['chat', 'x', '-p', 'x', '--temp', 'nan']);"
        "print(code, sorted({'torch', 'prompt_toolkit', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 []\n"
