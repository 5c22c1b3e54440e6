"""Winograd's convolution with EvoNorm in its last kernel: against the reference, what it holds, what it moves, what compiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from counted import counted

from nbcnn import cuda, gradcheck, ops
from nbcnn.cuda import Host
from nbcnn.ops.call import Call
from nbcnn.ops.evonorm.conv_winograd import OPS, NormTile, candidates, slabs, supports
from nbcnn.ops.norm_cases import conv_norm_cases
from nbcnn.ops.run import Bound
from nbcnn.ops.static import compile_launch
from nbcnn.ops.traffic import Traffic
from nbcnn.shapes import ConvShape

ROW = ops.MODES["im2col", "fp32"]
# Batches are too small for `supports` here, nothing else.
IMPLS = {op: replace(impl, supports=lambda call: None) for op, impl in OPS.items()}
LAST = "winograd_image_norm_kernel"


def tiny(channels, slots):
    """One warp a block in the products, two images at a time."""
    return NormTile(2, 16, 32, 4, 4, 1, channels, slots, 1)


SMALL = (
    (ConvShape(3, 16, 4, 4, 16, 3, 3, 1, 1), 16, tiny(8, 1)),
    (ConvShape(2, 16, 8, 8, 16, 3, 3, 1, 1), 8, tiny(16, 2)),
    (ConvShape(1, 16, 6, 8, 16, 3, 3, 1, 1), 1, tiny(16, 2)),
)
"""Groups of one, two and sixteen channels; images in two parts; half a warp without items; a warp without a second one."""
REAL = (
    (ConvShape(16, 64, 28, 28, 64, 3, 3, 1, 1), 32),
    (ConvShape(52, 32, 14, 12, 96, 3, 3, 1, 1), 12),
    (ConvShape(33, 16, 16, 16, 64, 3, 3, 1, 1), 1),
    (ConvShape(3, 16, 64, 64, 16, 3, 3, 1, 1), 16),
)


@pytest.mark.parametrize(("shape", "groups", "tile"), SMALL, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_small_shapes(shape, groups, tile, place):
    for case in conv_norm_cases([(shape, groups)]):
        error = gradcheck.parity(ROW, IMPLS[case.op], case, place, tile)
        assert error <= gradcheck.bound(case), (case.op, case.label, error)


def test_blocks_that_meet(place):
    """In the simulator each its own packets only: one image."""
    case = next(case for case in conv_norm_cases([(ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1), 16)]) if case.op == "conv_evonorm_b0_fprop")
    tile = replace(tiny(8, 1), together=1)
    error = gradcheck.parity(ROW, IMPLS[case.op], case, place, tile)
    assert error <= gradcheck.bound(case), error


def test_blocks_meet_again_and_again(gpu):
    """Packets are told from those of the launch before by their turn."""
    case = next(case for case in conv_norm_cases(REAL[:1]) if case.op == "conv_evonorm_b0_fprop")
    bound = Bound(OPS[case.op], case.op, case.ins, case.outs, place=gpu, attrs=case.attrs, layout="NHWC", multiprocessors=gpu.multiprocessors)
    assert bound.call.tile.together
    bound.run()
    first = bound.results()
    bound.poison()
    for _ in range(3):
        bound.run()
    for once, again in zip(first[:-1], bound.results()[:-1], strict=True):  # the last is the running variance, which goes on
        np.testing.assert_array_equal(once, again)


def test_blocks_never_wait_for_a_later_launch():
    case = next(case for case in conv_norm_cases([(ConvShape(4, 16, 4, 4, 16, 3, 3, 1, 1), 16)]) if case.op == "conv_evonorm_b0_fprop")
    with pytest.raises(ValueError, match="2 images cannot wait for all of 4"):
        bound_of(case, replace(tiny(8, 1), together=1))


def bound_of(case, tile=None):
    return Bound(IMPLS[case.op], case.op, case.ins, case.outs, place=Host(), attrs=case.attrs, layout="NHWC", tile=tile)


@pytest.mark.parametrize(("shape", "groups"), REAL, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_every_slab_at_real_sizes(shape, groups, gpu):
    for case in conv_norm_cases([(shape, groups)]):
        tiles = candidates(bound_of(case).call, gpu.multiprocessors)
        for tile in (*tiles, replace(tiles[-1], images=5)):
            error = gradcheck.parity(ROW, OPS[case.op], case, gpu, tile)
            assert error <= gradcheck.bound(case), (case.op, case.label, tile, error)


def bare(op="conv_evonorm_s0_fprop", n=64, c=64, size=28, k=64, groups=32, layout="NHWC"):
    ins, outs = ((n, c, size, size), (k, c, 3, 3), *((k,),) * 4), ((n, k, size, size),) * 2
    kinds = {"in_dtypes": ("float32",) * len(ins), "out_dtypes": ("float32",) * len(outs)}
    return Call(op, (), (), ins, outs, {"stride": 1, "pad": 1, "groups": groups, "eps": 1e-5}, layout, **kinds)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"size": 64}, None),
        ({"size": 15}, "whole 2×2 tiles"),
        ({"n": 1}, "196 output tiles"),
        ({"size": 96}, "no block holds 96×96 pixels"),
        ({"k": 128, "groups": 1}, "groups of 128"),
        ({"layout": "NCHW"}, "NHWC"),
    ],
)
def test_what_it_serves(change, reason):
    found = supports(bare(**change))
    assert found is None if reason is None else reason in found


def test_other_shapes_run_as_two_ops():
    assert next(impl for _, impl in ROW.chain("conv_evonorm_s0_fprop") if impl.supports(bare()) is None) is OPS["conv_evonorm_s0_fprop"]
    serving = [impl for _, impl in ROW.chain("conv_evonorm_s0_fprop") if impl.supports(bare(size=96)) is None]
    assert OPS["conv_evonorm_s0_fprop"] not in serving
    assert len(serving) == 2  # Winograd's convolution and the direct one, each with the norm behind it


def test_slabs_hold_an_image_once_and_fit_on_a_multiprocessor():
    for change in ({}, {"size": 64}, {"size": 8, "groups": 8}, {"size": 2, "n": 4096}):
        made = slabs(bare(**change))
        assert made
        for slab in made:
            assert slab.threads * (slab.slots - 1) < slab.items <= slab.threads * slab.slots
            assert slab.threads * slab.blocks * (16 * slab.slots + 32) <= 65536
    assert [(slab.channels, slab.slots, slab.blocks) for slab in slabs(bare())][:2] == [(16, 2, 2), (8, 1, 3)]


@pytest.mark.skipif(cuda.SIMULATOR, reason="in the simulator blocks run one behind the other")
def test_small_batches_meet():
    def chosen(n, multiprocessors=132):
        call = replace(bare("conv_evonorm_b0_fprop", n=n), attrs={"stride": 1, "pad": 1, "eps": 1e-3})
        return OPS[call.op].tile(call, multiprocessors)

    assert [chosen(n).together for n in (16, 64, 256)] == [1, 1, 0]
    assert chosen(64, 100).together == 0
    assert OPS["conv_evonorm_b0_infer"].tile(bare("conv_evonorm_b0_infer"), 132).together == 0


@pytest.mark.skipif(cuda.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("op", OPS)
def test_slabs_stay_in_registers(op):
    case = next(case for case in conv_norm_cases([(ConvShape(4, 64, 28, 28, 64, 3, 3, 1, 1), 32)]) if case.op == op)
    bound = bound_of(case)
    for tile in IMPLS[op].candidates(bound.call, 132):
        (launch,) = [launch for launch in bound.with_tiles([tile])[0].launches if launch.name == LAST]
        report = compile_launch(launch)
        assert (report.frame_bytes, report.registers * tile.blocks * launch.block <= 65536) == (0, True), (tile, report.registers)


def test_bytes_by_hand():
    call = replace(bare(n=100), tile=replace(candidates(bare(n=100), 132)[0], images=64))
    made = OPS[call.op].traffic(call)
    assert len(made) == 1 + 2 * 3
    image = 4 * 28 * 28 * 64
    assert [made[3], made[6]] == [Traffic(n * 4 * image, n * (2 * image + 8 * 32), n * 4 * image) for n in (64, 36)]
    whole = replace(call, tile=replace(call.tile, images=100, together=1))
    meets = replace(whole, op="conv_evonorm_b0_fprop", attrs={"stride": 1, "pad": 1, "eps": 1e-3})
    packets, points = 16 * 100 * 64, 100 * 4 * image
    assert OPS[meets.op].traffic(meets)[3:] == [Traffic(points + 100 * packets, 100 * (2 * image + 8 * 64) + packets + 768, points + packets)]
    call = replace(call, op="conv_evonorm_s0_infer", out_shapes=call.out_shapes[:1], out_dtypes=("float32",))
    assert OPS[call.op].traffic(call)[3] == Traffic(64 * 4 * image, 64 * image, 64 * 4 * image)


@pytest.mark.skipif(not cuda.SIMULATOR, reason="only the simulator tells loads and stores one by one")
def test_bytes_load_by_load(place, monkeypatch):
    case = next(conv_norm_cases([(ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1), 8)]))
    bound = Bound(IMPLS[case.op], case.op, case.ins, case.outs, place=place, attrs=case.attrs, layout="NHWC", tile=tiny(16, 1))
    *others, last = bound.launches
    for launch in others:
        launch.run()
    channels = {id(value) for value in bound.call.ins[2:]}
    assert counted(last, monkeypatch, channels) == OPS[case.op].traffic(bound.call)[-1]
