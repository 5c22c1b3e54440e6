"""Tests of EvoNorm on slabs held in registers: which slabs there are, the kernels against the reference, compiled, and what they ask memory for.

In the simulator one block runs after another, so there a batch whose blocks would meet is one block (NCHW) or one image (NHWC).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import assert_lean
from counted import counted

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200, Target
from nbcnn.modes import COMMON, MODES, named
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.norms import b0_batch
from nbcnn.ops.norms.held import BLOCKS, REGISTERS, THREADS, Held, slabs_of, thread_group_of
from nbcnn.ops.norms.reference import norm_cases
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.plan.shapes import numel

ROWS = {"NCHW": MODES["naive", "fp32"], "NHWC": MODES["cudacore", "fp32"]}
OPS = ("evonorm_s0_fprop", "evonorm_s0_grads", "evonorm_b0_fprop", "evonorm_b0_infer", "evonorm_b0_grads")
SMALL = {str(case.op): case for case in norm_cases((((2, 4, 3, 4), 2, "normal"),))}
ONE = {str(case.op): case for case in norm_cases((((1, 8, 2, 4), 4, "offset 2000"),))}
SMALL_GPU = Target((9, 0), 2, simulated=gpu_device.SIMULATOR)


def bare(op: str, shape: tuple[int, ...], layout: str, groups: int, kind: str = "float32") -> Call:
    """The op's call without arrays, for images of `shape`."""
    small = next(case for case in norm_cases((((1, *shape[1:2], 2, 2), groups, "normal"),)) if case.op == named(op))

    def grown(of: tuple[int, ...]) -> tuple[int, ...]:
        return shape if len(of) == 4 else of if of == (shape[1],) else (of[0] * shape[0],)

    ins = tuple(grown(array.shape) for array in small.ins)
    outs = tuple((shape[1],) if isinstance(out, int) else grown(out[0]) for out in small.outs)
    # Planes of one image are as many as channels: the position of a statistic says whose it is.
    at = {"evonorm_b0_fprop": ("out", 1), "evonorm_b0_grads": ("in", 4)}.get(str(op))
    if at:
        side = list(outs if at[0] == "out" else ins)
        side[at[1]] = side[at[1] + 1] = (shape[0] * shape[1],)
        ins, outs = (ins, tuple(side)) if at[0] == "out" else (tuple(side), outs)
    kinds = tuple(tuple(kind if len(s) == 4 else "float32" for s in side) for side in (ins, outs))
    return Call(named(op), (), (), ins, outs, small.attrs, layout, in_dtypes=kinds[0], out_dtypes=kinds[1])


def bound(call: Call):
    """The launches of a call on stand-in arrays."""
    impl = COMMON[call.op]

    def arrays(shapes, kinds):
        return tuple(np.zeros(numel(shape), np.uint16 if kind == "bfloat16" else np.float32) for shape, kind in zip(shapes, kinds, strict=True))

    call = replace(call, ins=arrays(call.in_shapes, call.in_dtypes), outs=arrays(call.out_shapes, call.out_dtypes))
    return impl.bind(replace(call, scratch=np.zeros(impl.scratch(call), np.uint8)))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(16, 64, 28, 28), (3, 8, 2, 2), (5, 12, 14, 14), (128, 32, 28, 28), (7, 64, 4, 7)])
@pytest.mark.parametrize("at_once", [False, True])
def test_slabs_cover_the_images_and_fit(shape, layout, at_once):
    n, c, h, w = shape
    for held in slabs_of(shape, layout, 1, (2, 1), 132, at_once):
        threads = thread_group_of(held, layout, 1, c)
        assert c % held.channels == n % held.images == held.threads % WARP == 0
        elements = h * w // threads.width
        assert (held.slots - 1) * threads.ranks < elements <= held.slots * threads.ranks
        assert held.blocks * held.threads <= THREADS
        assert held.blocks <= BLOCKS
        assert held.blocks * held.threads * threads.floats * held.tensors < REGISTERS
        if at_once:
            assert held.blocks * 132 * held.images * held.channels >= n * c
            assert held.together == 1


