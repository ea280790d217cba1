"""A format and a family that are added from outside of the package work like those within."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import seqmoe_cli.models as models
import seqmoe_kernels.formats as formats
import seqmoe_weights.families as families
from seqmoe_cli.engine.engine import Engine
from seqmoe_cli.settings import EngineOptions, PoolSize, SamplingParams
from seqmoe_kernels import expert_format, expert_mlp
from seqmoe_kernels.formats import decode_by_tiles
from seqmoe_kernels.pool.resolve import Resolved
from seqmoe_weights.convert import convert
from seqmoe_weights.layout import RecordLayout, pack_record, part_view
from seqmoe_weights.packed import PackedModel
from tests.checkpoints import write_checkpoint
from tests.models.outside import FAMILY, ExpertsFirst, IntRows

INT_ROWS = IntRows()
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three lines that an addition takes; taken back after each test."""
    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    monkeypatch.setattr(families, "_registered", {})
    monkeypatch.setattr(models, "_decoders", dict(models._decoders))
    formats.register(INT_ROWS)
    families.register(FAMILY)
    models.register(FAMILY.model_type, ExpertsFirst)


def write_model(folder: Path) -> tuple[Path, Tensors]:
    """A checkpoint of the family with the tokenizer of another one, and its tensors."""
    source = write_checkpoint(folder, "olmoe")
    raw = json.loads((source / "config.json").read_text("utf-8"))
    raw |= {"model_type": FAMILY.model_type, "torch_dtype": "float32"}
    raw |= {"n_experts": raw.pop("num_experts"), "expert_size": raw.pop("intermediate_size")}
    (source / "config.json").write_text(json.dumps(raw), "utf-8")
    config = families.read_config(raw)
    specs = FAMILY.resident_tensors(config)
    for flat_id in range(config.num_routed_experts):
        layer, expert = divmod(flat_id, config.num_experts)
        specs += FAMILY.expert_tensors(config, layer, expert).values()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for spec in specs:
        values = torch.randn(spec.shape, generator=generator)
        is_norm = len(spec.shape) == 1
        tensors[spec.name] = 1 + 0.1 * values if is_norm else values * 1.5 / spec.shape[1] ** 0.5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source, tensors


def test_its_records_hold_what_the_format_encodes(tmp_path: Path) -> None:
    source, tensors = write_model(tmp_path / "source")
    convert(source, tmp_path / "packed", INT_ROWS.name, False)
    packed = PackedModel.open(tmp_path / "packed")
    packed.verify()
    assert {layout.format for layout in packed.layouts} == {INT_ROWS.name}
    path, _ = packed.records_file(2)
    record = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[
        -packed.record_bytes :
    ]
    for part, name in {"gate": "a", "up": "b", "down": "c"}.items():
        codes, scale = INT_ROWS.encode(tensors[f"block.2.expert.7.{name}"])
        assert torch.equal(part_view(record, packed.layouts[2][part]), codes)
        assert torch.equal(part_view(record, packed.layouts[2][f"{part}_scale"]), scale)


@pytest.mark.parametrize("quantize", ["keep", INT_ROWS.name])
def test_its_logits_are_those_of_plain_torch(tmp_path: Path, quantize: str) -> None:
    source, tensors = write_model(tmp_path / "source")
    convert(source, tmp_path / "packed", quantize, False)
    packed = PackedModel.open(tmp_path / "packed")
    if quantize == INT_ROWS.name:
        for name in [name for name in tensors if ".expert." in name]:
            tensors[name] = INT_ROWS.decode(INT_ROWS.encode(tensors[name]), torch.float32)
    engine = Engine.open(packed.path, EngineOptions(PoolSize.parse("40%"), "cpu", "float32"))
    ids = torch.randint(
        0, engine.config.vocab_size, (40,), generator=torch.Generator().manual_seed(1)
    )
    expected = plain_logits(tensors, engine.config.rope_theta, ids).log_softmax(1)
    likelihoods = expected[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(
        engine.log_likelihoods(ids.tolist()), likelihoods, atol=2e-4, rtol=1e-4
    )
    engine.reset_kv()
    step = next(engine.generate(ids.tolist(), SamplingParams(temperature=0), max_tokens=1))
    assert step.token_id == int(expected[-1].argmax())


def plain_logits(tensors: Tensors, theta: float, ids: torch.Tensor) -> torch.Tensor:
    """[T, V]; 4 query heads, 2 key heads of 32, 8 experts of which 2 are used, 3 layers."""
    x = tensors["words"][ids]
    for n in range(3):
        w = {
            name.split(".", 2)[2]: t
            for name, t in tensors.items()
            if name.startswith(f"block.{n}.")
        }
        h = F.rms_norm(x, (128,), w["norm_b"], 1e-6)
        weights, chosen = (h @ w["choose"].T).softmax(1).topk(2)
        weights = weights / weights.sum(1, keepdim=True)
        add = torch.zeros_like(x)
        for t, k in ((t, k) for t in range(len(ids)) for k in range(2)):
            a, b, c = (w[f"expert.{int(chosen[t, k])}.{part}"] for part in "abc")
            add[t] += weights[t, k] * (c @ (F.silu(a @ h[t]) * (b @ h[t])))
        x = x + add
        h = F.rms_norm(x, (128,), w["norm_a"], 1e-6)
        q, k, v = (
            (h @ w[name].T).view(len(ids), -1, 32).transpose(0, 1) for name in ("wq", "wk", "wv")
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q, theta),
            rotated(k, theta).repeat_interleave(2, 0),
            v.repeat_interleave(2, 0),
            is_causal=True,
        )
        x = x + mixed.transpose(0, 1).reshape(len(ids), 128) @ w["wo"].T
    return F.rms_norm(x, (128,), tensors["last_norm"], 1e-6) @ tensors["out"].T


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [heads, T, 32], each half of a head turned against the other one by its position."""
    angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(16) / 16)
    low, high = x.split(16, 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_one_token_read_its_records(dtype: torch.dtype) -> None:
    hidden, inter, device = 144, 80, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = RecordLayout.for_experts(hidden, inter, INT_ROWS.name)
    generator = torch.Generator().manual_seed(0)
    slots = torch.zeros(5, layout.record_bytes, dtype=torch.uint8)
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    for slot, record in enumerate(slots):
        parts = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        pack_record(record, layout, parts, slot)
    x, h = torch.randn(2, 1, hidden, generator=generator).to(device, dtype)
    at = torch.tensor([3, 0], dtype=torch.int32, device=device)
    none = torch.full_like(at, -1)
    resolved = Resolved(at, none, none, torch.zeros(1, dtype=torch.int32, device=device))
    args = (x, h, slots.to(device), resolved, torch.tensor([0.7, 0.3], device=device))
    fmt = expert_format(layout)
    got = expert_mlp.launch(*args, fmt)
    expected = expert_mlp.reference(*args, fmt)
    rough = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=rough * float(expected.abs().max()), rtol=rough)


def test_a_whole_weight_is_decoded_by_tiles() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [part.to(device) for part in INT_ROWS.encode(torch.randn(70, 272))]
    out = torch.empty(70, 272, device=device)
    decode_by_tiles(INT_ROWS.tiles, parts[0], (parts[1],), out)
    assert torch.equal(out, INT_ROWS.decode(parts, torch.float32))
