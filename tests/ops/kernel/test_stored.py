"""Tests of every common op on activations stored as bfloat16, float16 and tf32, right to one rounding, and rounded by the writer."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean
from covering import NOT_RELU, Cover, in_turn, together

from nbcnn.check import gradcheck
from nbcnn.check.cases import mean_cases
from nbcnn.check.one_op import Bound, run_op, to_layout
from nbcnn.gpu import device as gpu_device
from nbcnn.modes import COMMON, MODES, named
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.plan.bounds import STORE
from nbcnn.plan.storage import encode

PRECISIONS = ["tf32", "bf16", "fp16"]
# These keep to float32 whatever the activations are, and test_optim_ops.py tests them.
FLOAT32_ONLY = ("gather_labels", "sgd", "adam", "grad_norm", "advance", "pack_weights", "weigh_part", "accumulate", "ema", "xent_total", "unscale")
CASES = [case for case in mean_cases() if case.op in COMMON and str(case.op) not in FLOAT32_ONLY]
OPS = sorted({case.op for case in CASES})


def test_the_cases_cover_the_ops_that_touch_activations():
    assert {*map(str, OPS), "convert", *FLOAT32_ONLY} == set(map(str, COMMON))


def cases_of(op):
    """All cases of an op, on a GPU the smallest first, as test_parity.py has them; in the simulator, where a thread is a Python thread, the first and
    the last.
    """
    cases = [case for case in CASES if case.op == op]
    cases.sort(key=lambda case: 0 if gpu_device.SIMULATOR else (case.ins[0].size < 10, sum(array.size for array in case.ins)))
    return (
        cases[:: max(1, len(cases) - 1)]
        if gpu_device.SIMULATOR and not str(op).startswith("softmax")
        else cases[: 2 if gpu_device.SIMULATOR else None]
    )


@pytest.mark.parametrize("ops", together(OPS, lambda op: "activations" if op.kind in ACTIVATIONS else op.kind))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_op_is_within_its_bound_and_rounds_what_it_writes(precision, ops, device):
    """In NHWC: no row keeps images in NCHW and rounds them."""

    def wanted(of):
        return (
            case
            for op in ops
            if in_turn(("tensorcore", of), op)
            for case in cases_of(op)[: 1 if op in NOT_RELU and not gpu_device.SIMULATOR else None]
        )

    earlier, ran = PRECISIONS[: PRECISIONS.index(precision)], set()
    cover = Cover((MODES["tensorcore", other], COMMON[case.op], case, None) for other in earlier for case in wanted(other))
    for case in (gradcheck.rounded(case, precision) for case in wanted(precision)):
        op = case.op
        bound = Bound(COMMON[op], op, case.ins, case.outs, device=device, attrs=case.attrs, layout="NHWC", store=STORE[precision])
        if not cover.takes(bound.launches) and op in ran:
            continue
        ran.add(op)
        bound.run()
        for got, wanted, kind in zip(bound.results(), gradcheck.reference(case), bound.call.out_dtypes, strict=True):
            assert gradcheck.relative_error(got, wanted) <= gradcheck.bound(case, precision), case.label
            if kind == "tfloat32":
                np.testing.assert_array_equal(encode(got, kind), got)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 33, 5, 7), (2, 1, 2, 2)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_convert_at_the_doors(precision, shape, device, rng):
    store = STORE[precision]
    x = rng.standard_normal(shape).astype(np.float32)
    inward, outward = {"source": "NCHW", "target": "NHWC"}, {"source": "NHWC", "target": "NCHW"}
    options = {"device": device, "layout": "NHWC", "store": store}
    (y,) = run_op(COMMON[named("convert")], "convert", [x], [(shape, "float32")], attrs=inward, **options)
    np.testing.assert_array_equal(encode(y, store), encode(x, store))
    # `run_op` hands convert's input over as it is, so store it in the source layout here; outside stand plain floats in NCHW.
    bound = Bound(COMMON[named("convert")], "convert", [to_layout(y, "NHWC").reshape(shape)], [(shape, "float32")], attrs=outward, **options)
    bound.run()
    assert bound.call.out_dtypes == ("float32",)
    np.testing.assert_array_equal(device.download(bound.call.outs[0]).reshape(shape), y)


@pytest.mark.sampled
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("store", "arch"), [("bfloat16", "80"), ("float16", "75")])
@pytest.mark.parametrize("op", ["relu_dgrad", "maxpool_dgrad", "gather"])
def test_kernels_of_halves_compile_without_spills(op, store, arch):
    case = next(c for c in CASES if c.op == named(op) and (len(c.outs[0][0]) < 2 or c.outs[0][0][1] % 4 == 0 or op == "gather"))
    bound = Bound(COMMON[named(op)], op, case.ins, case.outs, device=gpu_device.Host(), attrs=case.attrs, layout="NHWC", store=store)
    for launch in bound.launches:
        assert_lean(launch, arch)
