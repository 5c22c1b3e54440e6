"""Tests of first layers on tensor cores: against the float64 reference on a GPU; without one, refusals, packing and what the compiler makes of
them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from covering import Cover

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.one_op import Unsupported, pack_array, run_op
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.conv.fused import MEAN_FUSED, REAL_POOLED, pooled_cases, relu_cases
from nbcnn.ops.conv.reference import MEAN_CONVS, REAL_CONVS, conv_cases
from nbcnn.ops.conv.thin_mma import first_fprop, first_wgrad
from nbcnn.ops.conv.thin_mma.first import PRECISIONS, ops
from nbcnn.ops.conv.thin_mma.first_shape import MOST_ON_THE_WAY, SHARED_BYTES, Unit, filter_of_lane, image_words
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import numpy_dtype

WIDE = (ConvShape(3, 3, 32, 32, 264, 3, 3, 1, 1), ConvShape(1, 3, 17, 70, 24, 3, 3, 2, 1), ConvShape(1, 1, 9, 12, 10, 5, 5, 1, 2))
POOLED = (
    *MEAN_FUSED,
    REAL_POOLED[0],
    ConvShape(2, 3, 14, 76, 40, 3, 3, 1, 1),
    ConvShape(1, 3, 12, 8, 7, 3, 3, 2, 1),
    ConvShape(1, 2, 6, 6, 22, 2, 4, 1, 2),
)
FIRST = REAL_CONVS[0]
LARGE = (
    ConvShape(2, 3, 28, 28, 96, 5, 5, 1, 2),
    ConvShape(1, 3, 32, 32, 64, 7, 7, 2, 3),
    ConvShape(2, 3, 13, 37, 40, 5, 5, 1, 2),
    ConvShape(1, 3, 16, 16, 300, 7, 7, 1, 3),
    ConvShape(1, 10, 9, 12, 24, 3, 3, 2, 1),
    ConvShape(3, 1, 11, 9, 13, 7, 7, 1, 0),
)
"""More than 32 columns: patches are loaded product by product, and warps share the columns of a weight gradient."""
LARGE_SMALL = (ConvShape(1, 3, 8, 12, 40, 5, 5, 1, 2), ConvShape(1, 3, 12, 12, 9, 7, 7, 2, 3), ConvShape(1, 10, 6, 9, 70, 3, 3, 1, 1))


def cases() -> list[Case]:
    return cases_of((*MEAN_CONVS, FIRST, *WIDE, *LARGE), POOLED + LARGE, (*POOLED, *WIDE, *LARGE))


def cases_of(plain, pooled, relu) -> list[Case]:
    made = [case for shape in plain for case in conv_cases(shape)]
    made += [case for shape in pooled if shape.P % 2 == shape.Q % 2 == 0 for case in pooled_cases(shape)]
    return [case for case in (*made, *(case for shape in relu for case in relu_cases(shape))) if case.op in ops("bf16")]


def bare(case: Case, precision: str) -> Call:
    def kinds(shapes):
        return tuple(STORE[precision] if len(s) == 4 and not i else "float32" for i, s in enumerate(shapes))

    ins, outs = tuple(a.shape for a in case.ins), tuple(o[0] for o in case.outs)
    return Call(case.op, (), (), ins, outs, case.attrs, "NHWC", in_dtypes=kinds(ins)[:1], out_dtypes=())


def row(precision: str) -> Row:
    return Row("tensorcore", precision, "gpu", "NHWC", (("thin", ops(precision)),))


def earlier(precision, cases, tiles=lambda *_: ()):
    """What tests of the precisions before this one take."""
    for other in PRECISIONS[: PRECISIONS.index(precision)]:
        yield from ((row(other), ops(other)[case.op], case, tile) for case in cases for tile in (None, *tiles(case, other)))


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity(gpu, precision, direction):
    wrong, run, of, passes = [], set(), row(precision), [case for case in cases() if case.op.direction == direction]
    cover = Cover(earlier(precision, passes))
    for case in passes:
        impl = ops(precision)[case.op]
        with suppress(Unsupported):
            if cover.takes_case(of, impl, case, gpu) or case.op not in run:
                run.add(case.op)
                if not (error := parity(of, impl, case, gpu)) <= bound(case, precision):
                    wrong.append((case.op, case.label, error))
    assert run == {op for op in ops(precision) if op.direction == direction}
    assert not wrong, wrong


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_columns(device, precision):
    made = cases_of(LARGE_SMALL, LARGE_SMALL, LARGE_SMALL)
    cover = Cover(earlier(precision, made, tried))
    assert len(made) == sum(7 if shape.P % 2 == shape.Q % 2 == 0 else 5 for shape in LARGE_SMALL)
    for case in made:
        impl = ops(precision)[case.op]
        for tile in (None, *tried(case, precision)):
            if cover.takes_case(row(precision), impl, case, device, tile):
                assert parity(row(precision), impl, case, device, tile) <= bound(case, precision), (case.op, case.label, tile)


def tried(case, precision):
    """The tiles of a case: all in the simulator; on a GPU, where each is a kernel to compile, every eighth, in each precision another."""
    tiles = ops(precision)[case.op].candidates(bare(case, precision), H200)
    return tiles if gpu_device.SIMULATOR else tiles[4 * PRECISIONS.index(precision) :: 8]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_added_where_warps_share_columns(device, precision):
    sets = first_wgrad.least_sets(76, 2 if precision == "bf16" else 1)
    case = next(case for case in conv_cases(LARGE_SMALL[0]) if str(case.op) == "conv_wgrad")
    assert len(case.outs) == 2
    tile = first_wgrad.WgradTile(1, 2, 1, 1, 1, 2, sets)
    assert parity(row(precision), ops(precision)[case.op], case, device, tile) <= bound(case, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_candidates_are_right(gpu, precision):
    of, made = row(precision), [*pooled_cases(REAL_POOLED[0]), *(case for shape in (FIRST, LARGE[0], LARGE[1]) for case in conv_cases(shape))]
    made = [case for case in made if case.op in ops(precision)]
    before = cases_of(LARGE_SMALL, LARGE_SMALL, LARGE_SMALL)  # of `test_many_columns`
    few = ((of, ops(precision)[case.op], case, tile) for case in before for tile in tried(case, precision))
    cover = Cover((*earlier(precision, made, tried), *few))
    for case in made:
        impl = ops(precision)[case.op]
        for tile in tried(case, precision):
            if cover.takes_case(of, impl, case, gpu, tile):
                assert parity(of, impl, case, gpu, tile) <= bound(case, precision), tile


def test_repeats_bit_for_bit(gpu):
    case = next(case for case in pooled_cases(REAL_POOLED[0]) if str(case.op) == "conv_pool_wgrad")
    options = {"attrs": case.attrs, "device": gpu, "layout": "NHWC", "store": "bfloat16"}
    one, other = (run_op(ops("bf16")[case.op], case.op, case.ins, case.outs, **options) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_tile_of_a_large_batch_starts_no_block_without_work():
    call = bare(next(case for case in conv_cases(FIRST) if str(case.op) == "conv_wgrad"), "bf16")
    units = first_wgrad.work(FIRST, 4)[0]
    many, few = (replace(call, tile=first_wgrad.WgradTile(4, 1, 4, 1, 3, blocks)) for blocks in (396, units - 1))
    assert first_wgrad.blocks_of(many) == units < 396
    assert first_wgrad.blocks_of(few) == units - 1
    assert first_wgrad.scratch(many) * (units - 1) == first_wgrad.scratch(few) * units


@pytest.mark.parametrize("E", [1, 2])
def test_a_tile_has_few_filters_that_there_are_not(E):
    """Of large batches: half of a block's filters at least are real, all of them are in one block up to its most, and a unit has four turns."""
    for K in (32, 64, 96, 128, 256):
        tile = first_fprop.choose(ConvShape(512, 3, 32, 32, K, 3, 3, 1, 1), E, H200)
        assert tile.TURNS == 4
        assert min(K, 128 * E) <= tile.filters(E) < 2 * K


