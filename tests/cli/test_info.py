"""seqmoe info: facts, plan and text of whole models; errors for damaged and unfinished ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from seqmoe_cli.main import main
from seqmoe_weights.convert import convert

CPU = ["--device", "cpu", "--dtype", "float32"]
Packed = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def info(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `seqmoe info`: exit code, stdout, stderr."""

    def run(folder: Path, *argv: str) -> tuple[int, str, str]:
        return main(["info", str(folder), *CPU, *argv]), *capsys.readouterr()

    return run


@pytest.fixture
def facts(info: Run) -> Callable[..., dict[str, Any]]:
    """What `seqmoe info --json` prints about a model that is as it should be."""

    def run(folder: Path, *argv: str) -> dict[str, Any]:
        code, out, err = info(folder, "--json", *argv)
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


@pytest.fixture
def copy(packed: Packed, tmp_path: Path) -> Path:
    """A packed model that a test may damage."""
    return shutil.copytree(packed("olmoe"), tmp_path / "copy")


@pytest.mark.parametrize("fp8", [False, True])
def test_facts_add_up(
    fp8: bool, packed: Packed, checkpoint: Packed, facts: Callable[..., dict[str, Any]]
) -> None:
    options = {"fp8": True} if fp8 else {}
    folder = packed("qwen3_moe", **options)
    found = facts(folder)
    tensors = load_file(checkpoint("qwen3_moe", **options) / "model.safetensors")
    weights = {name: t for name, t in tensors.items() if not name.endswith("_scale_inv")}
    assert found["params"] == sum(t.numel() for t in weights.values())
    idle = 3 * (8 - 2) * 3 * 128 * 128  # layers, experts that a token leaves out, their weights
    assert found["active_params"] == found["params"] - idle
    assert found["expert_dtype"] == ("F8_E4M3" if fp8 else "BF16")

    groups = {group["name"]: group for group in found["resident"]["groups"]}
    assert set(groups) == {"attention", "embedding", "head", "norms", "router"}
    names = [name for name in tensors if ".experts." not in name]
    assert sum(group["tensors"] for group in groups.values()) == len(names)
    assert groups["attention"]["dtypes"] == (["F32", "F8_E4M3"] if fp8 else ["BF16"])
    assert groups["router"]["bytes"] == 3 * 8 * 128 * 2
    header = found["resident"]["bytes"] - sum(group["bytes"] for group in groups.values())
    assert 0 < header < 10_000

    record = found["record"]
    assert found["pooled"]["bytes"] == 3 * 8 * record["bytes"]
    assert record["bytes"] % 4096 == 0
    assert [part["name"] for part in record["parts"]][:3] == ["gate", "up", "down"]
    assert found["size_bytes"] == sum(
        file.stat().st_size for file in folder.iterdir() if file.suffix in (".bin", ".safetensors")
    )


def test_plan(packed: Packed, facts: Callable[..., dict[str, Any]]) -> None:
    plan = facts(packed("olmoe"), "--pool", "6slots", "-c", "100", "--vram", "0.5")["plan"]
    assert (plan["device"], plan["dtype"], plan["ctx_size"]) == ("cpu", "float32", 100)
    assert plan["num_slots"] == 6
    assert plan["kv_bytes"] == 2 * 3 * 4 * 32 * 100 * 4 // 2  # half as many key heads as queries
    assert plan["budget_bytes"] == 2**29
    lines = {line["name"]: line for line in plan["lines"]}
    assert lines["pool"]["bytes"] == plan["pool_bytes"]
    assert "--pool 6slots" in lines["pool"]["reason"]
    assert all(line["reason"] for line in plan["lines"])


def test_generation_settings_say_where_they_come_from(
    packed: Packed, facts: Callable[..., dict[str, Any]]
) -> None:
    folder = packed("olmoe")
    generation = facts(folder)["generation"]
    given = json.loads((folder / "generation_config.json").read_text())
    assert generation["settings"]["temp"] == {
        "value": given["temperature"],
        "origin": "generation_config.json",
    }
    assert generation["settings"]["seed"] == {"value": None, "origin": "default"}
    assert set(given["eos_token_id"]) <= set(generation["stop_ids"])
    assert generation["chat_template"] in ("tokenizer_config.json", "chat_template.jinja")


def test_text_for_people_has_every_section_and_no_escape_codes(packed: Packed, info: Run) -> None:
    code, out, err = info(packed("olmoe"), "--verify")
    assert (code, err) == (0, "")
    for words in (
        "8, 2 used by a token",
        "\nPooled, ",
        "routed experts  24 records",
        "\nResident, ",
        "\nRecord of one expert, 102,400 bytes",
        "\nGeneration\n",
        "\nMemory plan on this machine (cpu, float32)\n",
        "every hash is right",
    ):
        assert words in out
    assert "\x1b" not in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_verified_only_when_asked(packed: Packed, facts: Callable[..., dict[str, Any]]) -> None:
    assert facts(packed("olmoe"))["verified"] is False
    assert facts(packed("olmoe"), "--verify")["verified"] is True


def test_a_plan_that_does_not_fit_still_shows_the_model(packed: Packed, info: Run) -> None:
    code, out, err = info(packed("olmoe"), "--json", "--pool", "1slots")
    assert code == 1
    assert "--pool 1slots" in err and len(err.splitlines()) <= 2
    found = json.loads(out)
    assert found["plan"] is None
    assert found["num_experts"] == 8


def test_a_flipped_byte_is_found_by_verify_alone(copy: Path, info: Run) -> None:
    file = copy / "experts-00001.bin"
    data = bytearray(file.read_bytes())
    data[5 * 102_400 + 77] ^= 1
    file.write_bytes(data)
    assert info(copy)[0] == 0
    code, out, err = info(copy, "--verify")
    assert (code, out) == (1, "")
    assert file.name in err and "layer 1" in err and "expert 5" in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("name", ["experts-00002.bin", "resident.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_short_or_missing_file_is_named(name: str, cut: bool, copy: Path, info: Run) -> None:
    file = copy / name
    if cut:
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    code, out, err = info(copy)
    assert (code, out) == (1, "")
    assert name in err and len(err.splitlines()) <= 2


def test_a_damaged_header_is_named(copy: Path, info: Run) -> None:
    file = copy / "resident.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = b"\xff" * 8
    file.write_bytes(data)
    code, out, err = info(copy)
    assert (code, out) == (1, "")
    assert file.name in err and len(err.splitlines()) <= 2


def test_an_unfinished_conversion_is_no_model(
    checkpoint: Packed, tmp_path: Path, info: Run
) -> None:
    def stop_half_way(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint("olmoe"), tmp_path / "half", "keep", False, stop_half_way)
    code, out, err = info(tmp_path / "half")
    assert (code, out) == (1, "")
    assert "unfinished" in err and "convert" in err


def test_a_checkpoint_is_no_packed_model(checkpoint: Packed, info: Run) -> None:
    code, out, err = info(checkpoint("olmoe"))
    assert (code, out) == (1, "")
    assert "seqmoe convert" in err
