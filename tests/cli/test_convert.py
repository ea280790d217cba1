"""`seqmoe convert` as it is typed: exit codes, what goes to stdout, what to stderr, signals."""

from __future__ import annotations

import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmoe_cli import paths
from seqmoe_cli.main import main
from seqmoe_weights.files import Meter
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import contents

SEQMOE = [sys.executable, "-m", "seqmoe_cli"]
Checkpoint = Callable[..., Path]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, and waiting for the disk is most of what a tiny conversion does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_it_ends_with_the_command_to_type(
    tmp_path: Path, checkpoint: Checkpoint, capsys: Captured
) -> None:
    source, target = checkpoint("qwen3_moe", fp8=True), tmp_path / "my models" / "packed"
    assert main(["convert", str(source), str(target)]) == 0
    out, err = capsys.readouterr()
    assert out == f"seqmoe chat '{target}'\n"
    assert shlex.split(out) == ["seqmoe", "chat", str(target)]
    assert "\x1b" not in err
    assert "\r" not in err
    for said in (str(source), str(target), "3 layers of 8 experts", "F8_E4M3, bits kept"):
        assert said in err
    assert "MiB resident + " in err
    assert "of disk free" in err
    PackedModel.open(target).verify()


def test_again_says_that_nothing_is_to_be_done(
    tmp_path: Path, checkpoint: Checkpoint, capsys: Captured
) -> None:
    command = ["convert", str(checkpoint("olmoe")), str(tmp_path / "packed")]
    assert main(command) == 0
    before = contents(tmp_path / "packed")
    first = capsys.readouterr().out
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out == first
    assert f"already converted, complete and equal: {tmp_path / 'packed'}" in err
    assert contents(tmp_path / "packed") == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", "{", "not valid JSON"),
        ("generation_config.json", '{"temperature": -1}', "temperature -1.0 is out of range"),
        ("chat_template.jinja", "{% for message in messages %}", "malformed at line 1"),
        ("tokenizer_config.json", '{"chat_template": 7}', "holds no text"),
        ("tokenizer.json", '{"model": {"type": "other"}}', "cannot be read"),
    ],
)
def test_what_would_be_no_chat_is_refused(
    name: str, content: str, said: str, tmp_path: Path, checkpoint: Checkpoint, capsys: Captured
) -> None:
    source = Path(shutil.copytree(checkpoint("olmoe"), tmp_path / "source"))
    (source / name).write_text(content)
    assert main(["convert", str(source), str(tmp_path / "packed")]) == 1
    out, err = capsys.readouterr()
    assert not out and name in err and said in err and len(err.splitlines()) == 2
    assert not (tmp_path / "packed").exists()


