"""The calls of CUDA's driver that the prefetch thread makes for every copy: no tensor is made on
the way, and the interpreter's lock is not held."""

from __future__ import annotations

import ctypes

_LIBRARY = "libcuda.so.1"


class Driver:
    """Of the context that is current where this is made. Raises `OSError` when a call fails."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(_LIBRARY)
        self._copy = self._cuda.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._context = ctypes.c_void_p()
        _check("cuCtxGetCurrent", self._cuda.cuCtxGetCurrent(ctypes.byref(self._context)))

    def enter(self) -> None:
        """Make the context current in the calling thread."""
        _check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(self._context))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy from pinned memory; addresses, and a stream's handle."""
        error = self._copy(target, source, num_bytes, stream)
        if error:
            _check("cuMemcpyHtoDAsync", error)


def _check(name: str, error: int) -> None:
    if error:
        raise OSError(f"{name} returned CUDA error {error}")
