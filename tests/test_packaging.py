"""The wheel: three packages of our own at its top, nothing that another distribution owns."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"seqmoe_cli", "seqmoe_kernels", "seqmoe_weights"}

pytest.importorskip("build")
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = target.glob("*.whl")
    return made


def test_top_level_names(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == OURS


def test_wheel_holds_every_source_and_data_file(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(source_root))
        for source_root, package in (
            (ROOT, "seqmoe_cli"),
            (ROOT / "kernels", "seqmoe_kernels"),
            (ROOT / "weights", "seqmoe_weights"),
        )
        for path in (source_root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= packed


def test_program_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import seqmoe_kernels, seqmoe_weights, seqmoe_cli, sys; from seqmoe_cli.main import main; "
        "print(seqmoe_kernels.__file__, seqmoe_cli.__file__); sys.exit(main(['--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first = done.stdout.splitlines()[0].split()
    assert all(Path(place).is_relative_to(tmp_path) for place in first)