def test_a_model_without_a_template_is_converted(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source = Path(shutil.copytree(checkpoint("olmoe"), tmp_path / "source"))
    (source / "tokenizer_config.json").unlink()
    assert main(["convert", str(source), str(tmp_path / "packed")]) == 0


def test_damage_is_repaired_and_told(
    tmp_path: Path, checkpoint: Checkpoint, capsys: Captured
) -> None:
    command = ["convert", str(checkpoint("olmoe")), str(tmp_path / "packed")]
    assert main(command) == 0
    (tmp_path / "packed" / "experts-00001.bin").write_bytes(b"")
    assert main(command) == 0
    assert "damaged or missing files were written again" in capsys.readouterr().err
    PackedModel.open(tmp_path / "packed").verify()


def test_default_target_and_quantize(
    checkpoint: Checkpoint, tmp_path: Path, capsys: Captured
) -> None:
    source = shutil.copytree(checkpoint("mixtral"), tmp_path / "Tiny-8x")
    assert main(["convert", str(source), "--quantize", "fp8"]) == 0
    out, err = capsys.readouterr()
    assert out == f"seqmoe chat {paths.models_dir() / 'Tiny-8x'}\n"
    assert "F8_E4M3, rounded to FP8" in err
    assert PackedModel.open(paths.models_dir() / "Tiny-8x").manifest["quantize"] == "fp8"


def test_repo_id_from_the_cache(
    tmp_path: Path, checkpoint: Checkpoint, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["convert", "some/model"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    assert f"nor in the Hugging Face cache {tmp_path}" in err
    assert "hf download some/model" in err
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc", "utf-8")
    shutil.copytree(checkpoint("mixtral"), repo / "snapshots" / "abc")
    assert main(["convert", "some/model"]) == 0
    assert capsys.readouterr().out == f"seqmoe chat {paths.models_dir() / 'model'}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], 2, "SRC"),
        (["{source}", "{target}", "extra"], 2, "extra"),
        (["{source}", "{target}", "--quantize", "fp4"], 2, "--quantize 'fp4'"),
        (["{source}", "{target}", "--quantize", ""], 2, "--quantize ''"),
        (["{source}", "{target}", "--quantise", "fp8"], 2, "--quantise"),
        (["{target}/nothing"], 1, "does not exist"),
        (["{source}/config.json"], 1, "is a file"),
        (["{source}", "{source}"], 1, "DST is SRC"),
        (["{source}", "{source}/config.json"], 1, "config.json is a file"),
        (["{empty}", "{target}"], 1, "config.json is missing"),
    ],
)
def test_errors_are_short(
    tmp_path: Path,
    checkpoint: Checkpoint,
    capsys: Captured,
    arguments: list[str],
    code: int,
    named: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"source": checkpoint("olmoe"), "target": tmp_path / "t", "empty": tmp_path / "empty"}
    assert main(["convert", *(text.format(**places) for text in arguments)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 2
    assert named in err
    assert not (tmp_path / "t").exists()


def test_refusals_name_the_flag(tmp_path: Path, checkpoint: Checkpoint, capsys: Captured) -> None:
    target = str(tmp_path / "packed")
    assert main(["convert", str(checkpoint("olmoe")), target]) == 0
    capsys.readouterr()
    assert main(["convert", str(checkpoint("mixtral")), target]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 2)
    assert "--force" in err
    assert main(["convert", str(checkpoint("mixtral")), target, "--force"]) == 0
    assert PackedModel.open(Path(target)).config.family == "mixtral"


def test_ctrl_c_leaves_a_folder_that_can_be_resumed(
    tmp_path: Path, checkpoint: Checkpoint, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = checkpoint("olmoe"), tmp_path / "packed"
    add = Meter.add

    def interrupt(meter: Meter, num_bytes: int) -> None:
        add(meter, num_bytes)
        if (target / "experts-00000.bin").exists():
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "add", interrupt)
        assert main(["convert", str(source), str(target)]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        f"interrupted; run the same command again to go on from here: {target}"
    )
    assert main(["convert", str(source), str(target)]) == 0
    assert "resuming an interrupted conversion" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "whole")]) == 0
    assert contents(target) == contents(tmp_path / "whole")


def test_kill_9_at_some_moment(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source, target = checkpoint("qwen3_moe", num_experts=64), tmp_path / "packed"
    command = [*SEQMOE, "convert", str(source)]
    process = subprocess.Popen(
        [*command, str(target)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not target.exists():
        time.sleep(0.001)
    time.sleep(random.random() * 0.2)
    process.kill()
    process.wait()
    assert main(["convert", str(source), str(target)]) == 0
    assert main(["convert", str(source), str(tmp_path / "whole")]) == 0
    assert contents(target) == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"packed", "whole"}


def stderr_of_a_terminal(command: list[str], term: str) -> tuple[str, str]:
    """stdout, and what a terminal gets as stderr."""
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env=os.environ | {"TERM": term}
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end was closed
            break
        shown += data
    os.close(master)
    out, _ = process.communicate()
    assert process.returncode == 0
    return out.decode(), shown.decode()


def test_a_terminal_gets_a_bar_with_bytes_and_time(tmp_path: Path, checkpoint: Checkpoint) -> None:
    command = [*SEQMOE, "convert", str(checkpoint("qwen3_moe", num_experts=64))]
    out, shown = stderr_of_a_terminal([*command, str(tmp_path / "a")], "xterm-256color")
    assert out == f"seqmoe chat {tmp_path / 'a'}\n"
    assert "\x1b[" in shown
    assert "converting" in shown
    assert "MiB" in shown
    assert re.search(r"\d:\d\d:\d\d", shown)
    out, shown = stderr_of_a_terminal([*command, str(tmp_path / "b")], "dumb")
    assert out == f"seqmoe chat {tmp_path / 'b'}\n"
    assert "\x1b" not in shown
    assert f"converted: {tmp_path / 'b'}" in shown


def test_help_names_what_it_takes(capsys: Captured) -> None:
    assert main(["convert", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("SRC", "[DST]", "--quantize", "keep|fp8", "--force", "Nothing is downloaded"):
        assert word in out
