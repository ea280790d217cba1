"""seqmoe doctor on this machine, and on one where something is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqmoe_cli.main import main

SEQMOE = [sys.executable, "-m", "seqmoe_cli"]


def test_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = {line.split("  ")[0] for line in out.splitlines()}
    assert names >= {"torch", "triton", "gpu", "ram", "pin limit", "disk"}
    assert torch.__version__ in out


def test_report_for_scripts(capsys: pytest.CaptureFixture[str], seqmoe_home: Path) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["ram"]["numbers"]["total_bytes"] > 2**28
    assert checks["disk"]["numbers"]["path"] == str(seqmoe_home / "models")
    if not torch.cuda.is_available():
        assert checks["gpu"]["status"] == report["status"] == "warning"
        assert "link" not in checks


@pytest.mark.gpu
def test_link_speed_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["link"]["numbers"]["gb_per_s"] > 1
    assert checks["gpu"]["numbers"]["total_bytes"] > 2**30


def test_a_broken_torch_is_reported_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: not found')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [*SEQMOE, "doctor", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["status"] == checks["torch"]["status"] == "error"
    assert "libcudart" in checks["torch"]["value"]
    assert checks["torch"]["hint"]
    assert checks["disk"]["status"] == "ok"


def test_a_models_folder_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQMOE_HOME", "/proc/nowhere")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert main(["doctor"]) == 1
    assert "not writable" in capsys.readouterr().out
