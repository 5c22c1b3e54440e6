"""Tests of convolutions with 1×1 filters on CUDA cores: few rows per warp for each column, many in tiles; which shapes take them, and parity."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check import gradcheck
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.nn.activations import Swish
from nbcnn.nn.layers import Flatten, Linear
from nbcnn.ops.conv.simt import few_rows, pointwise
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.plan.bounds import parity_bound
from nbcnn.run.net import Net

SIZES = ((1, 12, 5), (3, 520, 3), (8, 8, 9))
"""Examples, channels, filters: one row; a row of w that two warps share; as many rows as there may be, and more columns than a block has."""


def case(op, n, c, k, side=1):
    x, w, b = normal(31, n, c, side, side), normal(32, k, c, 1, 1) / np.float32(c**0.5), normal(33, k)
    return Case(named(op), f"{n}×{c}→{k}", (x, w, b), (((n, k, side, side), "float32"),), {"stride": 1, "pad": 0}, c + 1)


def call_of(n, c, k, side=1, *, window=1, stride=1, layout="NHWC", op="conv_fprop"):
    return Call(named(op), (), (), ((n, c, side, side), (k, c, window, window), (k,)), ((n, k, side, side),), {"stride": stride, "pad": 0}, layout)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_few_rows_are_the_reference(device, size, precision):
    row = MODES["cudacore" if precision == "fp32" else "tensorcore", precision]
    made = case("conv_swish_fprop", *size)
    error = gradcheck.parity(row, few_rows.OPS[named("conv_relu_fprop")], made, device, None)
    assert error <= parity_bound(made.terms, precision)


@pytest.mark.parametrize("size", [(2, 12, 5, 4), (3, 16, 8, 3)], ids=str)
def test_pixels_in_tiles_are_the_reference(device, size):
    made = case("conv_relu_fprop", *size)
    error = gradcheck.parity(MODES["cudacore", "fp32"], pointwise.OPS[named("conv_relu_fprop")], made, device, None)
    assert error <= parity_bound(made.terms, "fp32")


def test_only_pixels_side_by_side_are_rows():
    assert few_rows.supports(call_of(2, 8, 3, 2), H200) is None
    assert few_rows.supports(call_of(32, 8, 3), H200) is None
    assert few_rows.supports(call_of(33, 8, 3), H200) == "33 rows are more than the 32 lanes that keep their sums"
    assert few_rows.supports(call_of(1, 7, 3), H200) == "7 channels are no whole quads"
    for other in ({"window": 3}, {"stride": 2}):
        assert pointwise.supports(call_of(1, 8, 3, 4, **other), H200) == "its windows are more than one pixel, or do not lie side by side"
    assert "NHWC" in pointwise.supports(call_of(1, 8, 3, layout="NCHW"), H200)
    assert set(few_rows.OPS) == set(pointwise.OPS) == {named("conv_fprop"), named("conv_relu_fprop")}


def test_more_warps_share_a_longer_row():
    found = [few_rows.tile_of(call_of(1, channels, 10), H200).parts for channels in (12, 512, 516, 1028, 3136, 40_000)]
    assert found == [1, 1, 2, 4, 8, 8]
    assert [few_rows.tile_of(call_of(rows, 8, 3), H200).rows for rows in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("mode", [("cudacore", "fp32"), ("tensorcore", "fp32")], ids="-".join)
def test_a_small_network_packs_and_copies_nothing_for_one_image(mode):
    from nbcnn.lab.measure.plans import Absent
    from nbcnn.run.rows import Choice

    layers = [Flatten(), Linear(256, in_features=256), Swish(), Linear(256, in_features=256), Swish()]
    net = Net(layers, (1, 16, 16), choice=Choice(MODES[mode], "as asked"), device=Absent(H200))
    plan = net.lower(net.record_predict(1))
    assert [str(item.step.op) for item in plan.steps] == ["gather", "conv_swish_fprop", "conv_swish_fprop"]
    assert not plan.packs
