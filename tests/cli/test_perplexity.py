"""seqmoe perplexity against transformers on tiny checkpoints, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmoe_cli.bench.perplexity import windows
from seqmoe_cli.main import main
from seqmoe_cli.text.files import shipped_text
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.convert import convert

CPU = ["--device", "cpu", "--dtype", "float32"]
Packed = Callable[..., Path]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(shipped_text()[0][:400].replace("\n", "\r\n").encode() + "Ü🙂".encode())
    return path


@pytest.fixture
def perplexity(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Runs `seqmoe perplexity --json` on the text; nothing may be on stderr."""

    def run(folder: Path, *argv: str) -> dict[str, Any]:
        code = main(["perplexity", str(folder), "--file", str(text_file), "--json", *CPU, *argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


@pytest.mark.parametrize(("family", "ctx_size"), [("qwen3_moe", 2048), ("mixtral", 32)])
def test_equal_to_transformers(
    family: str,
    ctx_size: int,
    checkpoint: Packed,
    packed: Packed,
    text_file: Path,
    perplexity: Callable[..., dict[str, Any]],
) -> None:
    from transformers import AutoModelForCausalLM

    found = perplexity(packed(family), "-c", str(ctx_size))
    reference = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    ids = torch.tensor(Tokenizer.open(checkpoint(family)).encode(text_file.read_bytes().decode()))
    total = 0.0
    for window in windows(len(ids), ctx_size):
        part = ids[window.start : window.stop]
        with torch.inference_mode():
            logits = reference(part[None]).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    assert found["tokens"] == len(ids) - 1
    assert found["nll_per_token"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll_per_token"]))
    assert len(windows(len(ids), ctx_size)) > 1 or ctx_size == 2048


def test_the_pool_changes_the_hit_rate_and_nothing_else(
    packed: Packed, perplexity: Callable[..., dict[str, Any]]
) -> None:
    small, large = (
        perplexity(packed("olmoe"), "-c", "64", "--pool", pool) for pool in ("2slots", "all")
    )
    assert small["nll_per_token"] == large["nll_per_token"]
    assert (small["num_slots"], large["num_slots"]) == (2, 24)
    assert small["hit_rate"] < large["hit_rate"] < 1
    record_bytes = large["pool_bytes"] // 24
    assert large["fetched_bytes"] == large["misses"] * record_bytes == 24 * record_bytes


def test_plain_output_is_one_line(
    packed: Packed, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perplexity", str(packed("olmoe")), "--file", str(text_file), *CPU]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("perplexity ") and out.count("\n") == 1


@pytest.mark.parametrize(("content", "code"), [(b"", 1), (b"x", 1), (b"caf\xe9 au lait", 1)])
def test_a_text_without_anything_to_predict_is_refused(
    content: bytes, code: int, packed: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert main(["perplexity", str(packed("olmoe")), "--file", str(path), *CPU]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err and len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("argv", "code", "name"),
    [
        ([], 2, "--file"),
        (["--file", "/no/such/text"], 1, "--file /no/such/text cannot be read"),
        (["--file", __file__, "-c", "1"], 2, "--ctx-size 1"),
        (["--file", __file__, "--pool", "-1"], 2, "--pool"),
        (["--file", __file__, "--vram", "inf"], 2, "--vram"),
        (["--file", __file__], 1, "/no/such/model"),
    ],
)
def test_bad_arguments(
    argv: list[str], code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perplexity", "/no/such/model", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert name in err and len(err.splitlines()) <= 2


def test_a_model_out_of_its_mind_is_an_error(
    checkpoint: Packed, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(checkpoint("olmoe"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] *= 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    convert(source, tmp_path / "packed", "keep", False)
    argv = ["perplexity", str(tmp_path / "packed"), "--file", str(text_file), "--json", *CPU]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "negative log-likelihood" in err and "--verify" in err
