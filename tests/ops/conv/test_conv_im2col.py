"""Tests of the implicit-GEMM convolutions (row `im2col`) against the float64 reference, and what the compiler makes of their tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import full
from covering import Cover, together

from nbcnn.check.one_op import Bound
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200, Target
from nbcnn.modes import named
from nbcnn.ops.conv import reference
from nbcnn.ops.conv.simt.im2col import OPS
from nbcnn.ops.conv.simt.tiles import Product, Tile, cycles
from nbcnn.ops.kernel.call import Call, Impl
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

TINY = Tile(16, 32, 8, 4, 4)
"""One warp a block: what the simulator can run in a second."""

MEAN_SHAPES = {
    "one tap per tile": ConvShape(1, 8, 3, 4, 8, 3, 3, 1, 1),
    "tile spans taps": ConvShape(1, 4, 4, 3, 8, 3, 3, 1, 1),
    "one channel": ConvShape(2, 1, 5, 4, 3, 2, 3, 1, 0),
    "odd channels, stride 2": ConvShape(2, 3, 5, 4, 6, 2, 2, 2, 1),
    "stride 2, whole taps": ConvShape(1, 8, 5, 5, 8, 3, 3, 2, 1),
    "stride 2 in four phases": ConvShape(2, 4, 4, 6, 8, 3, 3, 2, 1),
    "stride 2 in four phases of one tap": ConvShape(1, 3, 4, 4, 5, 1, 1, 2, 0),
    "stride 3 leaves a border": ConvShape(1, 4, 6, 8, 4, 2, 2, 3, 0),
    "pad beyond the filter": ConvShape(1, 4, 3, 3, 4, 1, 1, 1, 1),
    "tall filter": ConvShape(1, 4, 6, 4, 5, 5, 2, 1, 2),
    "line of pixels a tile": ConvShape(1, 4, 2, 8, 4, 3, 3, 1, 1),
    "lines of pixels a tile": ConvShape(1, 4, 8, 1, 4, 1, 1, 1, 0),
    "linear layer": ConvShape(3, 12, 1, 1, 5, 1, 1, 1, 0),
}
REAL_SHAPES = {
    "conv2": ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    "conv3": ConvShape(3, 128, 8, 8, 128, 3, 3, 1, 1),
    "conv4": ConvShape(1, 128, 16, 16, 256, 3, 3, 1, 1),
    "thin in": ConvShape(2, 3, 32, 32, 256, 3, 3, 1, 1),
    "thin out": ConvShape(2, 256, 32, 32, 3, 3, 3, 1, 1),
    "linear": ConvShape(64, 8192, 1, 1, 10, 1, 1, 1, 0),
    "odd image, stride 2": ConvShape(5, 64, 15, 13, 48, 5, 3, 2, 2),
}


def operands(op: str, c: ConvShape, bias: bool):
    """(shapes of the inputs, shapes of the outputs) of `op`."""
    b = ((c.K,),) if bias else ()
    if str(op) == "conv_fprop":
        return (c.x_shape, c.w_shape, *b), (c.y_shape,)
    if str(op) == "conv_dgrad":
        return (c.y_shape, c.w_shape), (c.x_shape,)
    return (c.x_shape, c.y_shape), (c.w_shape, *b)


def check_parity(device, rng, op: str, c: ConvShape, tile: Tile | None, bias: bool = True, cover: Cover | None = None) -> None:
    """‖got - ref‖ ≤ 4·eps·√GK·‖ref‖: rounding errors of GK additions that add up like a random walk, with room for 4 of them.

    With `cover` only of what it takes.
    """
    in_shapes, out_shapes = operands(op, c, bias)
    ins = [rng.standard_normal(shape).astype(np.float32) for shape in in_shapes]
    attrs = {"stride": c.stride, "pad": c.pad}
    outs = [(shape, "float32") for shape in out_shapes]
    made = Bound(OPS[named(op)], op, ins, outs, device=device, attrs=attrs, layout="NHWC", tile=tile)
    if cover is not None and not cover.takes(made.launches):
        return
    want = [np.full(shape, np.nan) for shape in out_shapes]
    getattr(reference, str(op))(*(array.astype(np.float64) for array in ins), *want, **attrs)
    made.run()
    got = made.results()
    GK = c.gemm(str(op).removeprefix("conv_"))[2]
    for g, w in zip(got, want, strict=True):
        assert np.linalg.norm(g - w) <= 4 * np.finfo(np.float32).eps * np.sqrt(GK) * np.linalg.norm(w)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("names", together(MEAN_SHAPES))
def test_mean_shapes(device, rng, op, names):
    cover = Cover()
    for name in names:
        check_parity(device, rng, op, MEAN_SHAPES[name], TINY, cover=cover)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("split", [2, 5])
def test_split_gk(device, rng, op, split):
    check_parity(device, rng, op, MEAN_SHAPES["one tap per tile"], replace(TINY, split=split))


@pytest.mark.parametrize("op", OPS)
def test_without_bias(device, rng, op):
    check_parity(device, rng, op, ConvShape(1, 4, 3, 3, 4, 3, 3, 1, 1), TINY, bias=False)


@pytest.mark.parametrize("op", OPS)
def test_real_shapes_with_the_chosen_tile(gpu, rng, op):
    cover = Cover()
    for c in REAL_SHAPES.values():
        check_parity(gpu, rng, op, c, None, cover=cover)


@pytest.mark.parametrize("op", OPS)
def test_a_run_repeats_bit_for_bit(gpu, rng, op):
    c = REAL_SHAPES["conv3"]
    in_shapes, out_shapes = operands(op, c, True)
    ins = [rng.standard_normal(shape).astype(np.float32) for shape in in_shapes]
    outs = [(shape, "float32") for shape in out_shapes]
    bound = Bound(OPS[named(op)], op, ins, outs, device=gpu, attrs={"stride": 1, "pad": 1}, layout="NHWC")
    bound.run()
    first = bound.results()
    bound.run()
    for one, other in zip(first, bound.results(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_packed_weights_are_the_weights_in_gemm_order():
    w = np.arange(2 * 3 * 2 * 2)
    forward = Call(Op("conv", "fprop"), (), (), ((1, 3, 4, 4), (2, 3, 2, 2)), ((1, 2, 3, 3),), {"stride": 1, "pad": 0})
    packed = OPS[named("conv_fprop")].pack(forward).reshape(2, 2, 3, 4)
    assert packed[1, 0, 2, 1] == w.reshape(2, 3, 2, 2)[1, 2, 1, 0]
    assert (packed[..., 2:] == -1).all()
    backward = replace(forward, op=Op("conv", "dgrad"), in_shapes=((1, 2, 3, 3), (2, 3, 2, 2)), out_shapes=((1, 3, 4, 4),))
    packed = OPS[named("conv_dgrad")].pack(backward).reshape(2, 2, 2, 4)
    assert packed[1, 0, 1, 2] == w.reshape(2, 3, 2, 2)[1, 2, 0, 1]
    assert (packed[..., 3] == -1).all()


def bare_call(op: str, c: ConvShape) -> Call:
    return Call(named(op), (), (), *operands(op, c, True), {"stride": c.stride, "pad": c.pad}, "NHWC")


def bound_to_nothing(impl: Impl, call: Call, tile: Tile):
    """The launches of `call` on stand-in arrays: enough to compile."""
    some = np.zeros(4, np.float32)
    ins, outs = (some,) * len(call.in_shapes), (some,) * len(call.out_shapes)
    return impl.bind(replace(call, ins=ins, outs=outs, tile=tile, packed=some, scratch=np.zeros(64, np.uint8)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("c", [*MEAN_SHAPES.values(), *REAL_SHAPES.values()], ids=[*MEAN_SHAPES, *REAL_SHAPES])
def test_every_shape_gets_a_tile_that_can_be_laid_out(op, c):
    call = bare_call(op, c)
    for multiprocessors in (1, 40, 132):
        tile = OPS[named(op)].tile(call, Target((9, 0), multiprocessors))
        product, *sums = bound_to_nothing(OPS[named(op)], call, tile)
        tiles, parts, phases = (*product.grid, 1)[:3]
        assert phases * tiles * tile.BM * tile.BN >= np.prod(c.gemm(str(op).removeprefix("conv_"))[:2])
        assert parts == tile.split
        assert len(sums) == (str(op) == "conv_wgrad" or tile.split > 1)


def test_small_batches_are_split_over_the_multiprocessors():
    c = replace(REAL_SHAPES["conv2"], N=1)
    for op in OPS:
        tile = OPS[named(op)].tile(bare_call(op, c), H200)
        assert np.prod(tile.grid(*c.gemm(str(op).removeprefix("conv_"))[:2])) >= 120


def test_few_filters_get_a_tile_with_few_rows_or_columns_whatever_the_batch():
    """A weight gradient of three filters has GM = 3, the result GN = 3: a tile of 64 rows would multiply 61 rows of zeros."""
    for batch in (16, 256, 1024):
        c = replace(REAL_SHAPES["thin out"], N=batch)
        assert OPS[named("conv_wgrad")].tile(bare_call("conv_wgrad", c), H200).BM == 16
        assert OPS[named("conv_fprop")].tile(bare_call("conv_fprop", c), H200).BN == 16


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile", [Tile(16, 64, 16, 4, 4, 2), Tile(64, 16, 16, 4, 4, 2)], ids=["rows", "columns"])
@pytest.mark.parametrize("c", [ConvShape(5, 4, 3, 3, 12, 3, 3, 1, 1), ConvShape(2, 3, 5, 4, 6, 2, 2, 1, 1)], ids=["whole loads", "ragged"])
def test_a_tile_of_sixteen_rows_or_columns(device, rng, op, tile, c):
    check_parity(device, rng, op, c, tile)


@pytest.mark.parametrize("sizes", [(128, 128, 16, 8, 6), (128, 128, 10, 8, 8), (100, 128, 16, 8, 8), (16, 128, 16, 8, 8)])
def test_tiles_that_cannot_be_laid_out_are_refused(sizes):
    with pytest.raises(ValueError, match="Tile"):
        Tile(*sizes)


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("batch", [256, *full(1, 64)])
@pytest.mark.parametrize("op", OPS)
def test_real_tiles_keep_to_their_registers(op, batch, arch):
    c = replace(REAL_SHAPES["conv2"], N=batch)
    tile = OPS[named(op)].tile(bare_call(op, c), H200)
    report = compile_launch(bound_to_nothing(OPS[named(op)], bare_call(op, c), tile)[0], arch)
    assert report.frame_bytes == 0
    assert report.registers * tile.threads * tile.blocks_per_multiprocessor <= 65536
    assert report.shared_bytes <= 48 << 10


def test_the_last_tiles_of_every_copy_of_a_product_are_counted():
    """2,112 rows are 17 tiles of 128: four phases of two columns are 136, four more than an H200 has multiprocessors, not 132 of 8,448 rows."""
    tile = Tile(128, 128, 16, 8, 8)
    apart, together = (cycles(tile, product, H200) for product in (Product(2112, 256, 512, copies=4), Product(8448, 256, 512)))
    assert 1.5 < apart / together < 2
    split = Tile(128, 128, 16, 8, 8, 2)
    assert cycles(split, Product(128, 128, 4096, copies=16), H200) == cycles(split, Product(2048, 128, 4096), H200)
