"""Tests of depthwise convolution of series: the reference against plain loops, gradients against the forward, kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import assert_lean, full
from counted import counted
from covering import Cover, together

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu import compiler
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.lockstep.check import checking
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.kernels import capability_of
from nbcnn.lab.studies import dwconv
from nbcnn.modes import MODES, named
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.series.dwconv1d import VARIANTS, best_backward, boxes, reference, segments, whole
from nbcnn.ops.series.dwconv1d.boxes import Boxes
from nbcnn.ops.series.dwconv1d.reference import MEAN_SERIES, REAL_SERIES, series_backward_cases, series_cases
from nbcnn.ops.series.dwconv1d.segments import Segments
from nbcnn.ops.series.dwconv1d.series import Correlation, of_gradient, of_images
from nbcnn.ops.series.dwconv1d.sliding import Sliding
from nbcnn.ops.series.dwconv1d.whole import Whole
from nbcnn.plan import merging
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

KERNELS = [(variant, op) for variant, ops in VARIANTS.items() for op in map(str, ops)]
PASSES = ("dwconv1d_fprop", "dwconv1d_dgrad", "dwconv1d_wgrad")
PADDINGS = ["causal", "same"]
SHAPES = [(2, 3, 5, 9), (1, 4, 24, 5)] if gpu_device.SIMULATOR else [*MEAN_SERIES, (2, 1, 48, 48), (1, 1, 150, 7), *REAL_SERIES]


def by_loops(x, w, d, padding):
    """y, and the matrix of its derivative by x, element by element."""
    _, c, length = x.shape
    taps = w.shape[1]
    y, jacobian = np.zeros_like(x), np.zeros((c, length, length))
    for at, t, j in np.ndindex(c, length, taps):
        s = t - j if padding == "causal" else t + j - taps // 2
        if 0 <= s < length:
            y[:, at, t] += w[at, j] * x[:, at, s]
            jacobian[at, t, s] += w[at, j]
    y += d[:, None] * x
    jacobian += d[:, None, None] * np.eye(length)
    return y, jacobian


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", MEAN_SERIES)
def test_reference_against_loops(shape, padding, rng):
    n, c, length, taps = shape
    x, w, d, dy = (rng.standard_normal(size) for size in ((n, c, length), (c, taps), (c,), (n, c, length)))
    wanted, jacobian = by_loops(x, w, d, padding)
    y, plain, dx, dw, dd = np.full_like(x, np.nan), np.full_like(x, np.nan), np.full_like(x, np.nan), np.full_like(w, np.nan), np.full_like(d, np.nan)
    reference.dwconv1d_fprop(x, w, d, y, padding=padding)
    reference.dwconv1d_fprop(x, w, plain, padding=padding)
    np.testing.assert_allclose(y, wanted, atol=1e-12)
    np.testing.assert_allclose(plain + d[:, None] * x, wanted, atol=1e-12)
    reference.dwconv1d_dgrad(dy, w, d, dx, padding=padding)
    np.testing.assert_allclose(dx, np.einsum("nct,cts->ncs", dy, jacobian), atol=1e-12)
    reference.dwconv1d_wgrad(x, dy, dw, dd, padding=padding)
    # y is linear in w and in d: a change of one of them by one changes <dy, y> by its gradient.
    for c_at, j in np.ndindex(w.shape):
        one = np.zeros_like(w)
        one[c_at, j] = 1
        moved, _ = by_loops(x, one, np.zeros(c), padding)
        assert dw[c_at, j] == pytest.approx(np.vdot(dy, moved), abs=1e-12)
    np.testing.assert_allclose(dd, (dy * x).sum((0, 2)), atol=1e-12)


def test_reference_refuses_an_unknown_padding():
    x = np.ones((1, 1, 4))
    with pytest.raises(ValueError, match="valid"):
        reference.dwconv1d_fprop(x, np.ones((1, 2)), x.copy(), padding="valid")


@pytest.mark.parametrize("case", [case for shape in MEAN_SERIES for case in series_cases(*shape) if "wgrad" not in str(case.op)], ids=str)
def test_the_correlation_form_is_the_same_sum(case):
    source, w, *_ = (array.astype(np.float64) for array in case.ins[:2])
    g = of_images(Call(case.op, (), (), tuple(a.shape for a in case.ins), (case.outs[0][0],), case.attrs))
    padded = np.pad(source, ((0, 0), (0, 0), (g.left, g.T - 1 - g.left)))
    filters = w[:, ::-1] if g.flipped else w
    made = sum(filters[:, i, None] * padded[:, :, i : i + g.L] for i in range(g.T))
    if g.skip:
        made = made + case.ins[2][:, None].astype(np.float64) * source
    np.testing.assert_allclose(made, gradcheck.reference(case)[0], atol=1e-12)


def chosen(op, shape):
    """The cases of an op; in the simulator, where a thread is a Python thread, those with a skip, which differ from the others in one tap."""
    cases = [*series_cases(*shape), *series_backward_cases(*shape)]
    return [case for case in cases if case.op == named(op) and (not gpu_device.SIMULATOR or "skip" in case.label)]


def of_pass(op, shapes):
    """Of the sizes for variant `best` those that a GPU runs of a pass, where each is a kernel to compile: `dgrad` is fprop's kernel mirrored, and
    `bwd` has all that `wgrad` has, so these two have every other one.
    """
    return shapes if gpu_device.SIMULATOR or str(op).endswith(("fprop", "bwd")) else shapes[:: 2 if str(op).endswith("dgrad") else -2]


def check(impl, cases, device):
    """That an implementation is within the bounds of (case, tile), of which a GPU takes those that `Cover` takes."""
    row, cover = MODES["naive", "fp32"], Cover()
    for case, tile in cases:
        if cover.takes_case(row, impl, case, device, tile):
            assert gradcheck.parity(row, impl, case, device, tile) <= gradcheck.bound(case), (case.label, tile)


@pytest.mark.parametrize(("variant", "op"), KERNELS)
@pytest.mark.parametrize("shapes", together(SHAPES))
def test_kernels_are_within_their_bounds(variant, op, shapes, device):
    shapes = of_pass(op, shapes) if variant == "best" else shapes
    check(VARIANTS[variant][named(op)], [(case, None) for shape in shapes for case in chosen(op, shape)], device)


def test_series_and_filters_longer_than_a_tile(device):
    """Every loop over tiles, series and taps goes round more than once, and its last trip has less to do."""
    for shape in ((3, 1, 420, 70), (37, 2, 9, 5)):
        for variant, op in KERNELS:
            case = chosen(op, shape)[-1]
            assert gradcheck.parity(MODES["naive", "fp32"], VARIANTS[variant][case.op], case, device) <= gradcheck.bound(case), (variant, case.label)


# Tiles of one series in neighbouring rows; more parts than there is work for; strips of several tiles.
TILES = [("dwconv1d_fprop", Sliding(1, 4)), ("dwconv1d_bwd", Sliding(2, 2, 3)), ("dwconv1d_wgrad", Sliding(1, 1, 2))]


@pytest.mark.parametrize(("op", "tile"), TILES)
def test_other_tiles_of_the_best_variant(op, tile, device):
    for case in chosen(op, (9, 1, 52, 7)):
        assert gradcheck.parity(MODES["naive", "fp32"], VARIANTS["best"][named(op)], case, device, tile) <= gradcheck.bound(case), case.label


# Two groups of results and a tap too few for its quad; more taps than elements; a strip of two iterations; more parts than there are series.
WHOLE = [((3, 2, 20, 7), Whole(1)), ((2, 1, 12, 15), Whole(1)), ((129, 1, 4, 2), Whole(1)), ((5, 1, 8, 8), Whole(3))]
if not gpu_device.SIMULATOR:
    WHOLE += [(shape, Whole(2)) for shape in ((37, 8, 48, 48), (300, 3, 64, 64), (65, 2, 20, 33), (200, 2, 52, 5))]


@pytest.mark.parametrize("op", VARIANTS["best"])
@pytest.mark.parametrize("shapes", together(WHOLE, ids=lambda each: f"{each[0]}-{each[1]}"))
def test_series_that_lie_whole_in_registers(op, shapes, device):
    check(VARIANTS["best"][named(op)], [(case, tile) for shape, tile in of_pass(op, shapes) for case in chosen(op, shape)], device)


# What TMA moves: channels that leave lanes idle; strips of several boxes per warp; more parts than there is work; several warps' worth of a series;
# filters that reach two rows back, or forward.
if gpu_device.SIMULATOR:
    BY_TMA = [((9, 33, 20, 7), Boxes(1)), ((33, 33, 8, 9), Boxes(2)), ((2, 2, 1024, 7), Segments(1, 1)), ((3, 1, 2048, 40), Segments(1, 3))]
else:
    BY_TMA = [((5, 40, 48, 48), Boxes(1)), ((300, 40, 48, 48), Boxes(1)), ((9, 33, 64, 64), Boxes(2)), ((2, 33, 20, 33), Boxes(3))]
    BY_TMA += [((2, 2, 1024, 7), Segments(1, 1)), ((3, 2, 2048, 48), Segments(1, 3)), ((9, 1, 4064, 64), Segments(3, 2))]


@pytest.mark.parametrize("op", VARIANTS["best"])
def test_series_that_tma_moves(op, device):
    if not (compiler.LOCKSTEP or device.target.tma):
        pytest.skip("no TMA here")
    check(VARIANTS["best"][op], [(case, tile) for shape, tile in of_pass(op, BY_TMA) for case in chosen(op, shape)], device)


KINDS = [
    ((16384, 128, 48, 48), Boxes),
    ((512, 128, 48, 48), Whole),
    ((4, 8, 48, 48), Sliding),
    ((64, 8, 4096, 64), Segments),
    ((9, 8, 1000, 48), Sliding),
]


@pytest.mark.parametrize(("shape", "kind"), KINDS, ids=str)
def test_tma_moves_what_it_can(shape, kind):
    for op, impl in VARIANTS["best"].items():
        call = dwconv.call_of(op, shape, "causal")
        assert isinstance(impl.tile(call, H200), kind), op
        stored = replace(call, in_dtypes=("bfloat16",) * len(call.in_dtypes))
        assert not {Boxes, Segments} & set(map(type, impl.candidates(stored, H200))), op


def test_every_unit_of_work_is_taken_once():
    for shape in ((512, 128, 48, 48), (16384, 128, 48, 48), (3, 40, 48, 48), (256, 128, 1024, 48), (64, 256, 4096, 64)):
        g = of_images(dwconv.call_of("dwconv1d_fprop", shape, "causal"))
        for warps, resident in ((8, 2), (4, 3)):
            for tile, count in (
                (boxes.choose(g, H200, warps, resident), g.N),
                (segments.choose(g, H200, warps, resident), segments.units(g)),
            ):
                taken = tile.parts * warps * tile.strip(g, warps)
                assert taken - warps * tile.strip(g, warps) < count <= taken


@pytest.mark.parametrize(("length", "taps", "left"), [(1024, 48, 47), (4096, 64, 0), (2016, 40, 20), (1024, 1, 0)])
def test_what_segments_fetch(length, taps, left):
    g = Correlation(2, 3, length, taps, left, False, False)
    reach, rows = segments.Reach(taps, left), length // 32
    boxes_of = [range(first - reach.rows[0], first - reach.rows[0] + reach.box_rows) for first in range(0, rows, 32)]
    assert segments.loads(g) == 32 * sum(0 <= row < rows for box in boxes_of for row in box)
    # Every element that a tap of the first or the last lane meets is in the box, and in the lane's window.
    assert 32 * reach.rows[0] >= 4 * reach.quads[0] >= left
    assert 32 * reach.rows[1] >= 4 * reach.quads[1] >= taps - 1 - left
    assert reach.box_floats >= 32 * reach.box_rows


def test_short_series_are_taken_whole_where_they_are_many():
    older = replace(H200, capability=(8, 0))
    for op, impl in VARIANTS["best"].items():
        for shape, kind in (((512, 128, 48, 48), Whole), ((8, 128, 48, 48), Sliding), ((512, 128, 50, 48), Sliding), ((512, 8, 256, 48), Sliding)):
            call = dwconv.call_of(op, shape, "causal")
            tiles = impl.candidates(call, older)
            assert isinstance(impl.tile(call, older), kind), (op, shape)
            assert impl.tile(call, older) in tiles
            assert (Whole in map(type, tiles)) == (shape[2] in (48,)), (op, shape)


def test_parts_keep_every_multiprocessor_busy_and_leave_no_series_out():
    for n in (32, 33, 512, 16384):
        g = of_images(dwconv.call_of("dwconv1d_fprop", (n, 128, 48, 48), "causal"))
        tile = whole.choose(g, H200, whole.WARPS, whole.resident(48))
        assert tile.parts * whole.WARPS * 32 * tile.strip(g, whole.WARPS) >= n
        assert tile.parts * 128 >= min(0.9 * 132 * whole.resident(48), 128 * n / 128)


@pytest.mark.parametrize("op", ["dwconv1d_fprop", "dwconv1d_wgrad"])
def test_more_taps_than_are_staged_at_once(op, device):
    for case in chosen(op, (1, 1, 20, 150)):
        assert gradcheck.parity(MODES["naive", "fp32"], VARIANTS["best"][named(op)], case, device) <= gradcheck.bound(case), case.label


def test_the_fused_backward_knows_its_limit():
    assert merging.MOST_TAPS == best_backward.FUSED_TAPS
    series, filters = (2, 3, 200), (3, 97)
    call = Call(Op("dwconv1d", "bwd"), (), (), (series, series, filters), (series, filters), {"padding": "causal"})
    assert "97 taps" in VARIANTS["best"][named("dwconv1d_bwd")].supports(call, H200)


@pytest.mark.parametrize(("variant", "op"), [(v, op) for v, op in KERNELS if op != "dwconv1d_fprop"])
def test_gradients_repeat_bit_for_bit(variant, op, gpu):
    case = chosen(op, (37, 8, 48, 48))[-1]
    first, second = (run_op(VARIANTS[variant][named(op)], op, case.ins, case.outs, attrs=case.attrs, device=gpu) for _ in range(2))
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["tfloat32", "bfloat16"])
@pytest.mark.parametrize(("variant", "op"), KERNELS)
def test_kernels_of_stored_series(variant, op, kind, device):
    precision = {"tfloat32": "tf32", "bfloat16": "bf16"}[kind]
    for case in chosen(op, (2, 2, 12, 5))[-1:]:
        error = gradcheck.parity(MODES["tensorcore", precision], VARIANTS[variant][named(op)], case, device)
        assert error <= gradcheck.bound(case, precision), case.label


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", MEAN_SERIES)
def test_products_are_counted_one_by_one(shape, padding):
    n, c, length, taps = shape
    counted = np.zeros((1, 1, length))
    reference.dwconv1d_fprop(np.ones((1, 1, length)), np.ones((1, taps)), counted, padding=padding)
    series, filters = (n, c, length), (c, taps)
    for op in PASSES:
        ins, outs = ((series, series), (filters,)) if "wgrad" in str(op) else ((series, filters), (series,))
        g = (of_gradient if "wgrad" in str(op) else of_images)(Call(named(op), (), (), ins, outs, {"padding": padding}))
        assert g.products() == counted.sum(), op


@pytest.mark.parametrize(("variant", "op"), KERNELS)
@pytest.mark.parametrize("shape", [(3, 2, 5, 9), (2, 1, 12, 3)])
def test_counts_are_those_of_the_kernels(variant, op, shape, device, monkeypatch):
    if not gpu_device.SIMULATOR:
        pytest.skip("a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
    impl = VARIANTS[variant][named(op)]
    tiles = [None, Whole(1)] if variant == "best" and shape[2] % 4 == 0 else [None]
    for case, tile in ((case, tile) for case in chosen(op, shape) for tile in tiles):
        bound = Bound(impl, op, case.ins, case.outs, device=device, attrs=case.attrs, tile=tile)
        wanted = impl.traffic(bound.call)
        assert len(wanted) == len(bound.launches)
        for launch, count in zip(bound.launches, wanted, strict=True):
            with monkeypatch.context() as patch:
                assert counted(launch, patch) == count, (launch.name, case.label)


def stand_in(op, variant, shape, padding, skip, kind="float32", target=H200):
    """The launches of `variant` for arrays that only have a size."""
    n, c, length, taps = shape
    series, filters, one = ((n, c, length), kind), ((c, taps), "float32"), ((c,), "float32")
    ins, outs = {
        "dwconv1d_wgrad": ([series, series], [filters, *[one] * skip]),
        "dwconv1d_bwd": ([series, series, filters, *[one] * skip], [series, filters, *[one] * skip]),
    }.get(op, ([series, filters, *[one] * skip], [series]))
    arrays = [tuple(np.zeros(numel(s), "uint16" if k == "bfloat16" else k) for s, k in side) for side in (ins, outs)]
    shapes, dtypes = [tuple(s for s, _ in side) for side in (ins, outs)], [tuple(k for _, k in side) for side in (ins, outs)]
    impl = VARIANTS[variant][named(op)]
    call = Call(named(op), (), (), *shapes, {"padding": padding}, in_dtypes=dtypes[0], out_dtypes=dtypes[1])
    call = Call(**(vars(call) | {"tile": impl.tile(call, target)}))
    nbytes = impl.scratch(call)
    return impl.bind(Call(**(vars(call) | {"ins": arrays[0], "outs": arrays[1], "scratch": np.zeros(nbytes, np.uint8) if nbytes else None})))


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("variant", "op", "arch"),
    [
        *((variant, op, "75") for variant, op in KERNELS),
        *(("best", op, "90a") for op in ("dwconv1d_fprop", "dwconv1d_dgrad", "dwconv1d_wgrad")),
        *full(("best", "dwconv1d_bwd", "90a"), *((variant, op, "90a") for variant, op in KERNELS if variant != "best")),
    ],
)
def test_kernels_compile_without_spills(variant, op, arch):
    # Best, tiles: twelve sums twice and two windows of elements. 80 registers leave 768 threads on a multiprocessor.
    tiled = 80 if variant == "best" and op in ("dwconv1d_wgrad", "dwconv1d_bwd") else 64
    # Best, whole series: 48 elements and twelve sums, or 48 sums, or both; RESIDENT blocks have as many (whole.py, whole_backward.py).
    # What TMA moves: 16 warps share a multiprocessor's registers, 8 where there are sums of taps too (boxes.py, boxes_backward.py).
    whole = {"dwconv1d_bwd": 144}.get(op, 80) if variant == "best" else 64
    whole = whole if arch != "90a" or variant != "best" else {"dwconv1d_fprop": 128}.get(op, 255)
    many = 16384 if (variant, arch) == ("best", "90a") else 512
    # Best's dgrad is fprop's kernel mirrored, and bwd's has all that wgrad's has.
    covered = variant == "best" and op in ("dwconv1d_dgrad", "dwconv1d_wgrad")
    short = [] if covered else [((many, 128, 48, 48), "causal", True, whole)]
    short += [((2, 1, 1024, 3), "causal", False, 128)] if (variant, arch) == ("best", "90a") else []
    for shape, padding, skip, registers in (*short, ((2, 3, 101, 7), "same", False, tiled)):
        for launch in stand_in(op, variant, shape, padding, skip, target=Target(capability_of(arch), 132)):
            assert_lean(launch, arch, registers)


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="needs NBCNN_SIMULATOR=1")
@pytest.mark.parametrize("variant", ["warp", "best"])
def test_kernels_have_no_fault_in_the_checking_mode(variant, device):
    for shape in MEAN_SERIES:
        for case in [*series_cases(*shape), *series_backward_cases(*shape)]:
            if case.op in VARIANTS[variant]:
                with checking() as seen:
                    run_op(VARIANTS[variant][case.op], case.op, case.ins, case.outs, device=device, attrs=case.attrs)
                assert not seen.faults, (case.op, case.label, *map(str, seen.faults))
