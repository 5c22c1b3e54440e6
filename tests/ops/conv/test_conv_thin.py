"""Tests of the thin convolution kernels against the NumPy reference, what they refuse, and what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import full

from nbcnn.check.one_op import run_op
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv import reference
from nbcnn.ops.conv.thin.gather import GatherTile
from nbcnn.ops.conv.thin.plain import OPS
from nbcnn.ops.conv.thin.scatter import ScatterTile
from nbcnn.ops.conv.thin.wgrad import WgradTile
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import ConvShape

# Odd images, wide sides that are no multiple of a tile, windows that reach far out of the image or not out at all.
MEAN_SHAPES = [
    ConvShape(N=1, C=3, H=5, W=7, K=20, R=3, S=3, pad=1),
    ConvShape(N=2, C=20, H=5, W=7, K=3, R=3, S=3, pad=1),
    ConvShape(N=1, C=1, H=5, W=4, K=16, R=3, S=2, pad=0),
    ConvShape(N=1, C=16, H=4, W=5, K=4, R=2, S=3, pad=2),
    ConvShape(N=3, C=2, H=1, W=1, K=16, R=1, S=1, pad=1),
]
# The image layers of an autoencoder, and of classifiers with large windows.
REAL_SHAPES = [
    ConvShape(N=3, C=3, H=32, W=32, K=256, R=3, S=3, pad=1),
    ConvShape(N=3, C=256, H=32, W=32, K=3, R=3, S=3, pad=1),
    ConvShape(N=3, C=1, H=28, W=28, K=36, R=5, S=5, pad=2),
    ConvShape(N=3, C=132, H=28, W=27, K=4, R=5, S=5, pad=0),
]
# Tiles whose blocks take many steps over a tiny image: walks, double buffers and shares of channels or pixels.
STEPPING = {
    "conv_fprop": [(0, GatherTile(16, 64, 4, 4, 1, 1)), (1, ScatterTile(4, 7, 4, 8, 4, 1, 2))],
    "conv_dgrad": [(1, GatherTile(16, 64, 4, 4, 1, 1)), (0, ScatterTile(4, 14, 2, 8, 4, 1, 1))],
    "conv_wgrad": [(0, WgradTile(4, 14, 2, 4, 2, 8, 1, 2, 1)), (1, WgradTile(8, 28, 1, 4, 4, 8, 1, 1, 1))],
}
EPS = float(np.finfo(np.float32).eps)
PATH = {"conv_fprop": "fprop", "conv_dgrad": "dgrad", "conv_wgrad": "wgrad"}


def operands(op, shape, bias, rng):
    """(inputs, specifications of the outputs) of one call."""
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in (shape.x_shape, shape.w_shape, shape.y_shape))
    b = rng.standard_normal(shape.K).astype(np.float32)
    if str(op) == "conv_fprop":
        return [x, w, b][: 2 + bias], [(shape.y_shape, "float32")]
    if str(op) == "conv_dgrad":
        return [dy, w], [(shape.x_shape, "float32")]
    return [x, dy], [(shape.w_shape, "float32"), ((shape.K,), "float32")][: 1 + bias]


def assert_parity(op, shape, bias, rng, device, tile=None):
    ins, outs = operands(op, shape, bias, rng)
    attrs = {"stride": 1, "pad": shape.pad}
    got = run_op(OPS[named(op)], op, ins, outs, device=device, attrs=attrs, layout="NHWC", tile=tile)
    expected = [np.full(out, np.nan) for out, _ in outs]
    getattr(reference, str(op))(*(a.astype(np.float64) for a in ins), *expected, **attrs)
    limit = 4 * EPS * np.sqrt(shape.gemm(PATH[str(op)])[2])
    for result, answer in zip(got, expected, strict=True):
        assert np.linalg.norm(result - answer) <= limit * np.linalg.norm(answer)
    return got


def bare_call(op, shape, bias=True, layout="NHWC"):
    ins, outs = {
        "conv_fprop": ((shape.x_shape, shape.w_shape, (shape.K,))[: 2 + bias], (shape.y_shape,)),
        "conv_dgrad": ((shape.y_shape, shape.w_shape), (shape.x_shape,)),
        "conv_wgrad": ((shape.x_shape, shape.y_shape), (shape.w_shape, (shape.K,))[: 1 + bias]),
    }[str(op)]
    return Call(named(op), (), (), ins, outs, {"stride": shape.stride, "pad": shape.pad}, layout)


@pytest.mark.parametrize("shape", MEAN_SHAPES, ids=str)
@pytest.mark.parametrize(
    ("op", "bias"), [("conv_fprop", False), ("conv_fprop", True), ("conv_dgrad", False), ("conv_wgrad", False), ("conv_wgrad", True)]
)
def test_parity_on_mean_shapes(op, bias, shape, rng, device):
    assert_parity(op, shape, bias, rng, device)


@pytest.mark.parametrize(("op", "which", "tile"), [(op, *case) for op in STEPPING for case in STEPPING[op]], ids=str)
def test_parity_of_blocks_that_take_many_steps(op, which, tile, rng, device):
    assert_parity(op, MEAN_SHAPES[which], str(op) != "conv_dgrad", rng, device, tile)


@pytest.mark.parametrize("batch", [1, 64, 1024])
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_parity_and_repeatable_bits_with_the_tiles_of_a_batch(op, shape, batch, gpu):
    tile = OPS[named(op)].tile(bare_call(op, replace(shape, N=batch)), H200)
    first, second = (assert_parity(op, shape, str(op) != "conv_dgrad", np.random.default_rng(7), gpu, tile) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", MEAN_SHAPES, ids=str)
@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad"])
def test_packing_takes_every_weight_once(op, shape):
    call = bare_call(op, shape)
    index = OPS[named(op)].pack(replace(call, tile=OPS[named(op)].tile(call, H200)))
    assert sorted(index[index >= 0]) == list(range(shape.K * shape.C * shape.R * shape.S))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "layout", "reason"),
    [
        (MEAN_SHAPES[0], "NCHW", "NHWC"),
        (ConvShape(N=1, C=3, H=8, W=8, K=16, R=3, S=3, stride=2, pad=1), "NHWC", "stride 1, not 2"),
        (ConvShape(N=1, C=8, H=8, W=8, K=16, R=3, S=3, pad=1), "NHWC", "neither side is thin"),
        (ConvShape(N=1, C=3, H=8, W=8, K=18, R=3, S=3, pad=1), "NHWC", "18 channels"),
        (ConvShape(N=1, C=3, H=8, W=8, K=12, R=3, S=3, pad=1), "NHWC", "12 channels"),
        (ConvShape(N=1, C=16, H=8, W=8, K=3, R=7, S=7, pad=3), "NHWC", "more than 25 taps"),
        (ConvShape(N=1 << 14, C=3, H=32, W=32, K=256, R=3, S=3, pad=1), "NHWC", "32-bit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_reason(op, shape, layout, reason):
    assert reason in OPS[named(op)].supports(bare_call(op, shape, layout=layout), H200)


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("shape", "batch", "arch"),
    [
        *((shape, 1024, arch) for shape in REAL_SHAPES[:2] for arch in ("75", "90a")),
        *full(*((shape, 1024, arch) for shape in REAL_SHAPES[2:] for arch in ("75", "90a"))),
        *full(*((shape, batch, "75") for shape in REAL_SHAPES for batch in (1, 64))),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["conv_fprop", "conv_wgrad"])
def test_kernels_keep_their_tiles_in_registers(op, shape, batch, arch):
    call = bare_call(op, replace(shape, N=batch))
    floats = np.zeros(4, np.float32)
    call = replace(call, tile=OPS[named(op)].tile(call, H200), packed=floats, scratch=np.zeros(16, np.uint8))
    call = replace(call, ins=(floats,) * len(call.in_shapes), outs=(floats,) * len(call.out_shapes))
    for launch in OPS[named(op)].bind(call):
        report = compile_launch(launch, arch)
        assert report.frame_bytes == 0, report.name
        assert report.registers * np.prod(launch.block) <= 65536, report.name
        assert report.shared_bytes <= 49152, report.name