def test_one_warp_of_filters_shares_the_image_with_another():
    """Up to 64 filters two warps take rows of windows in turn, and units have turns behind a pooling alone."""
    of = {(32, False): (1, 2, 1), (64, False): (1, 2, 1), (64, True): (1, 2, 4), (65, False): (2, 1, 4), (256, True): (4, 1, 4)}
    for (K, pooled), wanted in of.items():
        tile = first_wgrad.choose(ConvShape(512, 3, 32, 32, K, 3, 3, 1, 1), 2, pooled, True, H200)
        assert wanted == (tile.WARPS, tile.ROWS, tile.TURNS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_filters_hold_every_weight_once(precision):
    E = 2 if precision == "bf16" else 1
    for shape in (FIRST, ConvShape(1, 1, 9, 9, 10, 5, 5, 1, 2), ConvShape(1, 2, 6, 6, 22, 2, 4, 1, 2), *LARGE[:2]):
        case = next(iter(conv_cases(shape)))
        index = ops(precision)[named("conv_fprop")].pack(bare(case, precision))
        assert sorted(index[index >= 0]) == list(range(case.ins[1].size)), shape
        # A product of the fragments with patches in the same order is the convolution: the filter of every column, the word of every row.
        tiles = -(-image_words(shape.C, shape.R, shape.S, E) // 8)
        packed = pack_array(case.ins[1], index).reshape(-1, tiles, 32, 2, E)
        lane = np.arange(32)
        for tile, fragment in enumerate(packed):
            filters = filter_of_lane(E, np.int64(tile), lane // 4)
            for f in np.unique(filters[filters < shape.K]):
                held = fragment[:, filters == f]
                assert np.isclose(np.abs(held).sum(), np.abs(case.ins[1][f]).sum())


def refused(shape: ConvShape, op: str = "conv_fprop") -> Call:
    return bare(next(case for case in conv_cases(shape) if case.op == named(op)), "bf16")


def test_refusals_say_why():
    impl = ops("bf16")[named("conv_fprop")]
    wide = next(iter(conv_cases(ConvShape(1, 16, 8, 8, 8, 3, 3, 1, 1))))
    strided = next(iter(conv_cases(ConvShape(1, 2, 11, 11, 8, 3, 3, 3, 0))))
    first = next(iter(conv_cases(FIRST)))
    one_tap = next(case for case in conv_cases(ConvShape(1, 32, 8, 8, 64, 1, 1, 1, 0)) if "no bias" in case.label)
    assert "whole 16 bytes" in impl.supports(bare(wide, "bf16"), H200)
    assert "12 products of 16 columns, more than 10" in impl.supports(refused(ConvShape(1, 9, 12, 12, 8, 5, 4, 1, 0)), H200)
    assert "more than 160 columns" in ops("bf16")[named("conv_wgrad")].supports(refused(ConvShape(1, 9, 12, 12, 8, 5, 4, 1, 0), "conv_wgrad"), H200)
    assert "shared memory" in impl.supports(refused(ConvShape(1, 45, 12, 12, 8, 1, 3, 2, 0)), H200)
    assert "product of matrices" in impl.supports(bare(one_tap, "bf16"), H200)
    assert "stride" in impl.supports(bare(strided, "bf16"), H200)
    assert "NHWC" in impl.supports(replace(bare(first, "bf16"), layout="NCHW"), H200)
    assert "stored as" in impl.supports(bare(first, "tf32"), H200)
    assert impl.supports(bare(first, "bf16"), H200) is None
    assert not ops("fp32")


def test_tiles_of_many_columns_fit_into_shared_memory():
    for shape in (replace(shape, N=batch) for shape in (*LARGE, ConvShape(1, 15, 32, 32, 64, 3, 3, 2, 1)) for batch in (1, 256, 4096)):
        for case in (case for case in conv_cases(replace(shape, N=1)) if case.op in ops("bf16")):
            call = bare(case, "bf16")
            call = replace(call, in_shapes=((shape.N, *call.in_shapes[0][1:]), *call.in_shapes[1:]))
            pair = shape.stride * shape.C if str(case.op) == "conv_wgrad" else 1
            for tile in (ops("bf16")[case.op].tile(call, H200), *ops("bf16")[case.op].candidates(call, H200)):
                unit = Unit(shape.C, shape.R, shape.S, shape.stride, tile.ROWS * tile.TURNS)
                assert unit.shared_bytes(pair) <= SHARED_BYTES, (shape, tile)


STRIDED = (
    *(ConvShape(64, C, 32, 32, K, taps, taps, 2, taps // 2) for C, taps in ((16, 1), (14, 1), (3, 3), (1, 5)) for K in (32, 64, 300)),
    ConvShape(64, 12, 32, 32, 32, 2, 1, 2, 0),
)
"""Layers of few columns whose images are large beside their outputs."""


def test_tiles_of_few_columns_fit_where_the_image_is_large():
    """With all that waits in shared memory, and with registers for the image on its way."""
    for shape in (replace(shape, N=batch) for shape in STRIDED for batch in (1, 64, 4096)):
        for E in (1, 2):
            assert first_wgrad.fits(shape, first_wgrad.choose(shape, E, False, True, H200)), shape
            tile = first_fprop.choose(shape, E, H200)
            unit = Unit(shape.C, shape.R, shape.S, shape.stride, tile.ROWS * tile.TURNS)
            assert unit.shared_bytes(1) <= SHARED_BYTES
            assert tile.TURNS == 1 or unit.elements <= MOST_ON_THE_WAY * tile.threads


def test_every_set_of_columns_reads_the_gradient():
    case = next(case for case in conv_cases(LARGE[0]) if str(case.op) == "conv_wgrad")
    impl = ops("bf16")[named("conv_wgrad")]
    call = replace(bare(case, "bf16"), in_dtypes=("bfloat16", "bfloat16"), out_dtypes=("float32", "float32"))
    call = replace(call, tile=impl.tile(call, H200))
    product, added = impl.traffic(call)
    gradient, image = 2 * case.ins[1].size, 2 * case.ins[0].size
    assert call.tile.SETS == 2
    assert product.distinct == gradient + image
    assert product.read > 2 * gradient
    # 75 columns and the bias in two sets of five tiles, 96 filters in two of 64.
    assert product.write == impl.scratch(call) == 4 * 80 * 128 * first_wgrad.blocks_of(call)
    assert added.write == 4 * 96 * 76


def bound_launches(op: str, precision: str, batch: int, of: ConvShape = FIRST):
    shape = replace(of, N=batch)
    store, (n, k, p, q) = STORE[precision], shape.y_shape
    small, packed = (n, k, p // 2, q // 2), (n, k // 4, p // 2, q // 2)
    ins, outs = {
        "conv_fprop": ((shape.x_shape, shape.w_shape, (k,)), (shape.y_shape,)),
        "conv_relu_pool_fprop": ((shape.x_shape, shape.w_shape, (k,)), (small, packed)),
        "conv_wgrad": ((shape.x_shape, shape.y_shape), (shape.w_shape, (k,))),
        "conv_pool_wgrad": ((shape.x_shape, small, packed), (shape.w_shape, (k,))),
    }[str(op)]

    def stand_ins(shapes):
        made = [np.zeros(8, np.uint8 if s == packed else np.float32 if s in ((k,), shape.w_shape) else numpy_dtype(store)) for s in shapes]
        return tuple(made), tuple(
            "uint8" if a.dtype == np.uint8 else "float32" if s in ((k,), shape.w_shape) else store for a, s in zip(made, shapes, strict=True)
        )

    (ins_made, in_dtypes), (outs_made, out_dtypes) = stand_ins(ins), stand_ins(outs)
    impl = ops(precision)[named(op)]
    call = Call(
        named(op), ins_made, outs_made, ins, outs, {"stride": shape.stride, "pad": shape.pad}, "NHWC", in_dtypes=in_dtypes, out_dtypes=out_dtypes
    )
    assert impl.supports(call, H200) is None
    call = replace(call, tile=impl.tile(call, H200), packed=np.zeros(8, numpy_dtype(impl.packed)), scratch=np.zeros(64, np.uint8))
    return impl.bind(call)


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("op", "precision"), [("conv_relu_pool_fprop", "bf16"), ("conv_fprop", "tf32"), ("conv_pool_wgrad", "bf16"), ("conv_wgrad", "tf32")]
)
def test_compiled_without_spills(op, precision):
    for launch in bound_launches(op, precision, 1024):
        report = compile_launch(launch, "90a")
        # The unfused tf32 wgrad has all 255 registers and keeps eight more words that a step reads once; measured so (281 µs, 92 % of its floor).
        assert report.frame_bytes <= (32 if (str(op), precision, launch.name) == ("conv_wgrad", "tf32", "first_wgrad_kernel") else 0), report


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("of", LARGE[:2], ids=str)
@pytest.mark.parametrize("op", sorted(ops("bf16").keys() - {named("conv_relu_fprop")}))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_of_many_columns_compile_without_spills(op, precision, of):
    for batch in (64, 1024):
        for launch in bound_launches(op, precision, batch, of):
            assert compile_launch(launch, "90a").frame_bytes == 0


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("of", [ConvShape(1, 3, 64, 64, 32, 3, 3, 2, 1), ConvShape(1, 16, 32, 32, 32, 1, 1, 2, 0)], ids=str)
@pytest.mark.parametrize("op", ["conv_fprop", "conv_relu_pool_fprop", "conv_wgrad"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_of_few_filters_and_large_images_compile_within_a_block(op, precision, of):
    """The stem of a network for photographs, and a shortcut. Their weight gradients keep a part of the image on its way in local memory."""
    for launch in bound_launches(op, precision, 1024, of):
        report = compile_launch(launch, "90a")
        assert report.shared_bytes <= SHARED_BYTES
        assert report.frame_bytes == 0 or str(op) == "conv_wgrad", report
