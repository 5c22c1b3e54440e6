"""Tests of a convolution with the statistics of the norm behind it: the reference, every tile on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check.gradcheck import bound, parity
from nbcnn.modes import MODES
from nbcnn.ops.conv_norm import statistics
from nbcnn.ops.conv_norm.statistics import OP
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import ConvShape

PRECISIONS = ("bf16", "tf32", "fp32")


def test_the_statistics_are_those_of_the_result(rng):
    (case,) = statistics.cases([(ConvShape(2, 3, 5, 4, 8, 3, 3, 1, 1), True)])
    made = [np.full((2, 8, 5, 4), np.nan, np.float32), *np.full((4, 8), np.nan, np.float32)]
    statistics.conv_statistics_fprop(*case.ins, *made, **case.attrs)
    y, mean, rstd, running_mean, running_var = made
    np.testing.assert_allclose(mean, y.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(y.var((0, 2, 3)) + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(running_mean, 0.9 * case.ins[-2] + 0.1 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running_var, 0.9 * case.ins[-1] + 0.1 * y.var((0, 2, 3), ddof=1), rtol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_is_right(gpu, precision):
    row, tried = MODES["tensorcore", precision], 0
    for case in [*statistics.cases(), *statistics.real_cases()]:
        for part, impl in row.chain(OP):
            if impl.lacks(gpu.capability):
                continue
            call = Call(OP, (), (), tuple(a.shape for a in case.ins), tuple(o[0] for o in case.outs[:1]) + ((1,),) * 4, case.attrs, "NHWC")
            if impl.supports(call):
                continue
            for tile in [None, *(impl.candidates(call, gpu.multiprocessors) if case.label.startswith("64→64") else ())]:
                assert parity(row, impl, case, gpu, tile) <= bound(case, precision), (part, case.label, tile)
                tried += 1
    assert tried >= 12
