"""Tests of the naive and tiled convolutions against the float64 reference, on a GPU or in the simulator; and compiled without either."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import full

from nbcnn.check.one_op import Bound, run_op
from nbcnn.check.static import compile_launch
from nbcnn.gpu.language import SIMULATOR, cuda, jit
from nbcnn.modes import named
from nbcnn.ops.conv import naive, tiled
from nbcnn.ops.conv.reference import conv_dgrad, conv_fprop, conv_wgrad
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel

ROWS = {"naive": naive.OPS, "tiled": tiled.OPS}

# Small enough for the simulator: a block is 32 to 256 Python threads.
TINY = [
    ConvShape(N=1, C=1, H=1, W=1, K=1, R=1, S=1),
    ConvShape(N=2, C=2, H=5, W=9, K=5, R=3, S=3, pad=1),
    ConvShape(N=2, C=2, H=7, W=6, K=2, R=3, S=2, stride=2, pad=1),
    ConvShape(N=1, C=2, H=9, W=7, K=1, R=4, S=5, stride=2, pad=2),
    ConvShape(N=1, C=1, H=5, W=4, K=2, R=2, S=2, pad=3),
]
# More source channels than are staged at a time, more target channels than a block owns: many blocks for wgrad.
TINY_DEEP = [
    ConvShape(N=1, C=9, H=3, W=2, K=17, R=3, S=3, pad=1),
    ConvShape(N=1, C=17, H=5, W=3, K=9, R=3, S=1, stride=2, pad=1),
]
LARGER = [
    ConvShape(N=3, C=5, H=17, W=13, K=33, R=5, S=5, pad=2),
    ConvShape(N=3, C=17, H=19, W=24, K=18, R=7, S=7, stride=2, pad=3),
    ConvShape(N=2, C=20, H=33, W=31, K=18, R=2, S=6, stride=2, pad=0),
    ConvShape(N=65, C=12, H=3, W=3, K=19, R=1, S=1, stride=2, pad=1),
    ConvShape(N=4, C=3, H=224, W=160, K=16, R=7, S=7, stride=1, pad=3),
]
AUTOENCODER = [
    ConvShape(N=16, C=3, H=32, W=32, K=256, R=3, S=3, pad=1),
    ConvShape(N=16, C=256, H=16, W=16, K=128, R=3, S=3, pad=1),
    ConvShape(N=16, C=128, H=8, W=8, K=128, R=3, S=3, pad=1),
    ConvShape(N=16, C=128, H=16, W=16, K=256, R=3, S=3, pad=1),
    ConvShape(N=16, C=256, H=32, W=32, K=3, R=3, S=3, pad=1),
]


def operands(shape, rng):
    """x, w, b, dy and the attributes."""
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (shape.x_shape, shape.w_shape, (shape.K,), shape.y_shape)]
    return *arrays, {"stride": shape.stride, "pad": shape.pad}


def assert_near(got, expected, shape, path):
    """Sums of GK products of random signs, each rounded to float32: within 4·eps·√GK of the float64 sum."""
    allowed = 4 * np.finfo(np.float32).eps * np.sqrt(shape.gemm(path)[2])
    assert np.linalg.norm(got - expected) <= allowed * np.linalg.norm(expected)


def exact(function, ins, *out_shapes, attrs):
    """The float64 reference's outputs."""
    outs = [np.empty(shape) for shape in out_shapes]
    function(*(array.astype(np.float64) for array in ins), *outs, **attrs)
    return outs


def check_fprop(ops, shape, rng, device):
    x, w, b, _, attrs = operands(shape, rng)
    for ins in ((x, w, b), (x, w)):
        (got,) = run_op(ops[named("conv_fprop")], "conv_fprop", ins, [(shape.y_shape, "float32")], device=device, attrs=attrs)
        assert_near(got, *exact(conv_fprop, ins, shape.y_shape, attrs=attrs), shape, "fprop")


def check_dgrad(ops, shape, rng, device):
    _, w, _, dy, attrs = operands(shape, rng)
    (got,) = run_op(ops[named("conv_dgrad")], "conv_dgrad", (dy, w), [(shape.x_shape, "float32")], device=device, attrs=attrs)
    assert_near(got, *exact(conv_dgrad, (dy, w), shape.x_shape, attrs=attrs), shape, "dgrad")


