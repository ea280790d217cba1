"""config.json: what is read, and how everything else is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqmoe_weights.errors import CheckpointError, UnsupportedError
from seqmoe_weights.families import (
    find_family,
    read_config,
    register,
    scale_spec,
    supported_model_types,
)
from tests.checkpoints import write_checkpoint

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The parsed config.json of a tiny checkpoint of each family."""
    folder = tmp_path_factory.mktemp("configs")
    return {
        family: json.loads(
            (write_checkpoint(folder / family, family) / "config.json").read_text("utf-8")
        )
        for family in supported_model_types()
    }


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`config` with fields replaced, or removed where the change is `...`."""
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def test_the_families() -> None:
    assert supported_model_types() == ["mixtral", "olmoe", "qwen3_moe"]


def test_qwen3_30b_fp8_as_published() -> None:
    config = read_config(
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
            "quantization_config": {**FP8, "activation_scheme": "dynamic"},
        }
    )
    assert (config.dense_format, config.num_routed_experts) == ("FP8", 6144)
    family = find_family("qwen3_moe")
    resident = {spec.name: spec for spec in family.resident_tensors(config)}
    assert len(resident) == 3 + 48 * 9
    assert resident["model.layers.47.self_attn.q_proj.weight"].shape == (4096, 2048)
    assert resident["model.layers.0.self_attn.k_norm.weight"].shape == (128,)
    expert = family.expert_tensors(config, 47, 127)
    assert expert["down"].name == "model.layers.47.mlp.experts.127.down_proj.weight"
    scale = scale_spec(expert["down"])
    assert scale.name == f"{expert['down'].name}_scale_inv"
    assert (expert["down"].shape, scale.shape) == ((2048, 768), (16, 6))


def test_names_of_mixtral_and_olmoe(raw: dict[str, dict[str, Any]]) -> None:
    mixtral = find_family("mixtral")
    parts = mixtral.expert_tensors(read_config(raw["mixtral"]), 1, 2)
    prefix = "model.layers.1.block_sparse_moe.experts.2"
    assert {part: spec.name for part, spec in parts.items()} == {
        "gate": f"{prefix}.w1.weight",
        "up": f"{prefix}.w3.weight",
        "down": f"{prefix}.w2.weight",
    }
    olmoe = find_family("olmoe")
    resident = {s.name: s.shape for s in olmoe.resident_tensors(read_config(raw["olmoe"]))}
    assert resident["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert resident["model.layers.0.self_attn.k_norm.weight"] == (64,)


def test_what_families_default_to(raw: dict[str, dict[str, Any]]) -> None:
    read = read_config
    assert read(raw["mixtral"]).norm_topk_prob
    assert read(raw["mixtral"]).head_dim == read(raw["olmoe"]).head_dim == 32
    absent = {"num_key_value_heads": ..., "norm_topk_prob": ..., "tie_word_embeddings": ...}
    olmoe = read(_changed(raw["olmoe"], absent))
    assert olmoe.num_key_value_heads == 4
    assert not olmoe.norm_topk_prob
    assert not olmoe.tie_word_embeddings
    rope = {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read(_changed(raw["qwen3_moe"], rope)).rope_theta == 5e5
    dtypes = {"torch_dtype": ..., "dtype": "float16"}
    assert read(_changed(raw["qwen3_moe"], dtypes)).dense_format == "F16"
    wide = {"sliding_window": 2048}
    assert read(_changed(raw["mixtral"], wide)).max_position_embeddings == 2048
    respelled = {"num_experts": ..., "num_local_experts": 8}  # as transformers 5 saves it again
    assert read(_changed(raw["qwen3_moe"], respelled)) == read(raw["qwen3_moe"])
    unused = {"sliding_window": 16, "use_sliding_window": False}
    assert read(_changed(raw["qwen3_moe"], unused)).head_dim == 32


REQUIRED = [
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
]
MALFORMED: list[tuple[str, str, Any]] = [
    *(("qwen3_moe", name, ...) for name in [*REQUIRED, "norm_topk_prob", "num_key_value_heads"]),
    *(("mixtral", name, ...) for name in ["num_local_experts", "intermediate_size"]),
    ("olmoe", "num_experts", ...),
    ("qwen3_moe", "hidden_size", "128"),
    ("qwen3_moe", "hidden_size", True),
    ("qwen3_moe", "hidden_size", 128.0),
    ("qwen3_moe", "hidden_size", 0),
    ("qwen3_moe", "num_hidden_layers", -1),
    ("qwen3_moe", "num_hidden_layers", 10**9),
    ("qwen3_moe", "vocab_size", None),
    ("qwen3_moe", "vocab_size", 10**12),
    ("qwen3_moe", "rms_norm_eps", 0),
    ("qwen3_moe", "rms_norm_eps", "1e-6"),
    ("qwen3_moe", "rope_theta", float("nan")),
    ("qwen3_moe", "rope_theta", float("inf")),
    ("qwen3_moe", "rope_theta", 10**400),
    ("qwen3_moe", "norm_topk_prob", 1),
    ("qwen3_moe", "tie_word_embeddings", "false"),
    ("qwen3_moe", "num_experts_per_tok", 9),
    ("qwen3_moe", "num_key_value_heads", 3),
    ("qwen3_moe", "head_dim", 31),
    ("mixtral", "num_attention_heads", 3),
    ("qwen3_moe", "model_type", 5),
    ("qwen3_moe", "torch_dtype", 16),
    ("qwen3_moe", "quantization_config", "fp8"),
    ("qwen3_moe", "rope_scaling", 2.0),
    ("mixtral", "sliding_window", "all"),
]


@pytest.mark.parametrize(("family", "name", "value"), MALFORMED)
def test_malformed_fields_are_named(
    raw: dict[str, dict[str, Any]], family: str, name: str, value: Any
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(_changed(raw[family], {name: value}))
    assert "config.json" in caught.value.message
    assert name in caught.value.message
    assert len(caught.value.message) < 200
    assert caught.value.hint


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type"),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_parameters.rope_type",
    ),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"torch_dtype": "float64"}, "float64"),
    ("qwen3_moe", {"model_type": "llama"}, "mixtral, olmoe, qwen3_moe"),
    ("qwen3_moe", {"model_type": "_common"}, "mixtral, olmoe, qwen3_moe"),
    ("mixtral", {"sliding_window": 512}, "sliding_window"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    (
        "qwen3_moe",
        {"quantization_config": {**FP8, "weight_block_size": [64, 128]}},
        "weight_block_size",
    ),
    ("qwen3_moe", {"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt"),
    ("qwen3_moe", {"quantization_config": {**FP8, "activation_scheme": "static"}}, "static"),
]


@pytest.mark.parametrize(("family", "changes", "named"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(
    raw: dict[str, dict[str, Any]], family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config(_changed(raw[family], changes))
    assert named in f"{caught.value.message} {caught.value.hint}"
    assert "config.json" in caught.value.message


def test_one_file_is_all_that_a_family_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import seqmoe_weights.families as families

    text = Path(families.__path__[0], "olmoe.py").read_text("utf-8")
    (tmp_path / "newmoe.py").write_text(text.replace('"olmoe"', '"newmoe"'), "utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert "newmoe" in supported_model_types()
    assert find_family("newmoe").model_type == "newmoe"
    with pytest.raises(ValueError, match="there is a family newmoe already"):
        register(find_family("newmoe"))