def test_what_cannot_be_held_is_not():
    assert slabs_of((2, 6, 3, 5), "NCHW", 1, (1,), 132) == []  # fifteen pixels are no quads
    assert slabs_of((2, 6, 4, 4), "NHWC", 1, (1,), 132) == []  # nor are six channels
    assert slabs_of((2, 64, 4, 4), "NHWC", 16, (1,), 132) == []
    assert slabs_of((2, 8, 256, 256), "NHWC", 1, (1,), 132) == []
    assert slabs_of((4096, 64, 28, 28), "NCHW", 1, (1,), 132, at_once=True) == []


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_held_kernels_against_the_reference(op, layout, device):
    row, case, impl = ROWS[layout], SMALL[op], COMMON[named(op)]
    tile = next(held for held in impl.candidates(bare(op, (2, 4, 3, 4), layout, 2), SMALL_GPU) if not held.together)
    error = gradcheck.parity(row, impl, case, device, tile)
    assert error <= gradcheck.bound(case), error


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("values", ["normal", "constant planes", "offset 2000"])
@pytest.mark.parametrize("apart", [False, True], ids=["in the pass", "in a launch of its own"])
def test_the_batch_behind_planes(layout, values, apart, device, monkeypatch):
    (case,) = (case for case in norm_cases((((3, 8, 2, 4), 4, values),)) if str(case.op) == "evonorm_b0_fprop")
    impl, row = COMMON[case.op], ROWS[layout]
    held = next(held for held in impl.candidates(bare(case.op, (3, 8, 2, 4), layout, 4), SMALL_GPU) if not held.together)
    monkeypatch.setattr(b0_batch, "LAUNCH_BYTES", 0 if apart else b0_batch.LAUNCH_BYTES)
    assert len(bound(replace(bare(case.op, (3, 8, 2, 4), layout, 4), tile=held))) == (3 if apart else 2)
    error = gradcheck.parity(row, impl, case, device, held)
    assert error <= gradcheck.bound(case), error


def test_blocks_make_the_batch_where_that_reads_less_than_a_launch_takes():
    def by_every_block(n, c):
        return b0_batch.by_every_block((n, c, 28, 28), Held(8, 1, 256, 25, 1, 4))

    # 128² · 64 planes of twelve bytes are 12.6 MB, 256² four times as many.
    assert [by_every_block(n, 64) for n in (1, 64, 128, 256, 1024)] == [True, True, True, False, False]
    assert by_every_block(64, 256)
    assert not by_every_block(64, 512)


@pytest.mark.parametrize("op", ["evonorm_b0_fprop", "evonorm_b0_grads"])
@pytest.mark.parametrize(
    ("layout", "cases", "held"),
    [("NCHW", SMALL, Held(1, 2, 64, 1, 1, 16, 1)), ("NCHW", SMALL, Held(1, 2, 64, 1, 2, 16, 1)), ("NHWC", ONE, Held(8, 1, 32, 2, 2, 16, 1))],
    ids=["a batch in a block", "and its gradient", "an image"],
)
def test_one_launch_against_the_reference(op, layout, cases, held, device):
    error = gradcheck.parity(ROWS[layout], COMMON[named(op)], cases[op], device, held)
    assert error <= gradcheck.bound(cases[op]), error


STATISTICS = {"evonorm_b0_grads": (4, 5, 6, 7), "evonorm_b0_together": (5,), "evonorm_b0_sums": (4, 5), "evonorm_b0_dgrad": (4, 5, 6, 7, 8, 9)}
"""Inputs of B0's ops that an earlier op has made of every plane (N·C) or channel (C)."""


TOUCHED = {
    "evonorm_b0_fprop": 24,
    "evonorm_b0_infer": 12,
    "evonorm_b0_grads": 24,
    "evonorm_b0_statistics": 1,
    "evonorm_b0_together": 24,
    "evonorm_b0_sums": 2,
    "evonorm_b0_dgrad": 24,
}
"""NaN in an op's first output where one pixel is NaN: a channel of two images of twelve pixels, one plane of it, or as many of these."""


def diverged(case, plane=(1, 2)):
    """The case with NaN in one pixel, and in every statistic that the pixel is in."""
    n, c = plane
    ins = [array.copy() for array in case.ins]
    image = ins[1 if str(case.op).endswith(("grads", "sums", "dgrad")) else 0]
    image[n, c, 1, 2] = np.nan
    for at in STATISTICS.get(str(case.op), ()):
        ins[at][n * image.shape[1] + c if ins[at].size == image.shape[0] * image.shape[1] else c] = np.nan
    if str(case.op) == "evonorm_b0_together":
        ins[6].reshape(3, 4, -1)[1, 2:, c] = np.nan
    return replace(case, ins=tuple(ins))


def assert_nan_where_the_reference_has_it(impl, case, device, layout, tile=None):
    bound = Bound(impl, case.op, case.ins, case.outs, device=device, attrs=case.attrs, layout=layout, tile=tile)
    bound.run()
    device.synchronize()
    for number, (got, want) in enumerate(zip(bound.results(), gradcheck.reference(case), strict=True)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"output {number}")


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("op", [op for op in SMALL if "b0" in str(op)])
def test_nan_reaches_what_its_statistics_make(op, layout, device):
    """With the kernels that hold no slab."""
    impl, case = replace(COMMON[named(op)], tile=lambda call, target: None), diverged(SMALL[op])
    assert np.isnan(gradcheck.reference(case)[0]).sum() == TOUCHED[op]
    assert_nan_where_the_reference_has_it(impl, case, device, layout)


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("op", [op for op in OPS if "b0" in str(op)])
def test_nan_reaches_what_its_statistics_make_in_held_slabs(op, layout, device):
    impl = COMMON[named(op)]
    tile = next(held for held in impl.candidates(bare(op, (2, 4, 3, 4), layout, 2), SMALL_GPU) if not held.together)
    assert_nan_where_the_reference_has_it(impl, diverged(SMALL[op]), device, layout, tile)


