"""Tests of first and last layers on tensor cores: parity of every pass on mean shapes and the autoencoder's, refusals in words, no spills."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from covering import Cover, together

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Unsupported, run_op
from nbcnn.check.static import compile_launch
from nbcnn.gpu.device import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.modes import Row, named
from nbcnn.ops.conv.frame.composed import pool_wgrad
from nbcnn.ops.conv.fused import MEAN_FUSED, MEAN_UP, REAL_POOLED, REAL_UP, pooled_cases, relu_cases, up_cases
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.thin_mma import parts
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape, numel
from nbcnn.plan.storage import numpy_dtype

THIN = (
    ConvShape(1, 1, 5, 7, 1, 3, 3, 1, 1),
    ConvShape(2, 3, 7, 5, 5, 3, 3, 1, 1),
    ConvShape(1, 2, 9, 8, 7, 3, 3, 2, 1),
    ConvShape(1, 3, 17, 70, 24, 3, 3, 2, 1),
    ConvShape(1, 24, 5, 6, 3, 3, 3, 1, 1),
    ConvShape(2, 40, 9, 11, 1, 5, 5, 1, 2),
    ConvShape(2, 64, 6, 5, 4, 1, 1, 1, 0),
    ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1),
    ConvShape(4, 256, 32, 32, 3, 3, 3, 1, 1),
)
UP = (*MEAN_UP, ConvShape(2, 72, 5, 7, 3, 3, 3, 1, 1), ConvShape(1, 256, 16, 16, 3, 3, 3, 1, 1))
PRECISIONS = ("bf16", "tf32")
SIMULATED = 30_000
"""Elements of x."""


def cases():
    for shape in filter(small_enough, THIN):
        yield from conv_cases(shape)
        yield from relu_cases(shape)
    for shape in filter(small_enough, (*MEAN_FUSED, *REAL_POOLED, ConvShape(2, 3, 14, 76, 40, 3, 3, 1, 1))):
        yield from pooled_cases(shape)
    for shape in filter(small_enough, (*UP, *REAL_UP)):
        yield from up_cases(shape)


@pytest.mark.parametrize(
    "of",
    together(
        [(which, op) for which, ops in enumerate(parts("bf16")) for op in sorted(ops)], lambda each: each[0], lambda each: f"{each[0]}-{each[1]}"
    ),
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity(device, precision, of):
    which, ops, done = of[0][0], {op for _, op in of}, set()
    assert set(parts(precision)[which]) == set(parts("bf16")[which])
    assert beyond_bounds(((case, None) for case in cases()), {op: parts(precision)[which][op] for op in ops}, precision, device, done) == []
    assert done == ops


def beyond_bounds(cases, ops, precision, gpu, done=None):
    """Of (case, tile) those of `ops` that are not within the bounds of `precision`, in words; tile None is the implementation's own choice.

    Without `done` every case must be supported; with it, the ops of those that are are added to it, and each op runs its first case. Of the others a
    GPU takes what `Cover` takes.
    """
    row, wrong, cover = Row("thin", precision, "gpu", "NHWC", ()), [], Cover()
    for case, tile in cases:
        if case.op not in ops:
            continue
        try:
            if not cover.takes_case(row, ops[case.op], case, gpu, tile) and (done is None or case.op in done):
                continue
            error = gradcheck.parity(row, ops[case.op], case, gpu, tile)
        except Unsupported:
            if done is None:
                raise
            continue
        if done is not None:
            done.add(case.op)
        if not error <= gradcheck.bound(case, precision):
            wrong.append(f"{case.op} {case.label} {tile}: {error:.2e} > {gradcheck.bound(case, precision):.2e}")
    return wrong


def small_enough(shape):
    """True on a GPU, and in the simulator of shapes that take it a second at most."""
    return not SIMULATOR or shape.N * shape.H * shape.W * shape.C <= SIMULATED


def assert_repeats(case, ops, precision, gpu):
    """Two runs of a case have the same bits."""
    options = {"device": gpu, "attrs": case.attrs, "layout": "NHWC", "store": STORE[precision]}
    first, second = (run_op(ops[case.op], case.op, case.ins, case.outs, **options) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def bare(op, shape, precision, up=False):
    """The call of `op` on one convolution without arrays."""
    made = up_cases(shape) if up else [*conv_cases(shape), *relu_cases(shape)]
    if not up and shape.P % 2 == 0 and shape.Q % 2 == 0:
        made = [*made, *pooled_cases(shape)]
    case = next(case for case in made if case.op == named(op))
    small = tuple(a.shape for a in case.ins), tuple(o[0] for o in case.outs)
    store = STORE[precision]
    kinds = [tuple(store if len(s) == 4 and not _is_weight(s, shape) else "float32" for s in shapes) for shapes in small]
    return Call(named(op), (), (), *small, case.attrs, "NHWC", in_dtypes=kinds[0], out_dtypes=kinds[1])


def bound_without_data(impl, call):
    """The launches of a call with its tile, on arrays of zeros: to be compiled."""
    ins, outs = (
        tuple(np.zeros(numel(s), numpy_dtype(d)) for s, d in zip(shapes, kinds, strict=True))
        for shapes, kinds in ((call.in_shapes, call.in_dtypes), (call.out_shapes, call.out_dtypes))
    )
    packed = np.zeros(impl.pack(call).size if impl.pack else 1, numpy_dtype(impl.packed))
    return impl.bind(replace(call, ins=ins, outs=outs, packed=packed, scratch=np.zeros(impl.scratch(call), np.uint8)))


def _is_weight(s, shape):
    return s == shape.w_shape


@pytest.mark.parametrize(
    ("which", "op", "shape", "up", "words"),
    [
        (0, "conv_fprop", ConvShape(1, 20, 8, 8, 8, 3, 3, 1, 1), False, "12 products of 16 columns, more than 10"),
        (0, "conv_fprop", ConvShape(1, 2, 11, 10, 3, 4, 4, 3, 0), False, "stride of 1 or 2"),
        (1, "conv_dgrad", ConvShape(1, 16, 8, 8, 5, 3, 3, 1, 1), False, "5 filters are no thin last layer"),
        (1, "upconv_fprop", ConvShape(1, 6, 4, 4, 3, 3, 3, 1, 1), True, "16 bytes"),
    ],
)
def test_what_is_refused_is_said_in_words(which, op, shape, up, words):
    assert words in parts("bf16")[which][named(op)].supports(bare(op, shape, "bf16", up), H200)


@pytest.mark.sampled
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("which", "op", "up"), [(0, "conv_relu_fprop", False), (1, "upconv_fprop", True), (1, "upconv_wgrad", True)])
def test_compile_for_ampere_without_spills(which, op, up):
    shape = ConvShape(4, 256, 16, 16, 3, 3, 3, 1, 1) if up else ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1)
    impl, call = parts("bf16")[which][named(op)], bare(op, shape, "bf16", up)
    call = replace(call, tile=impl.tile(call, H200))
    for launch in bound_without_data(impl, call):
        report = compile_launch(launch, "80")
        # A few addresses that outlive the main loop. Without them two blocks fit, not three: 167 µs, not 152 (conv1 wgrad, batch 1,024).
        assert report.frame_bytes <= (24 if launch.name == "first_wgrad_kernel" else 0), launch.name
        assert report.registers <= 255


def test_a_composed_wgrad_of_a_first_layer_asks_its_parts():
    first = parts("bf16")[0]
    composed = pool_wgrad(first[named("conv_wgrad")], first[named("conv_wgrad")])
    call = bare("conv_pool_wgrad", ConvShape(2, 3, 8, 8, 16, 3, 3, 1, 1), "bf16")
    assert composed.supports(call, H200) is None
    assert composed.scratch(replace(call, tile=composed.tile(call, H200))) > 2 * 16 * 8 * 8 * 2
