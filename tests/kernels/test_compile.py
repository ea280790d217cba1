"""Every kernel compiles to machine code, also for cards without FP8, which interpreting it does
not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_attention_step_kernel",
    "_begin_step_kernel",
    "_choose_kernel",
    "_combine_kernel",
    "_copy_kernel",
    "_dequantize_kernel",
    "_distance_kernel",
    "_down_kernel",
    "_draw_kernel",
    "_fetch_kernel",
    "_gate_up_kernel",
    "_gemv_kernel",
    "_gru_kernel",
    "_candidates_kernel",
    "_judge_kernel",
    "_mix_kernel",
    "_outlook_kernel",
    "_penalty_kernel",
    "_publish_kernel",
    "_resolve_kernel",
    "_rms_norm_kernel",
    "_rotary_kernel",
    "_route_kernel",
    "_row_sum_kernel",
    "_schedule_kernel",
    "_top_k_kernel",
    "_top_p_kernel",
    "_verify_kernel",
    "_weigh_kernel",
    "_window_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile(arch: int, tmp_path: Path) -> None:
    here = Path(__file__).parent
    package = str(here.parents[1] / "kernels")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": package,
    }
    done = subprocess.run(
        [sys.executable, str(here / "compile_kernels.py"), str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FP_FUSION" not in done.stderr  # a warning that users would see
    assert set(done.stdout.split()) == KERNELS


def test_every_kernel_is_in_the_list() -> None:
    package = Path(__file__).parents[2] / "kernels" / "seqmoe_kernels"
    source = "".join(file.read_text() for file in package.rglob("*.py"))
    written = {
        line.split()[1].split("(")[0]
        for line in source.splitlines()
        if "_kernel(" in line and line.startswith("def ")
    }
    assert written == KERNELS
