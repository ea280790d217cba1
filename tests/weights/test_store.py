"""The host store: one aligned copy of every record, read in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seqmoe_weights import store as store_module
from seqmoe_weights.errors import ResourceError
from seqmoe_weights.layout import part_view
from seqmoe_weights.packed import PackedModel
from seqmoe_weights.store import HostStore

Packed = Callable[..., Path]


@pytest.mark.parametrize(("family", "options"), [("qwen3_moe", {"fp8": True}), ("mixtral", {})])
def test_records_are_the_bytes_of_the_files(
    packed: Packed, family: str, options: dict[str, bool]
) -> None:
    model = PackedModel.open(packed(family, **options))
    store = HostStore.load(model, pin=False)
    files = b"".join(
        model.records_file(layer)[0].read_bytes() for layer in range(model.config.num_hidden_layers)
    )
    assert store.records.shape == (24, model.layouts[0].record_bytes)
    assert store.records.dtype == torch.uint8
    assert store.records.numpy().tobytes() == files
    stamps = [part_view(record, model.layouts[0]["stamp"]).item() for record in store.records]
    assert stamps == list(range(24))
    assert not store.is_pinned


def test_progress_counts_every_byte(packed: Packed) -> None:
    seen: list[tuple[int, int]] = []
    model = PackedModel.open(packed("mixtral"))
    HostStore.load(model, False, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [
        (i + 1) * model.layouts[0].record_bytes for i in range(model.config.num_routed_experts)
    ]
    assert {total for _, total in seen} == {model.records_bytes}


def test_allocated_records_are_zero_writable_and_aligned() -> None:
    store = HostStore.allocate(3, 3 * 2**20 + 4096, pin=False)
    assert store.records.data_ptr() % 2**21 == 0
    assert store.records.is_contiguous()
    assert not store.records.any()
    store.records[1].fill_(7)
    assert store.records.sum(dtype=torch.int64).item() == 7 * store.records.shape[1]
    store.close()
    assert store.records.shape == (0, 3 * 2**20 + 4096)


def test_memory_goes_back_when_the_store_is_closed() -> None:
    before = anonymous_bytes()
    store = HostStore.allocate(64, 2**20, pin=False)
    store.records.fill_(1)
    assert anonymous_bytes() - before > 60 * 2**20
    store.close()
    assert anonymous_bytes() - before < 16 * 2**20


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_host_memory_is_checked_first(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackedModel.open(packed("mixtral"))
    available = 2**30 + model.records_bytes
    monkeypatch.setattr(store_module, "available_host_bytes", lambda: available - 1)
    with pytest.raises(ResourceError, match=r"host RAM .* [\d.]+ MiB .* 1\.00 GiB") as caught:
        HostStore.load(model, pin=False)
    assert "--quantize fp8" in caught.value.hint
    monkeypatch.setattr(store_module, "available_host_bytes", lambda: available)
    HostStore.load(model, pin=False).close()


class RefusingCuda:
    """cudaHostRegister of a host that lets only the first `limit` chunks be pinned."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        if len(self.registered) == self.limit:
            return 2
        assert flags == 3
        self.registered[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


def test_pinning_goes_by_chunks_of_whole_records(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RefusingCuda(limit=99)
    monkeypatch.setattr(store_module, "_cudart", lambda: cuda)
    monkeypatch.setattr(store_module, "_REGISTER_BYTES", 10_000)
    seen: list[int] = []
    store = HostStore.allocate(7, 4096, True, lambda done, total: seen.append(done))
    start = store.records.data_ptr()
    assert cuda.registered == {
        start: 8192,
        start + 8192: 8192,
        start + 16384: 8192,
        start + 24576: 4096,
    }
    assert seen == [8192, 16384, 24576, 28672]
    assert store.is_pinned
    store.close()
    assert not cuda.registered
    assert not store.is_pinned


def test_a_refused_pin_says_how_much_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RefusingCuda(limit=2)
    monkeypatch.setattr(store_module, "_cudart", lambda: cuda)
    monkeypatch.setattr(store_module, "_REGISTER_BYTES", 2**20)
    with pytest.raises(ResourceError) as caught:
        HostStore.allocate(5, 2**20, pin=True)
    assert "cannot pin 5.0 MiB of host RAM" in caught.value.message
    assert "after 2.0 MiB" in caught.value.message
    assert "--device cpu" in caught.value.hint
    assert not cuda.registered


@pytest.mark.gpu
def test_pinned_records_can_be_read_by_the_gpu(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackedModel.open(packed("qwen3_moe", fp8=True))
    monkeypatch.setattr(store_module, "_REGISTER_BYTES", 5 * model.layouts[0].record_bytes)
    store = HostStore.load(model, pin=True)
    assert store.is_pinned
    assert store.records.is_pinned()
    for record in store.records:  # also across the borders of registered chunks
        copy = torch.empty_like(record, device="cuda")
        copy.copy_(record, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(copy.cpu(), record)
    store.close()
