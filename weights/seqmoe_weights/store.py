"""HostStore: the records of all experts in host memory, one copy, on huge pages where possible, and
registered with CUDA when the GPU shall read them in place."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from seqmoe_weights.errors import PackedModelError, ResourceError
from seqmoe_weights.files import Meter, Progress, readable_size
from seqmoe_weights.layout import bytes_of
from seqmoe_weights.memory import available_host_bytes
from seqmoe_weights.packed import PackedModel, damaged_record

_HUGE_PAGE = 2 * 2**20
_MARGIN_BYTES = 2**30  # left to the rest of the program and the machine
_REGISTER_BYTES = 2**30  # at a time, so that there is progress to show
_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_MAX_THREADS = 16


class HostStore:
    """`records`: uint8 [num_records, record_bytes], record of flat expert id i in row i."""

    def __init__(self, records: torch.Tensor) -> None:
        """`records` is contiguous; see `allocate` and `load` for how to get it."""
        self.records = records
        self._registered: list[int] = []

    @property
    def is_pinned(self) -> bool:
        """Whether kernels on the GPU can read the records in place."""
        return bool(self._registered)

    @classmethod
    def allocate(
        cls, num_records: int, record_bytes: int, pin: bool, progress: Progress | None = None
    ) -> HostStore:
        """Zeroed records to be filled by the caller, at a 2 MiB boundary, huge pages asked for.
        Raises `ResourceError` with numbers when the host has not that much memory, or when it
        cannot be pinned."""
        num_bytes, available = num_records * record_bytes, available_host_bytes()
        if num_bytes + _MARGIN_BYTES > available:
            raise ResourceError(
                f"not enough host RAM for the experts: {readable_size(num_bytes)} and a margin of "
                f"{readable_size(_MARGIN_BYTES)} needed, {readable_size(available)} available",
                "close other programs, or convert the model with --quantize fp8 to halve BF16 "
                "experts",
            )
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        store = cls(flat.view(num_records, record_bytes))
        if pin:
            store.pin(progress)
        return store

    @classmethod
    def load(cls, packed: PackedModel, pin: bool, progress: Progress | None = None) -> HostStore:
        """Read all records of `packed` in threads, checking the hash of each, then pin them.

        Raises `PackedModelError` naming file, layer and expert on damage, `ResourceError` with
        numbers when memory is short. `progress` counts the bytes read, then those pinned.
        """
        num_records = packed.config.num_routed_experts
        store = cls.allocate(num_records, packed.record_bytes, pin=False)
        meter = Meter(store.records.nbytes, progress)
        threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        try:
            read = partial(_read_record, packed, store.records)
            for _ in threads.map(read, range(num_records)):
                meter.add(packed.record_bytes)
        finally:
            threads.shutdown(cancel_futures=True)
        if pin:
            store.pin(progress)
        return store

    def pin(self, progress: Progress | None = None) -> None:
        """Register the records with CUDA in chunks of whole records, so that no copy of a record
        crosses a chunk. Raises `ResourceError` when the host refuses."""
        meter = Meter(self.records.nbytes, progress)
        pinned_bytes = 0
        chunk_records = max(1, _REGISTER_BYTES // self.records.shape[1])
        for chunk in torch.split(self.records, chunk_records):
            error = int(_cudart().cudaHostRegister(chunk.data_ptr(), chunk.nbytes, _REGISTER_FLAGS))
            if error:
                self.close()
                raise ResourceError(
                    f"cannot pin {readable_size(meter.total_bytes)} of host RAM for the experts: "
                    f"CUDA error {error} after {readable_size(pinned_bytes)}",
                    "close other programs or raise the memory limit of this container; "
                    "--device cpu needs no pinned memory",
                )
            self._registered.append(chunk.data_ptr())
            pinned_bytes += chunk.nbytes
            meter.add(chunk.nbytes)

    def close(self) -> None:
        """Unregister and let go of the memory; it is freed with the last view of it."""
        for pointer in self._registered:
            _cudart().cudaHostUnregister(pointer)
        self._registered = []
        self.records = torch.empty(0, self.records.shape[1], dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _read_record(packed: PackedModel, records: torch.Tensor, flat_id: int) -> None:
    """Fill one row of `records`. Reading and hashing both release the GIL."""
    layer, expert = divmod(flat_id, packed.config.num_experts)
    path, hashes = packed.records_file(layer)
    view = bytes_of(records[flat_id])
    try:
        with path.open("rb") as file:
            file.seek(expert * len(view))
            count = file.readinto(view)
    except OSError as error:
        raise PackedModelError(
            f"{path.name} in {path.parent} cannot be read: {error.strerror}", "check the disk"
        ) from error
    if count < len(view) or hashlib.sha256(view).hexdigest() != hashes.pieces[expert]:
        raise damaged_record(path, layer, expert)
