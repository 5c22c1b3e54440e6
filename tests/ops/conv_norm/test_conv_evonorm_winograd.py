"""Tests of Winograd's convolution with EvoNorm in its last kernel: against the reference, what it holds, what it moves, what compiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import full
from counted import counted

from nbcnn import modes
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv_norm.two_ops import conv_norm_cases
from nbcnn.ops.conv_norm.winograd import OPS, NormTile, candidates, slab_of, slabs, supports
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.op import Norm, Op
from nbcnn.plan.shapes import ConvShape

ROW = modes.MODES["im2col", "fp32"]
# Batches are too small for `supports` here, nothing else.
IMPLS = {op: replace(impl, supports=lambda call, target: None) for op, impl in OPS.items()}
LAST = "winograd_image_norm_kernel"


def tiny(channels, threads):
    """One warp a block in the products, one image at a time."""
    return NormTile(1, 16, 32, 4, 4, 1, channels, threads, 1)


SMALL = (
    (ConvShape(2, 16, 4, 4, 16, 3, 3, 1, 1), 16, tiny(16, 32)),
    (ConvShape(1, 16, 4, 8, 16, 3, 3, 1, 1), 8, tiny(16, 64)),
    (ConvShape(1, 16, 6, 8, 16, 3, 3, 1, 1), 1, tiny(16, 32)),
    (ConvShape(1, 16, 4, 6, 32, 3, 3, 1, 1), 4, tiny(32, 32)),
)
"""Groups of one, two, sixteen and eight channels; images one by one; half a warp without items; a whole one; threads of one item and of two."""
REAL = (
    (ConvShape(16, 64, 28, 28, 64, 3, 3, 1, 1), 32),
    (ConvShape(52, 32, 14, 12, 96, 3, 3, 1, 1), 12),
    (ConvShape(33, 16, 16, 16, 64, 3, 3, 1, 1), 1),
    (ConvShape(3, 16, 64, 64, 16, 3, 3, 1, 1), 16),
)


@pytest.mark.parametrize(("shape", "groups", "tile"), SMALL, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_small_shapes(shape, groups, tile, device):
    cases = list(conv_norm_cases([(shape, groups)]))
    # In training on two images, in inference on one; the others in one op each: the simulator is slow.
    for case in cases[::2] if shape is SMALL[0][0] else cases[1::2] if shape is SMALL[1][0] else cases[:1]:
        error = gradcheck.parity(ROW, IMPLS[case.op], case, device, tile)
        assert error <= gradcheck.bound(case), (case.op, case.label, error)


def test_statistics_far_from_zero(device):
    """b of 2000 leaves z few digits; of what it has left the statistics keep all. Filters of zeros: a plane of one value."""
    case = next(conv_norm_cases([(ConvShape(1, 16, 4, 6, 16, 3, 3, 1, 1), 16)]))
    x, w, b, *channels = case.ins
    ins = (x, np.where(np.arange(16) < 8, w.T, 0).T.copy(), b + np.float32(2000), *channels)
    bound = Bound(IMPLS[case.op], case.op, ins, case.outs, device=device, attrs=case.attrs, layout="NHWC", tile=tiny(16, 32))
    bound.run()
    _, z, shift, std = bound.results()
    planes = z[0].astype(np.float64).reshape(16, -1)
    # Distances from a pixel are exact or rounded once, and so is each of their sums; means of parts are rounded as z is.
    eps = np.finfo(np.float32).eps
    sums, means, away = planes.shape[1] * eps, 4 * eps * np.abs(planes).max(axis=1), planes - planes[:, :1]
    variance = planes.var(axis=1) + case.attrs["eps"]
    assert np.all(np.abs(std.astype(np.float64) ** 2 - variance) <= 4 * sums * variance + means**2)
    assert np.all(np.abs(away.mean(axis=1) - shift) <= means + sums * np.abs(away).max(axis=1))
    np.testing.assert_array_equal(planes[8:].var(axis=1), 0)


@pytest.mark.parametrize("op", ["conv_evonorm_b0_infer"] if gpu_device.SIMULATOR else OPS)
def test_a_pixel_that_is_nan_reaches_what_its_statistics_make(op, device):
    """All of its image; in B0's training all images."""
    shape, groups, tile = SMALL[0]
    case = next(case for case in conv_norm_cases([(shape, groups)]) if case.op == op)
    x, *others = case.ins
    x = x.copy()
    x[1, 3, 3, 3] = np.nan
    bound = Bound(IMPLS[op], op, (x, *others), case.outs, device=device, attrs=case.attrs, layout="NHWC", tile=tile)
    bound.run()
    device.synchronize()
    np.testing.assert_array_equal(np.isnan(bound.results()[0]).mean((1, 2, 3)), [str(op).endswith("b0_fprop"), 1])


def bound_of(case, tile=None):
    return Bound(IMPLS[case.op], case.op, case.ins, case.outs, device=Host(), attrs=case.attrs, layout="NHWC", tile=tile)


