"""Tests of pointwise convolutions straight from series, against the float64 reference, and their counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counted import counted
from covering import Cover

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.ops.conv.simt.tiles import EFFICIENCY, Tile
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.series.pwconv1d import REAL_GATED, gated_cases, pointwise_cases
from nbcnn.ops.series.pwconv1d_direct import OPS, candidates_wgrad
from nbcnn.ops.series.pwconv1d_gated import OPS as PWCONV1D_GATED
from nbcnn.plan.op import Op

TINY, GATES = Tile(16, 32, 8, 4, 4), Tile(32, 32, 8, 8, 4)
"""One warp a block: what the simulator can run in a second."""
GATED = PWCONV1D_GATED[named("pwconv1d_glu_fprop")]
MEAN = {"a series of two tiles": (2, 8, 16, 4), "odd channels": (3, 5, 16, 19)}
REAL = {"S4ConvD": (37, 128, 48, 256), "its first layer": (37, 4, 48, 128), "odd": (5, 37, 80, 131), "long": (2, 24, 4096, 40)}


def check(device, case, tile):
    error = gradcheck.parity(MODES["naive", "fp32"], OPS[case.op], case, device, tile)
    assert error <= gradcheck.bound(case), (case.op, case.label)


@pytest.mark.parametrize("sizes", MEAN.values(), ids=MEAN)
def test_mean_shapes(device, sizes):
    for case in pointwise_cases(*sizes):
        if "bias" in case.label or str(case.op).endswith("dgrad"):
            check(device, case, replace(TINY, split=2 if str(case.op).endswith("wgrad") else 1))


@pytest.mark.parametrize("op", OPS)
def test_real_shapes_in_every_tile(gpu, op):
    cover, row = Cover(), MODES["naive", "fp32"]
    for case in (case for sizes in REAL.values() for case in pointwise_cases(*sizes) if case.op == op):
        for tile in (replace(tile, split=7 if str(op).endswith("wgrad") else 1) for tile in EFFICIENCY):
            if cover.takes_case(row, OPS[op], case, gpu, tile):
                check(gpu, case, tile)


def test_gates_in_the_epilogue(device):
    for case in gated_cases() if gpu_device.SIMULATOR else gated_cases(((2, 3, 8, 5), *REAL_GATED)):
        error = gradcheck.parity(MODES["naive", "fp32"], GATED, case, device, GATES if gpu_device.SIMULATOR else None)
        assert error <= gradcheck.bound(case), case.label


@pytest.mark.parametrize("op", OPS)
def test_counts_are_those_of_the_kernels(op, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    case = next(case for case in pointwise_cases(3, 5, 16, 7) if case.op == named(op))
    tile = replace(TINY, split=2 if str(op).endswith("wgrad") else 1)
    bound = Bound(OPS[named(op)], op, case.ins, case.outs, device=device, attrs=case.attrs, tile=tile)
    for launch, count in zip(bound.launches, OPS[named(op)].traffic(bound.call), strict=True):
        with monkeypatch.context() as patch:
            assert counted(launch, patch) == count, launch.name


def test_gates_are_counted(device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    case = list(gated_cases())[-1]
    bound = Bound(GATED, case.op, case.ins, case.outs, device=device, tile=GATES)
    (count,), (launch,) = GATED.traffic(bound.call), bound.launches
    found, bias = counted(launch, monkeypatch), 4 * 10
    lanes = 8 * ceil_div(2 * 8, GATES.BN)  # every thread reads the biases of its channels
    assert (found.write, found.distinct - bias, found.read - lanes * bias) == (count.write, count.distinct, count.read)


def test_what_is_no_whole_load_goes_elsewhere():
    def said(op, length):
        return OPS[named(op)].supports(Call(named(op), (), (), ((2, 8, length), (4, 8)), ((2, 4, length),)), H200)

    assert said("pwconv1d_fprop", 48) is said("pwconv1d_wgrad", 48) is said("pwconv1d_dgrad", 20) is None
    assert "multiple of 16" in said("pwconv1d_wgrad", 20)
    assert "multiple of 4" in said("pwconv1d_fprop", 49)


def test_a_weight_gradient_fills_the_gpu():
    call = Call(Op("pwconv1d", "wgrad"), (), (), ((16384, 128, 48), (16384, 256, 48)), ((256, 128), (256,)))
    for tile in candidates_wgrad(call, H200):
        blocks, places = tile.grid(256, 128)[0] * tile.split, tile.blocks_per_multiprocessor * H200.multiprocessors
        assert 0.9 * places <= blocks <= 2 * places