@pytest.mark.parametrize("op", ["evonorm_b0_fprop", "evonorm_b0_grads"])
def test_nan_reaches_what_its_statistics_make_in_one_launch(op, device):
    assert_nan_where_the_reference_has_it(COMMON[named(op)], diverged(SMALL[op]), device, "NCHW", Held(1, 2, 64, 1, 1, 16, 1))


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("at", [3, 4], ids=["v", "running"])
def test_nan_of_a_parameter_reaches_its_channel(at, held, layout, device):
    case, impl = SMALL["evonorm_b0_infer"], COMMON[named("evonorm_b0_infer")]
    case = replace(case, ins=tuple(np.where(np.arange(4) == 1, np.nan, a).astype(np.float32) if i == at else a for i, a in enumerate(case.ins)))
    tile = impl.candidates(bare(case.op, (2, 4, 3, 4), layout, 2), SMALL_GPU)[-1]
    assert not tile.together
    impl = impl if held else replace(impl, tile=lambda call, target: None)
    assert_nan_where_the_reference_has_it(impl, case, device, layout, tile if held else None)


@pytest.mark.parametrize(
    ("layout", "shape", "groups", "held"), [("NHWC", (1, 8, 2, 4), 1, Held(8, 1, 32, 2, 1, 16)), ("NCHW", (1, 3, 2, 4), 3, Held(1, 1, 32, 1, 1, 16))]
)
def test_one_warp_may_have_the_only_group(layout, shape, groups, held, device):
    case = next(case for case in norm_cases(((shape, groups, "normal"),)) if str(case.op) == "evonorm_s0_fprop")
    error = gradcheck.parity(ROWS[layout], COMMON[case.op], case, device, held)
    assert error <= gradcheck.bound(case), error


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("batch", [16, 32, 64])
@pytest.mark.parametrize("op", OPS)
def test_held_kernels_at_real_sizes(op, batch, layout, gpu):
    (case,) = (case for case in norm_cases((((batch, 64, 28, 28), 32, "normal"),)) if case.op == named(op))
    assert gradcheck.parity(ROWS[layout], COMMON[named(op)], case, gpu) <= gradcheck.bound(case)


def real_launches():
    """Every held kernel at one of the study's sizes."""
    made = {}
    for layout in ("NCHW", "NHWC"):
        for op in OPS:
            call = bare(op, (64, 64, 28, 28), layout, 32)
            for launch in bound(replace(call, tile=COMMON[named(op)].tile(call, replace(H200, simulated=gpu_device.SIMULATOR)))):
                made.setdefault(id(launch.kernel), (layout, launch))
    return list(made.values())


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("layout", "launch"), [] if gpu_device.SIMULATOR else real_launches(), ids=lambda value: getattr(value, "name", value))
def test_held_kernels_compile_without_spills(layout, launch):
    assert_lean(launch, "90a", registers=128)
    if "s0_fprop" in launch.name:
        assert_lean(launch, "75", registers=128)


@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("held", [False, True])
def test_counts_are_those_of_the_kernels(op, held, device, monkeypatch):
    case, impl = SMALL[op], COMMON[named(op)]
    tile = impl.candidates(bare(op, (2, 4, 3, 4), "NCHW", 2), SMALL_GPU)[0] if held else None
    made = Bound(impl, op, case.ins, case.outs, device=device, attrs=case.attrs, layout="NCHW", tile=tile)
    expected = impl.traffic(replace(made.call, ins=(), outs=(), packed=None, scratch=None))
    channels = {id(array) for array, shape in zip(made.call.ins, made.call.in_shapes, strict=True) if len(shape) == 1}
    assert len(expected) == len(made.launches)
    for launch, count in zip(made.launches, expected, strict=True):
        with monkeypatch.context() as patch:
            found = counted(launch, patch, channels)
        assert found.write <= count.write <= found.write + 4 * case.ins[0].shape[1], launch.name  # the running variance is an input too
        # First elements that every thread loads, an idle thread's quad, a thread's own copies of its plane's numbers.
        spare = int(np.prod(launch.grid)) * launch.block * (16 + 32)
        assert count.read - 8 * numel(case.ins[0].shape) <= found.read <= count.read + spare, launch.name
        assert found.distinct <= count.distinct + 8 * case.ins[0].shape[1]
