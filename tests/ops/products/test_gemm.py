"""Tests of the plain matrix product c = a·bᵀ against float64, at sizes that no tile divides."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.products.gemm import gemm, launch_gemm_nt


def check_product(device, rng, M: int, N: int, K: int, tile: Tile | None = None) -> None:
    """‖got - ref‖ ≤ 4·eps·√K·‖ref‖, as for the convolutions."""
    a, b = (rng.standard_normal((rows, K)).astype(np.float32) for rows in (M, N))
    want = np.empty((M, N))
    gemm(a.astype(np.float64), b.astype(np.float64), want)
    arrays = [device.empty(values.size, "float32") for values in (a, b, want)]
    for array, values in zip(arrays, (a, b, np.full(M * N, np.nan)), strict=True):
        device.upload(array, values)
    launch_gemm_nt(*arrays, M, N, K, tile).run(device.stream)
    got = device.download(arrays[2]).reshape(M, N)
    assert np.linalg.norm(got - want) <= 4 * np.finfo(np.float32).eps * np.sqrt(K) * np.linalg.norm(want)


@pytest.mark.parametrize("sizes", [(20, 35, 16), (5, 6, 7), (17, 8, 12), (1, 1, 1)], ids=str)
def test_tiny_products(device, rng, sizes):
    check_product(device, rng, *sizes, Tile(32, 32, 8, 4, 4))


@pytest.mark.parametrize("sizes", [(300, 300, 512), (1000, 77, 8192), (129, 257, 100), (65, 63, 37)], ids=str)
def test_real_products(gpu, rng, sizes):
    check_product(gpu, rng, *sizes)


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("K", [8192, 37])
def test_no_spills(K, arch):
    some = np.zeros(4, np.float32)
    report = compile_launch(launch_gemm_nt(some, some, some, 50000, 50000, K), arch)
    assert report.frame_bytes == 0
    assert report.registers * 256 * (2 if K % 16 == 0 else 3) <= 65536
