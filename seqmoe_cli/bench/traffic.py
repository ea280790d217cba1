"""What a decode step reads of the device's memory, and how many kernels it is made of."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from seqmoe_cli.engine.engine import Engine
from seqmoe_weights.config import ModelConfig
from seqmoe_weights.families import find_family, held_bytes
from seqmoe_weights.layout import RecordLayout

_KERNEL_NODE = 0  # of the types of a CUDA graph's nodes


def bytes_read_per_token(
    config: ModelConfig, layouts: Sequence[RecordLayout], dtype: torch.dtype, context: float
) -> int:
    """Bytes that a step at a depth of `context` tokens cannot do without: all resident tensors but
    the embedding, the experts that it uses, keys and values. Activations and the pool's bookkeeping
    are left out; resident tensors that are not FP8 are held in `dtype`."""
    resident = sum(
        held_bytes(spec, config, dtype.itemsize)
        for spec in find_family(config.family).resident_tensors(config)
        if spec.role != "embedding" or config.tie_word_embeddings  # else one row of it
    )
    parts = [part for layout in layouts for part in layout.parts if part.name != "stamp"]
    experts = config.num_experts_per_tok * sum(part.num_bytes for part in parts)
    entries = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return resident + experts + round(context * entries * dtype.itemsize)


def kernels_per_token(engine: Engine) -> int | None:
    """Kernels of a captured decode step; None on a CPU, and where the driver does not say. The
    engine must have decoded before, so that nothing is left to compile. Runs nothing."""
    if engine.device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        engine.decoding.step()
    try:
        return count_kernels(graph)
    except (OSError, RuntimeError):
        return None


def count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels in a graph that was captured with `keep_graph`. OSError without a CUDA driver,
    RuntimeError where it does not say."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kinds.append(kind.value)
    return kinds.count(_KERNEL_NODE)


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver reports error {error}")
