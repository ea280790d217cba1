"""seqmoe train: from a model that talks to itself, or from traces, to a predictor that info
knows; resumed, refused, damaged."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.chat.own_text import OwnText
from seqmoe_cli.chat.template import ChatTemplate
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.forecast.recorder import TraceRecorder
from seqmoe_cli.forecast.trace import DECODE, Trace
from seqmoe_cli.main import main
from seqmoe_cli.settings import EngineOptions, SamplingParams
from seqmoe_cli.text.tokenizer import Tokenizer
from seqmoe_weights.convert import convert
from seqmoe_weights.packed import PackedModel
from tests.chat.models import endless_model
from tests.chat.screen import Program
from tests.checkpoints import packed_model

CPU = ["--device", "cpu", "--dtype", "float32"]
QUICK = ["--width", "16", "--passes", "1"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def own(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of what the endless model said to itself."""
    folder = tmp_path_factory.mktemp("own")
    files = ["--record", str(folder / "own"), "-o", str(folder / "p")]
    argv = ["train", str(endless), *CPU, *QUICK, "--tokens", "1600", "-c", "700", *files]
    assert main(argv) == 0
    return folder / "own"


@pytest.fixture
def model(endless: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(endless, tmp_path / "model"))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    capsys.readouterr()
    code = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_from_traces_to_a_forecast(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = tmp_path / "judged"
    page = run(capsys, "train", model, *CPU, *QUICK, "--trace", own, "--held-out", judged)
    assert page.count("\n| predictor") == 1 and "times decayed counts." in page
    assert page.splitlines()[-1].startswith(f"{model}: a predictor of ")
    whole, part = Trace.load(own), Trace.load(judged)
    assert part.num_sequences == 1 < whole.num_sequences

    facts = json.loads(run(capsys, "info", model, "--json", *CPU))["predictor"]
    assert facts["shape"]["width"] == 16 and facts["num_tokens"] == len(whole) - len(part)
    assert "recall, step 1" in run(capsys, "info", model, *CPU)


def test_what_is_recorded_is_what_was_said(endless: Path, own: Path) -> None:
    """The routing of own text is that of a prompt with the same tokens, its answers are marked, and
    the same seed says the same again."""
    tokenizer = Tokenizer.open(endless)
    engine = Engine.open(endless, EngineOptions(device="cpu", dtype="float32", ctx_size=700))
    whole = Trace.load(own)
    assert 1600 <= len(whole) < 3000 and 0.3 < (whole.phase == DECODE).mean() < 0.95
    first = whole.select(whole.sequence == 0)
    assert first.token_ids is not None
    ids = first.token_ids.tolist()
    recorder = TraceRecorder("x", engine.config)
    recorder.begin(len(ids))
    engine.record(recorder)
    engine.log_likelihoods(ids)
    engine.record(None)
    assert (recorder.trace().experts == first.experts).all()
    header = tokenizer.encode("<|im_start|>assistant\n")
    starts = np.flatnonzero(np.diff(first.phase.astype(int), prepend=0) == 1)
    assert len(starts) >= 1
    for start in starts.tolist():
        assert ids[start - len(header) : start] == header

    sampling = SamplingParams(temperature=1.0)
    text = OwnText(engine, ChatTemplate.open(endless), tokenizer, sampling, answer_tokens=20)
    again = [
        text.trace(TraceRecorder("x", engine.config), 200, seed, lambda done: None).token_ids
        for seed in (5, 5, 6)
    ]
    engine.close()
    assert again[0] is not None and again[1] is not None and again[2] is not None
    assert again[0].tolist() == again[1].tolist() != again[2].tolist()


def test_a_checkpoint_and_a_file(
    endless: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, saved = tmp_path / "p", tmp_path / "c"
    argv = [
        "train",
        "--trace",
        own,
        "-o",
        file,
        *CPU,
        "--width",
        16,
        "--checkpoint",
        saved,
        "--json",
    ]
    first = json.loads(run(capsys, *argv, "--passes", 1))
    assert first["passes"] == 1 and saved.is_file()
    more = json.loads(run(capsys, *argv, "--passes", 3))
    assert more["passes"] == 3 and more["tokens_seen"] > first["tokens_seen"]
    assert {s["forecast"] for s in more["scores"]} >= {"predictor", "popularity"}
    assert PackedModel.open(endless).predictor is None
    both = ["train", "--trace", own, "--trace", own, "-o", file, *CPU, *QUICK, "--json"]
    assert json.loads(run(capsys, *both))["num_tokens"] >= first["num_tokens"]


def test_a_damaged_one_is_refused(
    model: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "train", model, "--trace", own, *CPU, *QUICK)
    name = PackedModel.open(model).predictor
    assert name is not None
    data = bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    for form in ([], ["--json"]):  # all that is not damaged is shown
        assert main(["info", str(model), *CPU, *form]) == 1
        out, err = capsys.readouterr()
        assert name in err and len(err.splitlines()) == 2
        assert name in out and "head" in out and "host memory: all expert records" in out
    assert "wrong SHA-256" in json.loads(out)["predictor"]["problem"]
    Engine.open(model, EngineOptions(device="cpu", ctx_size=64)).close()  # it needs none
    run(capsys, "train", model, "--trace", own, *CPU, *QUICK)
    assert "recall, step 1" in run(capsys, "info", model, *CPU)


def test_one_that_was_not_judged(
    model: Path, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it is judged, it is there all the same."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("seqmoe_cli.commands.train._judge", interrupted)
        assert main(["train", str(model), "--trace", str(own), *CPU, *QUICK]) == 130
    assert "not judged" in run(capsys, "info", model, *CPU)


def test_it_belongs_to_the_weights(
    endless: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another model of the same shape it is refused; packed in another way, the same model can
    have it."""
    source, file = endless.parent / "checkpoint", tmp_path / "p"
    again = tmp_path / "again"
    convert(source, again, "fp8", False)
    other = packed_model(tmp_path, "qwen3_moe", seed=1, max_position_embeddings=32768)
    run(capsys, "train", "--trace", own, "-o", file, *CPU, *QUICK)
    bench = ["bench", "-p", "0", "-n", "2", "-r", "1", "--no-warmup", "--pool", "50%", *CPU]
    bench += ["--policy", "forecast", "--predictor", file]
    run(capsys, *bench, endless)
    run(capsys, *bench, again)
    strange = tmp_path / "strange"
    replace(Trace.load(own), weights_sha256="0" * 64).save(strange)
    for argv in (
        [*bench, other],
        ["train", other, "--trace", own, *CPU, *QUICK],
        ["train", "--trace", own, "--trace", strange, "-o", tmp_path / "q", *CPU, *QUICK],
    ):
        assert main([str(word) for word in argv]) == 1
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 2, err
        assert "the weights of" in err or "different models" in err


def test_on_a_terminal(own: Path, tmp_path: Path) -> None:
    argv = ["train", "--trace", str(own), *CPU, "--width", "16", "--passes", "100"]
    program = Program([sys.executable, "-m", "seqmoe_cli", *argv, "-o", str(tmp_path / "p")])
    program.wait(lambda screen: any("training" in line and "loss" in line for line in screen.lines))
    assert program.finish(120) == 0
    text = "\n".join(program.screen.lines)
    assert "a predictor of" in text and "training" not in text


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "no MODEL"),
        (["--trace", "qwen3"], 2, "no MODEL"),
        (["MODEL", "--width", "8"], 2, "--width 8"),
        (["MODEL", "--tokens", "1"], 2, "--tokens 1"),
        (["MODEL", "--minutes", "0"], 2, "--minutes 0"),
        (["MODEL", "-o", "/no/such/folder/x"], 1, "/no/such/folder/x"),
        (["MODEL", "--trace", "qwen3"], 1, "48 layers of 128 experts"),
        (["MODEL", "--trace", "/no/such/file"], 1, "/no/such/file"),
        (["MODEL", "-c", "20"], 1, "no answer"),
        (["/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_refused(
    argv: list[str], code: int, words: str, endless: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(endless) if word == "MODEL" else word for word in argv]
    assert main(["train", *argv, *CPU]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) <= 2


def test_packed_is_untouched_by_a_failed_training(
    packed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = packed("mixtral")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert main(["train", str(model), "--trace", "qwen3", *CPU]) == 1
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
