"""Tests of convolutions whose filters have their zeros written out: on a reference engine, which weights are taken back, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn.check.gradcheck import relative_error
from nbcnn.check.one_op import Unsupported, pack_array, run_op
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.ops.conv import grouped, mma, reference, wgmma
from nbcnn.ops.conv.frame import expanded
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.kernel.call import Call, HostCall, Impl, host
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

CASES = [case for case in grouped.cases() if len(set(case.attrs["stride"])) == 1]


def engine(op):
    """An engine that packs its filters as they are, on the host."""

    def bind(call):
        arrays = (call.ins[0], call.packed, *call.ins[2:])
        ins = [array.reshape(shape) for array, shape in zip(arrays, call.in_shapes, strict=True)]
        return [HostCall(getattr(reference, str(op)), (*ins, call.outs[0].reshape(call.out_shapes[0])), call.attrs)]

    return Impl(bind, pack=lambda call: np.arange(numel(call.in_shapes[1]), dtype=np.int32), packed="float64")


ENGINE = expanded.grouped({op: engine(op) for op in (Op("conv", "fprop"), Op("conv", "dgrad"))})


@pytest.mark.parametrize("case", [case for case in CASES if case.op in ENGINE], ids=lambda case: f"{case.op} {case.label}")
def test_zeros_written_out_change_nothing(case):
    ins = [array.astype(np.float64) for array in case.ins]
    outs = [(shape, "float64") for shape, _ in case.outs]
    got = run_op(ENGINE[case.op], case.op, ins, outs, attrs=case.attrs, device=Host())
    for one, other in zip(got, run_op(host(getattr(grouped, str(case.op))), case.op, ins, outs, attrs=case.attrs, device=Host()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["im2col", "mma", "wgmma"])
def test_an_engine_gets_the_packed_filters_of_the_dense_convolution(name):
    """Filters with their zeros, packed by the engine, are the filters as they are, packed by the map that the zeros are left out of."""
    ops = {"im2col": im2col.OPS, "mma": mma.ops("bf16"), "wgmma": wgmma.ops("bf16")}[name]
    x, w, dy = (np.random.default_rng(4).standard_normal(shape) for shape in ((1, 64, 9, 9), (64, 32, 3, 2), (1, 64, 6, 8)))
    attrs = {"groups": 2, "stride": (1, 1), "dilation": (2, 3), "pad": (1, 2)}
    for op, source, made in (("gconv_fprop", x, dy.shape), ("gconv_dgrad", dy, x.shape)):
        kinds = {"in_dtypes": ("bfloat16", "float32"), "out_dtypes": ("bfloat16",)}
        call = Call(named(op), (), (), (source.shape, w.shape), (made,), attrs, "NHWC", **kinds)
        g = expanded.dense(call)
        whole = np.zeros(g.filters)
        whole.reshape(-1)[expanded.places(call)] = w
        plain = Call(replace(named(op), kind="conv"), (), (), (source.shape, g.filters), (made,), {"stride": 1, "pad": g.pad}, "NHWC", **kinds)
        impl = expanded.grouped(ops)[named(op)]
        assert impl.supports(call, H200) is None
        np.testing.assert_array_equal(pack_array(w, impl.pack(call)), pack_array(whole, ops[replace(named(op), kind="conv")].pack(plain)))


@pytest.mark.parametrize("case", [case for case in CASES if str(case.op) == "gconv_wgrad"], ids=lambda case: case.label)
def test_the_weights_are_taken_from_the_dense_gradient(case):
    x, dy = (array.astype(np.float64) for array in case.ins)
    shapes = tuple(shape for shape, _ in case.outs)
    call = Call(case.op, (), (), (x.shape, dy.shape), shapes, case.attrs, in_dtypes=("float32",) * 2, out_dtypes=("float32",) * len(shapes))
    g, dw = expanded.dense(call), np.empty(shapes[0])
    whole = np.empty(g.filters)
    reference.conv_wgrad(x, dy, whole, stride=g.stride, pad=g.pad)
    grouped.gconv_wgrad(x, dy, dw, **case.attrs)
    np.testing.assert_allclose(whole.reshape(-1)[expanded.places(call)], dw, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["gconv_fprop", "gconv_wgrad"])
def test_the_engine_of_the_cuda_cores_lands_where_numpy_does(device, op):
    impls = expanded.grouped(im2col.OPS)
    case = min((case for case in CASES if case.op == named(op) and case.attrs["groups"] == 1), key=lambda case: sum(map(np.size, case.ins)))
    got = run_op(impls[named(op)], op, case.ins, case.outs, attrs=case.attrs, device=device, layout="NHWC")
    wide = [(shape, "float64") for shape, _ in case.outs]
    right = run_op(host(getattr(grouped, str(op))), op, [array.astype(np.float64) for array in case.ins], wide, attrs=case.attrs, device=Host())
    for one, other in zip(got, right, strict=True):
        assert relative_error(one, other) <= parity_bound(case.terms, "fp32")


def test_uneven_strides_are_refused():
    case = next(case for case in CASES if str(case.op) == "gconv_fprop" and case.attrs["dilation"] == (2, 2))
    uneven = replace(case, attrs=case.attrs | {"stride": (1, 2)})
    with pytest.raises(Unsupported, match="strides of 1 and 2 are not one"):
        run_op(expanded.grouped(im2col.OPS)[case.op], case.op, uneven.ins, uneven.outs, attrs=uneven.attrs, device=Host(), layout="NHWC")


def test_depthwise_convolutions_are_not_made_dense():
    """By cost: 256 times the products are more than reading two operands for each, four times are not."""
    for channels, groups, dense in ((256, 256, False), (64, 4, True)):
        x, w = (32, channels, 16, 16), (channels, channels // groups, 3, 3)
        attrs = {"stride": (1, 1), "dilation": (1, 1), "pad": (1, 1), "groups": groups}
        kinds = {"in_dtypes": ("float32",) * 2, "out_dtypes": ("float32",)}
        call = Call(named("gconv_fprop"), (), (), (x, w), (x,), attrs, "NHWC", **kinds)
        whole = expanded.grouped(im2col.OPS)[call.op]
        engine = whole.cost(replace(call, tile=whole.tile(call, H200)), H200)
        assert (engine < grouped.OPS[call.op].cost(call, H200)) == dense
