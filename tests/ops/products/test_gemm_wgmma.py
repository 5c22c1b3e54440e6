"""Tests of the product of Hopper's tensor cores: the tile it takes and the bytes it moves, what the compiler makes of it, and parity on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, Row
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.products import gemm
from nbcnn.ops.products.gemm_wgmma import ProductTile, implementation
from nbcnn.plan.op import Op

# M, K, N: less than a tile, more than one of each kind, K that ends inside a step, rows and columns that end inside a tile.
SIZES = ((5, 64, 8), (300, 200, 520), (1000, 1096, 264), (129, 2048, 1032))

REFUSED = [("bf16", (8, 12, 8), "16 bytes"), ("tf32", (8, 6, 8), "16 bytes"), ("bf16", (8, 16, 9), "8")]


def call(M: int, K: int, N: int, tile: ProductTile | None = None) -> Call:
    return Call(Op("gemm"), (), (), ((M, K), (N, K)), ((M, N),), tile=tile)


def test_a_large_product_takes_the_largest_tile_and_a_small_one_many():
    impl = implementation("bf16")
    large, small = (impl.tile(call(size, size, size), H200) for size in (8192, 512))
    assert (large.BM * large.BN, large.resident) == (128 * 256, 132)
    assert small.BM * small.BN < large.BM * large.BN
    assert small.resident == (512 // small.BM) * (512 // small.BN)


@pytest.mark.parametrize(("precision", "sizes", "reason"), REFUSED, ids=str)
def test_refuses_what_tma_cannot_address(precision, sizes, reason):
    assert reason in implementation(precision).supports(call(*sizes), H200)
    assert implementation(precision).supports(call(9, 16, 8), H200) is None
    assert sum(Op("gemm") in part for _, part in MODES["tensorcore", precision].fallbacks) == 3  # others serve it


def test_a_tile_is_read_by_all_that_need_it():
    tile = ProductTile(128, 64, 2, 4, 2, 8, 6)
    # Two rows of tiles and three columns of them, both cut off at the end.
    a, b, c = 200 * 64, 136 * 64, 200 * 136
    assert implementation("bf16").traffic(call(200, 64, 136, tile)) == [Traffic(2 * (3 * a + 2 * b), 2 * c, 2 * (a + b))]
    assert implementation("tf32").traffic(call(200, 64, 136, tile)) == [Traffic(4 * (3 * a + 2 * b), 4 * c, 4 * (a + b))]


@pytest.mark.full
@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_largest_tile_leaves_no_sum_in_memory(precision):
    impl, some = implementation(precision), np.zeros(8, np.uint16 if precision == "bf16" else np.float32)
    bare = call(8192, 8192, 8192, None)
    (launch,) = impl.bind(replace(bare, ins=(some, some), outs=(some,), tile=impl.tile(bare, H200)))
    report = compile_launch(launch)
    # Nine warps on four schedulers: three share one's 512 registers per lane.
    assert (report.frame_bytes, report.registers <= 168) == (0, True)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_parity(gpu, precision):
    if gpu.capability != (9, 0):
        pytest.skip("wgmma needs compute capability 9.0")
    impl = implementation(precision)
    row = Row("tensorcore", precision, "gpu", "NHWC", (("wgmma", {Op("gemm"): impl}),))
    for case in gemm.cases(SIZES):
        M, K = case.ins[0].shape
        for tile in impl.candidates(call(M, K, len(case.ins[1])), gpu.target):
            for resident in (tile.resident, 2):
                one = replace(tile, resident=resident)
                assert parity(row, impl, case, gpu, one) <= bound(case, precision), f"{case.label} {one}"