def check_wgrad(ops, shape, rng, device):
    x, _, _, dy, attrs = operands(shape, rng)
    outs = [(shape.w_shape, "float32"), ((shape.K,), "float32")]
    bound = Bound(ops[named("conv_wgrad")], "conv_wgrad", (x, dy), outs, device=device, attrs=attrs)
    bound.run()
    dw, db = bound.results()
    expected_dw, expected_db = exact(conv_wgrad, (x, dy), shape.w_shape, (shape.K,), attrs=attrs)
    assert_near(dw, expected_dw, shape, "wgrad")
    assert_near(db, expected_db, shape, "wgrad")
    assert len(bound.launches) == 2
    without_bias = Bound(ops[named("conv_wgrad")], "conv_wgrad", (x, dy), outs[:1], device=device, attrs=attrs)
    assert len(without_bias.launches) == 1


CHECKS = {"fprop": check_fprop, "dgrad": check_dgrad, "wgrad": check_wgrad}


@pytest.mark.parametrize("path", CHECKS)
@pytest.mark.parametrize("shape", TINY, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_tiny_shapes(row, shape, path, rng, device):
    CHECKS[path](ROWS[row], shape, rng, device)


@pytest.mark.parametrize("path", ["fprop", "dgrad"])
@pytest.mark.parametrize("shape", TINY_DEEP, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_tiny_shapes_of_many_channels(row, shape, path, rng, device):
    CHECKS[path](ROWS[row], shape, rng, device)


@pytest.mark.gpu
@pytest.mark.parametrize("path", CHECKS)
@pytest.mark.parametrize("shape", LARGER + AUTOENCODER, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_real_shapes(row, shape, path, rng, gpu):
    CHECKS[path](ROWS[row], shape, rng, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_gradients_repeat_bit_for_bit(row, rng, gpu):
    shape = AUTOENCODER[1]
    x, _, _, dy, attrs = operands(shape, rng)
    outs = [(shape.w_shape, "float32"), ((shape.K,), "float32")]
    first, second = (run_op(ROWS[row][named("conv_wgrad")], "conv_wgrad", (x, dy), outs, device=gpu, attrs=attrs) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_warp_sum_adds_each_warp_by_itself(dtype, rng, device):
    @jit()
    def sums_kernel(values, sums):
        total = warp_sum(values[cuda.threadIdx.x])
        if cuda.threadIdx.x % WARP == 0:
            sums[cuda.threadIdx.x // WARP] = total

    values = rng.standard_normal(3 * WARP).astype(dtype)
    source, target = device.empty(values.size, dtype), device.empty(3, dtype)
    device.upload(source, values)
    Launch(sums_kernel, 1, values.size, (source, target)).run(device.stream)
    terms = values.reshape(3, WARP)
    # The shuffles halve the warp: lane i takes lane i + 16, then i + 8, and so on.
    for half in (16, 8, 4, 2, 1):
        terms = terms[:, :half] + terms[:, half : 2 * half]
    np.testing.assert_array_equal(device.download(target), terms[:, 0])


BEYOND_TILED = [
    (ConvShape(N=1, C=1, H=8, W=9, K=2, R=8, S=2, pad=1), "windows up to 7×7, not 8×2"),
    (ConvShape(N=2, C=2, H=7, W=8, K=1, R=2, S=3, stride=3, pad=1), "strides up to 2, not 3"),
]


@pytest.mark.parametrize("path", CHECKS)
@pytest.mark.parametrize(("shape", "reason"), BEYOND_TILED, ids=str)
def test_naive_takes_what_tiled_refuses(shape, reason, path, rng, device):
    CHECKS[path](naive.OPS, shape, rng, device)
    with pytest.raises(ValueError, match=reason):
        CHECKS[path](tiled.OPS, shape, rng, device)


def stand_ins(shape, *, bias=True):
    """The three calls of a convolution, on arrays of one element: enough to work out grids and to compile."""
    one, attrs = np.zeros(1, np.float32), {"stride": shape.stride, "pad": shape.pad}
    x, w, b, y = shape.x_shape, shape.w_shape, (shape.K,), shape.y_shape
    signatures = {
        "conv_fprop": ((x, w, b) if bias else (x, w), (y,)),
        "conv_dgrad": ((y, w), (x,)),
        "conv_wgrad": ((x, y), (w, b) if bias else (w,)),
    }
    return [Call(named(op), (one,) * len(ins), (one,) * len(outs), ins, outs, attrs) for op, (ins, outs) in signatures.items()]


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator does not compile")
@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize(
    ("row", "shape"),
    # One naive kernel serves every shape; tiled ones differ with the window, the stride and the warps of a block.
    [("naive", AUTOENCODER[1]), ("tiled", AUTOENCODER[1]), *full(*(("tiled", shape) for shape in (AUTOENCODER[4], LARGER[1], LARGER[4])))],
    ids=str,
)
def test_kernels_compile_without_a_stack_frame(row, shape, arch):
    """All sums stay in registers, and shared memory within what every architecture grants a block."""
    for call in stand_ins(shape):
        for launch in ROWS[row][call.op].bind(call):
            report = compile_launch(launch, arch)
            assert report.frame_bytes == 0
            assert report.shared_bytes <= 48 << 10
            assert report.registers * launch.block <= 65536


def asked(row, s):
    """(pass, bytes that it asks the caches for) of a convolution without bias."""
    shapes = {"fprop": (s.x_shape, s.w_shape, s.y_shape), "dgrad": (s.y_shape, s.w_shape, s.x_shape), "wgrad": (s.x_shape, s.y_shape, s.w_shape)}
    for path, (*ins, out) in shapes.items():
        op = Op("conv", path)
        yield str(op), ROWS[row][op].traffic(Call(op, (), (), tuple(ins), (out,), {"stride": s.stride, "pad": s.pad}))[0]


@pytest.mark.parametrize("shape", AUTOENCODER, ids=str)
def test_tiles_ask_the_caches_for_less_than_naive_kernels(shape):
    for (op, naively), (_, tiled_so) in zip(asked("naive", shape), asked("tiled", shape), strict=True):
        assert naively.least == tiled_so.least, op
        assert tiled_so.least <= tiled_so.logical < naively.logical / 4, op


def test_traffic_counts_what_a_small_case_loads():
    """One 8×8 tile of one image, one channel to one: of the halo of 10×10 the 8×8 are inside, and 22·22 of the 24·24 taps."""
    shape, inside = ConvShape(N=1, C=1, H=8, W=8, K=1, R=3, S=3, pad=1), 22 * 22
    assert {op: one.logical for op, one in asked("naive", shape)} == {
        "conv_fprop": 4 * (2 * inside + 64),
        "conv_dgrad": 4 * (2 * inside + 64),
        "conv_wgrad": 4 * (2 * inside + 9),
    }
    assert {op: one.logical for op, one in asked("tiled", shape)} == {
        "conv_fprop": 4 * (64 + 9 + 64),
        "conv_dgrad": 4 * (64 + 9 + 64),
        "conv_wgrad": 4 * (4 * 64 + inside + 9),
    }


def test_a_warp_covers_the_banks():
    """At stride 1 the 32 pixels that a warp reads at once lie in 32 different banks."""
    for window in range(1, tiled.MAX_WINDOW + 1):
        pitch = tiled.halo_pitch(tiled.halo_side("fprop", window, 1))
        banks = {(row * pitch + column) % 32 for row in range(tiled.HALF) for column in range(tiled.SIDE)}
        assert len(banks) == 32


@pytest.mark.parametrize("path", ["fprop", "dgrad"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", range(1, tiled.MAX_WINDOW + 1))
def test_the_halo_holds_every_source_row_of_a_tile(path, stride, window):
    """By the definition p·stride + r − pad = h, for tiles at several places and all paddings."""
    for start in range(0, 5 * tiled.SIDE, tiled.SIDE):
        for pad in range(window + 2):
            rows = range(start, start + tiled.SIDE)
            if path == "fprop":
                met = [row * stride + r - pad for row in rows for r in range(window)]
            else:
                met = [(row + pad - r) // stride for row in rows for r in range(window) if (row + pad - r) % stride == 0]
            if met:
                assert max(met) - min(met) < tiled.halo_side(path, window, stride)


def test_binds_cover_every_element():
    for shape in TINY + LARGER + AUTOENCODER:
        for call in stand_ins(shape, bias=False):
            (launch,) = naive.OPS[call.op].bind(call)
            assert launch.grid * launch.block >= numel(call.out_shapes[0])