@pytest.mark.parametrize(("shape", "groups"), REAL, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_every_slab_at_real_sizes(shape, groups, gpu):
    for case in conv_norm_cases([(shape, groups)]):
        ins = tuple(array.shape for array in case.ins)
        call = replace(bare(case.op), in_shapes=ins, out_shapes=((ins[0][0], ins[1][0], *ins[0][2:]),) * 2, attrs=case.attrs)
        call = replace(call, in_dtypes=("float32",) * len(ins))
        if supports(call, H200) is not None:
            assert case.op != "conv_evonorm_b0_fprop"  # nothing is kept
            continue
        tiles = candidates(call, gpu.target)
        for tile in (*tiles, replace(tiles[-1], images=5)):
            error = gradcheck.parity(ROW, OPS[case.op], case, gpu, tile)
            assert error <= gradcheck.bound(case), (case.op, case.label, tile, error)


def bare(op="conv_evonorm_s0_fprop", n=64, c=64, size=28, k=64, groups=32, layout="NHWC"):
    ins, outs = ((n, c, size, size), (k, c, 3, 3), *((k,),) * 4), ((n, k, size, size),) * 2
    kinds = {"in_dtypes": ("float32",) * len(ins), "out_dtypes": ("float32",) * len(outs)}
    return Call(named(op), (), (), ins, outs, {"stride": 1, "pad": 1, "groups": groups, "eps": 1e-5}, layout, **kinds)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"size": 58}, None),
        ({"size": 15}, "whole 2×2 tiles"),
        ({"n": 1}, None),
        ({"size": 96}, "no block keeps 96×96 pixels"),
        ({"k": 128, "groups": 1}, "groups of 128"),
        ({"op": "conv_evonorm_b0_fprop", "size": 96}, None),
        ({"layout": "NCHW"}, "NHWC"),
    ],
)
def test_what_it_serves(change, reason):
    found = supports(bare(**change), H200)
    assert found is None if reason is None else reason in found


def test_other_shapes_run_as_two_ops():
    chain = [impl for _, impl in ROW.chain("conv_evonorm_s0_fprop") if impl.needs == (0, 0)]  # Hopper has its own
    assert next(impl for impl in chain if impl.supports(bare(), H200) is None) is OPS["conv_evonorm_s0_fprop"]
    serving = [impl for _, impl in ROW.chain("conv_evonorm_s0_fprop") if impl.supports(bare(size=96), H200) is None]
    assert OPS["conv_evonorm_s0_fprop"] not in serving
    assert len(serving) == 2  # Winograd's convolution and the direct one, each with the norm behind it


def test_slabs_fit_on_a_multiprocessor():
    for change in (
        {},
        {"size": 40},
        {"size": 56},
        {"size": 14, "groups": 1},
        {"size": 8, "groups": 8},
        {"size": 2, "n": 4096},
        {"k": 48, "groups": 12},
    ):
        call = bare(**change)
        assert slabs(call, H200)
        for tile in candidates(call, H200):
            slab = slab_of(call, tile)
            assert slab.channels % slab.group == slab.K % slab.channels == slab.threads % slab.quads == 0
            assert slab.blocks * (slab.shared_bytes + 1024) <= 228 * 1024
            assert slab.blocks * slab.threads // 32 <= 20


def test_which_slab_comes_first():
    assert [chosen(bare(n=n)) for n in (64, 256)] == [(32, 544, 1)] * 2
    assert chosen(bare(size=56))[0] == 16
    assert chosen(bare(size=14, groups=1))[0] == 64
    assert chosen(bare("conv_evonorm_b0_fprop", size=96))[0] == 32  # nothing is kept


def test_images_at_once_fill_the_gpu():
    assert [candidates(bare(n=n), H200)[0].images for n in (64, 150, 256, 1000)] == [64, 150, 128, 125]
    for n in (256, 1000, 5000):
        for tile in candidates(bare(n=n), H200):
            waves = tile.images * (64 // tile.channels) / (132 * tile.blocks)
            assert 0.9 <= waves / ceil_div(waves, 1) <= 1


def chosen(call):
    tile = candidates(call, H200)[0]
    return tile.channels, tile.threads, tile.blocks


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("op", "tiles"), [("conv_evonorm_s0_fprop", 1), ("conv_evonorm_b0_fprop", 1), *full(*((op, None) for op in OPS))])
def test_items_stay_in_registers_until_they_are_kept(op, tiles):
    case = next(case for case in conv_norm_cases([(ConvShape(4, 64, 28, 28, 64, 3, 3, 1, 1), 32)]) if case.op == op)
    bound = bound_of(case)
    for tile in IMPLS[op].candidates(bound.call, H200)[:tiles]:
        (launch,) = [launch for launch in bound.with_tiles([tile])[0].launches if launch.name == LAST]
        report = compile_launch(launch)
        assert (report.frame_bytes, report.registers * tile.blocks * launch.block <= 65536) == (0, True), (tile, report)


def test_bytes_by_hand():
    call = replace(bare(n=100), tile=replace(candidates(bare(n=100), H200)[0], images=64))
    made = OPS[call.op].traffic(call)
    assert len(made) == 1 + 2 * 3
    image = 4 * 28 * 28 * 64
    assert [made[3], made[6]] == [Traffic(n * 4 * image, n * (2 * image + 8 * 32), n * 4 * image) for n in (64, 36)]
    planes = replace(call, op=Op("conv", "fprop", after=(Norm("evonorm_b0"),)), attrs={"stride": 1, "pad": 1, "eps": 1e-3})
    assert OPS[planes.op].traffic(planes)[3] == Traffic(64 * 4 * image, 64 * (image + 8 * 64), 64 * 4 * image)
    call = replace(call, op=Op("conv", "infer", after=(Norm("evonorm_s0"),)), out_shapes=call.out_shapes[:1], out_dtypes=("float32",))
    assert OPS[call.op].traffic(call)[3] == Traffic(64 * 4 * image, 64 * image, 64 * 4 * image)


@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="only the simulator tells loads and stores one by one")
def test_bytes_load_by_load(device, monkeypatch):
    case = next(conv_norm_cases([(ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1), 8)]))
    bound = Bound(IMPLS[case.op], case.op, case.ins, case.outs, device=device, attrs=case.attrs, layout="NHWC", tile=tiny(16, 32))
    *others, last = bound.launches
    for launch in others:
        launch.run()
    channels = {id(value) for value in bound.call.ins[2:]}
    assert counted(last, monkeypatch, channels) == OPS[case.op].traffic(bound.call)[-1]
