"""Tests of the portable tensor-core engine: every pass over images, of every shape, against the float64 reference; tiles, splits, registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from covering import Cover

from nbcnn.check.gradcheck import bound, parity, reference
from nbcnn.check.one_op import pack_array
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200, Target
from nbcnn.modes import Row, named
from nbcnn.ops.conv import fused
from nbcnn.ops.conv.frame.correlation import correlation, pack
from nbcnn.ops.conv.fused import REAL_POOLED, REAL_UP, linear_cases, pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.mma import ops
from nbcnn.ops.conv.mma.engine import IMAGE_OPS
from nbcnn.ops.conv.mma.tile import KINDS, WHOLE, Tile, candidates, choose, worth_measuring
from nbcnn.ops.conv.reference import MEAN_CONVS, REAL_CONVS, conv_cases
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import numpy_dtype

PRECISIONS = ("bf16", "tf32", "fp32", "fp16")
T4 = Target((7, 5), 40, 64 * 1024, 64 * 1024)
STRIDED = (ConvShape(2, 8, 9, 7, 8, 3, 3, 2, 1), ConvShape(1, 64, 6, 6, 32, 3, 3, 2, 1), ConvShape(1, 12, 10, 10, 20, 5, 4, 3, 2))


def row(precision: str) -> Row:
    return Row("tensorcore", precision, "gpu", "NHWC", (("mma", ops(precision)),))


def image_cases(cases):
    return [case for case in cases if case.op in IMAGE_OPS]


def mean_cases():
    convs = [case for shape in (*MEAN_CONVS, *STRIDED) for case in conv_cases(shape)]
    return image_cases([*convs, *(case for shape in STRIDED for case in relu_cases(shape)), *fused.cases()])


def real_cases():
    convs = [case for shape in REAL_CONVS for case in conv_cases(shape)]
    pooled = [case for shape in REAL_POOLED for case in (*pooled_cases(shape), *relu_cases(shape))]
    return image_cases([*convs, *pooled, *(case for shape in REAL_UP for case in up_cases(shape))])


def check(gpu, precision, cases, tiles=(None,)):
    """Every case within its bound; all that are not are named. A GPU takes what `Cover` takes; `tiles` are those, or of a precision those."""
    tiles_of = tiles if callable(tiles) else lambda _: tiles
    earlier, tiles = PRECISIONS[: PRECISIONS.index(precision)], tiles_of(precision)
    cover = Cover((row(other), ops(other)[case.op], case, tile) for other in earlier for case in cases for tile in tiles_of(other))
    wrong = []
    for case in cases:
        for tile in tiles:
            if not cover.takes_case(row(precision), ops(precision)[case.op], case, gpu, tile):
                continue
            error = parity(row(precision), ops(precision)[case.op], case, gpu, tile)
            if not error <= bound(case, precision):
                wrong.append(f"{case.op} {case.label} {tile or ''}: {error:.2e} > {bound(case, precision):.2e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mean_shapes(gpu, precision):
    check(gpu, precision, mean_cases())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_real_shapes(gpu, precision):
    check(gpu, precision, real_cases())


def one_shape():
    shape = ConvShape(2, 64, 6, 4, 36, 3, 3, 1, 1)
    return image_cases([*conv_cases(shape), *pooled_cases(shape), *relu_cases(shape), *up_cases(shape), *linear_cases(3, 200, 12)])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_splits(gpu, precision):
    check(gpu, precision, one_shape(), [Tile(32, 32, 2, 2, 4, 4, split) for split in (2, 5)])


def ragged_cases():
    """Cases of which no result has a multiple of four channels: a thread of the sum takes up to three channels that are no quad."""
    shape, up = ConvShape(2, 32, 6, 4, 10, 3, 3, 1, 1), ConvShape(1, 13, 3, 4, 5, 3, 3, 1, 1)
    few = ConvShape(1, 6, 8, 8, 36, 3, 3, 2, 1)
    linear = (*conv_cases(ConvShape(5, 784, 1, 1, 10, 1, 1)), *linear_cases(3, 200, 7))
    made = image_cases([*conv_cases(shape), *pooled_cases(shape), *relu_cases(shape), *up_cases(up), *conv_cases(few), *relu_cases(few), *linear])
    return [case for case in made if case.outs[0][0][1] % 4]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_splits_of_channels_that_are_no_quads(device, precision):
    assert {str(case.op) for case in ragged_cases()} >= {"conv_relu_pool_fprop", "conv_dgrad_relu", "upconv_fprop", "conv_relu_fprop"}
    # Two parts have up to 13 k-tiles, so the ring of four stages goes round three times; 16 parts have at most two.
    tiles = [Tile(32, 32, 2, 2, 4, 4, split) for split in ((2, 16) if gpu_device.SIMULATOR else (2, 5, 16))]
    check(device, precision, ragged_cases(), tiles)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_product_of_few_channels(gpu, precision):
    check(gpu, precision, image_cases([*conv_cases(ConvShape(64, 7840, 1, 1, 10, 1, 1)), *linear_cases(64, 7840, 10)]))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_product_is_split_whatever_its_channels(precision):
    call = bare_call("conv_fprop", ConvShape(256, 7840, 1, 1, 10, 1, 1), precision)
    g, impl = correlation(call), ops(precision)[named("conv_fprop")]
    tile = choose(g, precision, H200)
    assert tile.split > 1
    assert {made.split for made in candidates(g, KINDS[precision], H200)} >= {1, tile.split}
    call = replace(call, tile=tile)
    product, added = impl.traffic(call)
    assert impl.scratch(call) == product.write == added.read == 4 * tile.split * 256 * 10
    assert added.write == 256 * 10 * KINDS[precision].element
    product, added = launches("conv_fprop", ConvShape(256, 7840, 1, 1, 10, 1, 1), precision, tile)
    assert added.grid == 256 * 3 // 64


@pytest.mark.parametrize(("op", "first"), [("conv_fprop", 0), ("conv_relu_pool_fprop", 1)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile(gpu, precision, op, first):
    """One op has every second tile, the other those between: each is a kernel to compile."""
    check(gpu, precision, [case for case in one_shape() if case.op == named(op)], lambda of: WHOLE[of][first::2])


def test_tiles_of_fp16_that_compute_capability_7_5_can_hold(device):
    """Small and ragged channels, copied by 16 bytes, by 4 and by 2, in several k-tiles, with the tiles that a T4 has."""
    wide, pairs = ConvShape(1, 72, 4, 3, 12, 3, 3, 1, 1), ConvShape(1, 6, 5, 4, 5, 3, 3, 2, 1)
    cases = [case for case in image_cases([*conv_cases(wide), *conv_cases(pairs), *pooled_cases(replace(wide, W=4))]) if "fprop" in str(case.op)]
    check(device, "fp16", cases, [tile for tile in WHOLE["fp16"] if tile.shared_bytes <= T4.shared_of_block][-2:])


def test_the_tiles_of_fp16_fit_a_t4():
    for shape in (*MEAN_CONVS, *STRIDED, *REAL_CONVS):
        assert choose(correlation(bare_call("conv_fprop", shape, "fp16")), "fp16", T4).shared_bytes <= T4.shared_of_block
    assert sum(tile.shared_bytes <= T4.shared_of_block for tile in WHOLE["fp16"]) == 4


def bare_call(op: str, c: ConvShape, precision: str) -> Call:
    """A call without arrays of one of this file's ops."""
    store, packed = KINDS[precision].store, "uint8"
    (n, k, p, q), doubled = c.y_shape, (c.N, c.K, 2 * c.H, 2 * c.W)
    if "dgrad" in str(op):
        ins = (doubled if str(op).startswith("up") else c.y_shape, c.w_shape, *((c.x_shape,) if "relu" in str(op) else ()))
        outs: tuple[tuple[int, ...], ...] = (c.x_shape,)
    else:
        ins = (c.x_shape, c.w_shape, (c.K,))
        small = (n, k, p // 2, q // 2), (n, -(-k // 4), p // 2, q // 2)
        outs = (doubled,) if str(op).startswith("up") else small if "pool" in str(op) else (c.y_shape,)
    attrs = {} if str(op).startswith("up") else {"stride": c.stride, "pad": c.pad}
    in_dtypes = tuple(store if len(shape) == 4 and i != 1 else "float32" for i, shape in enumerate(ins))
    return Call(named(op), (), (), ins, outs, attrs, "NHWC", in_dtypes=in_dtypes, out_dtypes=(store, packed)[: len(outs)])


def launches(op: str, c: ConvShape, precision: str, tile: Tile | None = None):
    """The launches of a call on stand-in arrays: enough to compile."""
    impl, call = ops(precision)[named(op)], bare_call(op, c, precision)
    ins, outs = (tuple(np.zeros(4, numpy_dtype(kind)) for kind in (call.in_dtypes, call.out_dtypes)[side]) for side in (0, 1))
    packed = np.zeros(4, numpy_dtype(impl.packed))
    tile = tile or impl.tile(call, H200)
    return impl.bind(replace(call, ins=ins, outs=outs, packed=packed, scratch=np.zeros(64, np.uint8), tile=tile))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("c", [*MEAN_CONVS, *STRIDED, *REAL_CONVS], ids=str)
def test_every_shape_gets_a_tile_that_covers_it(c, precision):
    for op in ("conv_fprop", "conv_dgrad"):
        call = bare_call(op, c, precision)
        g = correlation(call)
        for multiprocessors in (1, 40, 132):
            tile = choose(g, precision, Target((9, 0), multiprocessors))
            product, *sums = launches(op, c, precision, tile)
            tiles, parts = product.grid
            assert tiles * tile.BM * tile.BN >= g.GM * g.K
            assert parts * tile.part(g.k_tiles(KINDS[precision].channels)) * KINDS[precision].channels >= g.GK
            assert len(sums) == (tile.split > 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_image_reaches_half_of_the_multiprocessors(precision):
    for op, shape in (("conv_relu_pool_fprop", REAL_CONVS[1]), ("conv_dgrad_relu", REAL_CONVS[1]), ("upconv_relu_fprop", REAL_UP[0])):
        g = correlation(bare_call(op, replace(shape, N=1), precision))
        tile = choose(g, precision, H200)
        assert tile.tiles(g) * tile.split >= 64, (op, tile)


def test_a_tuner_gets_few_tiles():
    g = correlation(bare_call("conv_fprop", REAL_CONVS[1], "bf16"))
    tiles = worth_measuring(g, KINDS["bf16"], H200)
    assert choose(g, "bf16", H200) in tiles
    assert len(tiles) == len(set(tiles)) <= 2 * len(WHOLE["bf16"])


@pytest.mark.parametrize("sizes", [(128, 128, 3, 2, 3, 2), (128, 120, 2, 2, 3, 2), (128, 128, 2, 2, 4, 2), (64, 64, 2, 2, 1, 2)])
def test_tiles_that_cannot_be_laid_out_are_refused(sizes):
    with pytest.raises(ValueError, match="Tile"):
        Tile(*sizes)


def test_large_filters_are_refused_in_words():
    assert "17×3" in ops("bf16")[named("conv_fprop")].supports(bare_call("conv_fprop", ConvShape(1, 8, 20, 20, 8, 17, 3), "bf16"), H200)


def product_of_packed(case, g, packed):
    """`case` from packed filters, by the formula at the top of frame/correlation.py, in float64."""
    source = case.ins[0].transpose(0, 2, 3, 1)
    filters = packed.reshape(g.phases, g.K, -1)[..., : g.GK].reshape(g.phases, g.K, g.R, g.S, g.C)
    made = np.zeros((g.phases, g.N, g.P, g.Q, g.K))
    for phase in range(g.phases):
        top, left = g.top - phase // 2, g.left - phase % 2
        for p, q, r, s in np.ndindex(g.P, g.Q, g.R, g.S):
            h, w = p * g.stride - top + r, q * g.stride - left + s
            if h % g.dilate == 0 and w % g.dilate == 0 and 0 <= h // g.dilate < g.H and 0 <= w // g.dilate < g.W:
                made[phase, :, p, q] += source[:, h // g.dilate, w // g.dilate] @ filters[phase, :, r, s].T
    if g.phases == 4:
        made = made.reshape(2, 2, g.N, g.P, g.Q, g.K).transpose(2, 3, 0, 4, 1, 5).reshape(1, g.N, 2 * g.P, 2 * g.Q, g.K)
    return made[0].transpose(0, 3, 1, 2)


PACKED = [ConvShape(2, 3, 5, 7, 4, 3, 2, 2, 1), ConvShape(1, 5, 4, 3, 2, 3, 3, 1, 1), ConvShape(1, 3, 6, 4, 2, 3, 5, 2, 1)]


@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_packed_filters_in_the_formula_give_the_op(shape):
    cases = [case for case in conv_cases(shape) if str(case.op) != "conv_wgrad" and len(case.ins) == 2]
    if shape.R == shape.S == 3:
        cases += [case for case in up_cases(shape) if str(case.op) == "upconv_dgrad"]
        x, w, _ = next(case for case in up_cases(shape) if str(case.op) == "upconv_fprop").ins
        cases += [replace(case, ins=(x, w, np.zeros(shape.K, np.float32))) for case in up_cases(shape) if str(case.op) == "upconv_fprop"]
    for case in cases:
        call = bare_call(case.op, shape, "bf16")
        got = product_of_packed(case, correlation(call), pack_array(case.ins[1].astype(np.float64), pack(call, 8)))
        np.testing.assert_allclose(got, reference(case)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("precision", "op", "arch", "batch"),
    [
        ("bf16", "conv_relu_pool_fprop", "80", 256),
        ("tf32", "upconv_relu_fprop", "90a", 1),
        ("fp32", "conv_dgrad_relu", "90a", 256),
        ("fp16", "conv_relu_pool_fprop", "75", 256),
    ],
)
def test_compile_within_the_registers_of_the_tile(precision, op, arch, batch):
    shape = REAL_UP[0] if str(op).startswith("up") else REAL_CONVS[1]
    launch = launches(op, replace(shape, N=batch), precision)[0]
    tile = ops(precision)[named(op)].tile(bare_call(op, replace(shape, N=batch), precision), H200)
    report = compile_launch(launch, arch)
    assert report.frame_bytes == 0
    assert report.registers * tile.threads * tile.blocks <= 65536


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("tile", [tile for tile in WHOLE["fp16"] if tile.shared_bytes <= T4.shared_of_block], ids=lambda tile: f"{tile.BM}x{tile.BN}")
@pytest.mark.parametrize("channels", [64, 6, 3])
def test_fp16_compiles_for_7_5_without_spills(tile, channels):
    """Whatever the channels allow a copy to have: 16 bytes, 4 or 2."""
    for op in ("conv_relu_pool_fprop", "conv_dgrad_relu"):
        shape = replace(REAL_CONVS[1], C=channels) if op.endswith("fprop") else replace(REAL_CONVS[1], K=channels)
        report = compile_launch(launches(op, shape, "fp16", tile)[0], "75")
        assert report.frame_bytes == 0
        assert report.registers * tile.threads * tile.blocks <= 65536
