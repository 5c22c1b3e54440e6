"""This module computes kernel values on the GPU: this package's own GEMM, then `rbf` in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.classify.gram import PANEL_VALUES
from nbcnn.gpu.device import Gpu
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.rbf import launch_rbf

_GPU_SHARE = 0.8
_INDEX_LIMIT = 2**31


class GpuEngine:
    """Two launches a panel on the GPU: the GEMM, then `rbf` in place.

    Raises GpuUnavailable without a GPU; `panel_rows` raises MemoryError if the GPU has no room for the columns and one row.
    """

    name = "GPU"

    def __init__(self) -> None:
        self._device: Any = Gpu()
        self._arrays: dict[str, Any] = {}

    def panel_rows(self, columns: int, width: int) -> int:
        if columns * width >= _INDEX_LIMIT:
            raise MemoryError(f"{columns:,} × {width:,} features of one class have 2^31 values or more, kernels index with 32 bits; --device cpu")
        held = sum(array.size for array in self._arrays.values())
        free = int(_GPU_SHARE * (self._device.free_bytes() + 4 * held)) // 4
        rows = min(PANEL_VALUES // columns, (free - columns * (width + 1)) // (width + columns + 1))
        if rows < 1:
            raise MemoryError(f"the features of one class take {4 * columns * width:,} bytes, the GPU has {4 * free:,} to spare; --device cpu")
        return rows

    def _held(self, name: str, values: int) -> Any:
        """A device array of at least `values` floats, kept from call to call."""
        if name not in self._arrays or self._arrays[name].size < values:
            self._arrays.pop(name, None)
            self._arrays[name] = self._device.empty(values, "float32")
        return self._arrays[name][:values]

    def _put(self, name: str, values: np.ndarray) -> Any:
        array = self._held(name, values.size)
        self._device.upload(array, values)
        return array

    def columns(self, b: np.ndarray, norms: np.ndarray) -> None:
        self._b, self._col_norms = self._put("b", b), self._put("column norms", norms)

    def panel(self, a: np.ndarray, norms: np.ndarray, gamma: float) -> np.ndarray:
        M, N = len(a), self._col_norms.size
        device_a, row_norms, k = self._put("a", a), self._put("row norms", norms), self._held("k", M * N)
        launch_gemm_nt(device_a, self._b, k, M, N, a.shape[1]).run(self._device.stream)
        launch_rbf(row_norms, self._col_norms, k, M, N, gamma).run(self._device.stream)
        return self._device.download(k).reshape(M, N)
