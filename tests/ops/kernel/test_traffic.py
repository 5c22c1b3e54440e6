"""Tests of what kernels ask memory for: every kernel of the two large rows has a count, counts agree with hand-made ones and, in the simulator, with
every single load and store of the kernels themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from counted import counted

from nbcnn.check.cases import mean_cases
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.plans import training_plan, training_program
from nbcnn.modes import MODES, named
from nbcnn.ops.conv.fused import pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.simt.im2col import Window, product_traffic
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.conv.winograd.engine import WinogradTile
from nbcnn.ops.kernel.call import Call, planned_call
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.kernel.traffic import Traffic, clipped, met, total, windows
from nbcnn.ops.products import gemm
from nbcnn.plan.flops import step_bytes
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

ROWS = [(mode, "fp32", (7, 5)) for mode in ("naive", "tiled", "im2col", "cudacore")]
ROWS += [("tensorcore", p, cc) for p in ("bf16", "tf32", "fp32") for cc in ((8, 0), (9, 0))]


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="nothing runs here: once without the simulator is enough")
@pytest.mark.parametrize(("mode", "precision", "capability"), ROWS)
@pytest.mark.parametrize("fusing", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 64, 1024])
def test_every_step_of_a_training_plan_has_a_count(mode, precision, capability, fusing, batch):
    plan = training_plan(MODES[mode, precision], batch, target=Target(capability, H200.multiprocessors), fusing=fusing)
    for item in plan.steps:
        assert item.how.impl.traffic is not None, (item.step.op, item.how.mode)
        launches = item.how.impl.traffic(planned_call(item, plan.layout))
        for one in launches:
            assert 0 < one.distinct <= one.read, (item.step.op, one)
            assert one.write > 0
        # What a step cannot do without, less biases, learning rates and the like, and with filters in the packed form that is read.
        filters = sum(buf.nbytes for buf in item.step.ins if buf.home == "param")
        assert total(launches).logical >= 0.999 * step_bytes(item.step) - filters - 64 * 1024, (item.step.scope, item.step.op)


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator makes no tensor maps")
@pytest.mark.parametrize(("mode", "precision", "capability"), ROWS)
@pytest.mark.parametrize("batch", [1, 256])
def test_a_count_for_every_launch(mode, precision, capability, batch):
    program = training_program(MODES[mode, precision], batch, target=Target(capability, H200.multiprocessors))
    for item, launches in program.bound:
        made = item.how.impl.traffic(planned_call(item, program.plan.layout))
        assert len(made) == len(launches), (item.step.op, item.how.mode)


def test_windows_by_hand():
    assert met(4, 3, 4, first=1) == (4, 3)
    assert met(5, 2, 2, first=2) == (3, 2)  # windows −2…−1, −1…0, 0…1, 1…2, 2…3 of positions 0 and 1
    assert met(4, 3, 1, stride=2, first=1) == (1, 1)  # only the middle tap of the first window is at position 0
    assert windows(4, 3, 4, first=1) == (10, 4)  # 3×3, padding 1: the two outermost taps fall outside
    assert windows(2, 2, 4, stride=2) == (4, 4)
    assert windows(4, 3, 2, first=1, dilate=2) == (5, 2)
    assert clipped(10, 8) == 10
    assert clipped(10, 8, 3) == 16 + 16 + 10


def call_of(op: str, ins, outs, tile=None, **attrs) -> Call:
    return Call(named(op), (), (), ins, outs, attrs, "NHWC", tile, in_dtypes=("float32",) * len(ins), out_dtypes=("float32",) * len(outs))


def test_streaming_ops_by_hand():
    common = dict(MODES["cudacore", "fp32"].fallbacks[-1][1])
    image = (2, 4, 6, 6)
    assert common[named("relu_dgrad")].traffic(call_of("relu_dgrad", (image, image), (image,))) == [Traffic(2 * 1152, 1152, 2 * 1152)]
    up = call_of("upsample_fprop", (image,), ((2, 4, 12, 12),), factor=2)
    assert common[named("upsample_fprop")].traffic(up) == [Traffic(1152, 4 * 1152, 1152)]
    sgd = call_of("sgd", ((1000,),) * 3 + ((7,), (8,)), ((1000,), (1000,), (8,)))
    assert common[named("sgd")].traffic(sgd) == [Traffic(12_000, 8_000, 12_000)]
    pooled = replace(call_of("maxpool_fprop", (image,), ((2, 4, 3, 3),) * 2, size=2, stride=2), out_dtypes=("float32", "uint8"))
    assert common[named("maxpool_fprop")].traffic(pooled) == [Traffic(1152, 5 * 72, 1152)]


def test_a_gemm_by_hand():
    # One image of 4×4, 16 channels to 100 filters, 3×3, padding 1: 10·10 of the 12·12 taps of a channel are inside.
    (one,) = product_traffic(Tile(32, 64, 16, 4, 4), 100, (1, 16, 4, 4, 4, 4, 1, 1), Window(3, 3))
    x, w, y = 4 * 16 * 16, 4 * 144 * 100, 4 * 16 * 100
    assert one == Traffic(2 * 4 * 16 * 100 + w, y, x + w)
    # Two rows of blocks read the filters twice; two parts of GK leave two partials, which another launch adds.
    first, second = product_traffic(Tile(32, 64, 16, 4, 4, 2), 100, (4, 16, 4, 4, 4, 4, 1, 1), Window(3, 3, after="mask"))
    assert first == Traffic(4 * 2 * 4 * 16 * 100 + 2 * w, 2 * 4 * y, 4 * x + w)
    assert second == Traffic(3 * 4 * y, 4 * y, 3 * 4 * y)


# -- the simulator: every load and store of the kernels


TINY, WIDE = ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 1), ConvShape(1, 20, 6, 6, 24, 3, 3, 1, 1)
EVEN = ConvShape(1, 16, 8, 8, 16, 3, 3, 1, 1)
FIRST, LAST = ConvShape(1, 3, 4, 6, 16, 3, 3, 1, 1), ConvShape(1, 16, 4, 6, 3, 3, 3, 1, 1)
SMALL = Tile(64, 32, 16, 4, 4)
BIAS = {"conv_fprop", "conv_relu_fprop", "conv_relu_pool_fprop", "upconv_fprop", "upconv_relu_fprop", "upconv_mse_fprop"}
UNCOUNTED = dict.fromkeys(BIAS, (2,)) | {"sgd": (3, 4, 5), "adam": (4, 5, 6), "gather": (1, 2), "gather_labels": (2,)}


def simulated():
    """(part of the row cudacore, case, tile or None)."""
    wanted = {"maxpool_fprop", "maxpool_dgrad", "avgpool_fprop", "upsample_fprop", "upsample_dgrad", "mse_fprop", "mse_dgrad", "flatten_fprop"}
    for case in mean_cases():
        if str(case.op) in wanted or str(case.op) in ("softmax_xent_fprop", "sgd", "gather", "gather_labels", "advance"):
            yield -1, case, None
    # A sum over images takes long in the simulator: fewer channels, still more than a tile has.
    wgrads = (case for case in conv_cases(ConvShape(1, 9, 4, 5, 20, 3, 3, 1, 1)) if str(case.op) == "conv_wgrad")
    forward = (case for case in conv_cases(WIDE) if str(case.op) != "conv_wgrad")
    for case in chain(forward, wgrads, relu_cases(WIDE), pooled_cases(WIDE), up_cases(TINY)):
        if str(case.op) not in ("upconv_mse_fprop", "conv_pool_wgrad", "unpool") and "no bias" not in case.label:
            for split in (1,) if str(case.op) == "conv_wgrad" else (2,):
                yield -1, case, replace(SMALL, split=split)
    for case in gemm.cases(((20, 32, 36), (20, 27, 36))):
        yield -1, case, replace(SMALL, split=2 if case.ins[0].shape[1] == 32 else 1)
    for case in chain(conv_cases(FIRST), conv_cases(LAST), pooled_cases(FIRST), up_cases(LAST)):
        yield 0, case, None
    for case in chain(conv_cases(TINY), conv_cases(EVEN), relu_cases(TINY), pooled_cases(TINY), up_cases(TINY)):
        whole = str(case.op) != "conv_wgrad" or case.ins[0].shape[2] == 8  # weight gradients need whole k-tiles of an image
        others = ("conv_pool_wgrad", "upconv_mse_fprop", "upconv_fprop", "conv_relu_fprop", "conv_fprop")  # not its own, or with a twin here
        if whole and str(case.op) not in others and "no bias" not in case.label:
            yield 1, case, WinogradTile(1, 64, 32, 4, 4)


def runnable():
    """One case of each op, part and tile that the part runs, the first with each number of operands."""
    seen, row = set(), MODES["cudacore", "fp32"]
    for part, case, tile in simulated():
        impl = row.fallbacks[part][1].get(case.op)
        key = (part, case.op, tile, len(case.ins), len(case.outs), part == 0 and case.ins[0].shape[1] < 4)
        if impl is not None and impl.traffic is not None and key not in seen:
            seen.add(key)
            yield pytest.param(part, case, tile, id=f"{part} {case.op} {case.label} {getattr(tile, 'split', '')}")


@pytest.mark.parametrize(("part", "case", "tile"), list(runnable()))
def test_counts_are_those_of_the_kernels(part, case: Case, tile, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    impl = MODES["cudacore", "fp32"].fallbacks[part][1][case.op]
    # Winograd's kernels refuse what is too small to be worth it, not what they cannot do.
    impl = replace(impl, supports=lambda call, target: None) if part == 1 else impl
    try:
        bound = Bound(impl, case.op, case.ins, case.outs, device=device, attrs=case.attrs, layout="NHWC", tile=tile)
    except Unsupported as refused:
        pytest.skip(str(refused))
    uncounted = {id(bound.call.ins[at]) for at in UNCOUNTED.get(str(case.op), ()) if at < len(bound.call.ins)}
    expected = impl.traffic(replace(bound.call, ins=(), outs=(), packed=None, scratch=None))
    assert len(expected) == len(bound.launches)
    for launch, count in zip(bound.launches, expected, strict=True):
        with monkeypatch.context() as patch:
            assert counted(launch, patch, uncounted) == count, launch.name


PLAIN = (ConvShape(1, 1, 3, 4, 2, 3, 2, 1, 1), ConvShape(2, 1, 5, 4, 2, 3, 3, 2, 1), ConvShape(1, 1, 2, 9, 2, 2, 2, 1, 2))
"""Odd filters; stride 2 over two images; so much padding that some windows and taps never meet the image, and two tiles."""


@pytest.mark.parametrize("mode", ["naive", "tiled"])
@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_counts_of_the_plain_convolutions(mode, shape, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    for case in conv_cases(shape):
        # The bias is not counted; its gradient is.
        if (len(case.ins), len(case.outs)) != ((3, 1) if str(case.op) == "conv_fprop" else (2, 1) if str(case.op) == "conv_wgrad" else ()):
            plain = next(entries[case.op] for _, entries in MODES[mode, "fp32"].fallbacks if case.op in entries)
            assert_counted(plain, case, device, monkeypatch)


@pytest.mark.parametrize(("count", "terms"), [(260, 1), (60, 6)])
def test_counts_of_packed_weights(count, terms, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    index = np.arange(terms * count, dtype=np.int32).reshape(terms, count)
    case = Case(Op("pack_weights"), "", (np.ones(index.size, np.float32), index), (((count,), "float32"),))
    assert_counted(MODES["cudacore", "fp32"].fallbacks[-1][1][named("pack_weights")], case, device, monkeypatch)


def assert_counted(impl, case, device, monkeypatch):
    """The counts of `impl` are the loads and stores of its kernels, every one."""
    bound = Bound(impl, case.op, case.ins, case.outs, device=device, attrs=case.attrs)
    expected = impl.traffic(replace(bound.call, ins=(), outs=()))
    assert len(expected) == len(bound.launches)
    for launch, count in zip(bound.launches, expected, strict=True):
        with monkeypatch.context() as patch:
            assert counted(launch, patch) == count, (case.op, case.label)
