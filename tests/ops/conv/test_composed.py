"""Tests that fused ops put together from plain ones give what the references give, with whatever scratch the parts need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbcnn import modes
from nbcnn.check.gradcheck import bound, parity
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.conv import fused
from nbcnn.ops.conv.frame.composed import pool_wgrad, upconv_mse
from nbcnn.ops.conv.fused import REFERENCES
from nbcnn.ops.kernel.call import host

CPU = modes.MODES["cpu", "fp32"]
PLAIN = dict(CPU.fallbacks[0][1])


def needing_scratch(impl):
    """`impl` with 24 bytes of scratch that it fills, so that an overlap with the tensor in the middle would show."""

    def bind(call):
        class Spoil:
            def run(self, stream=0):
                assert call.scratch.nbytes >= 24
                call.scratch[:24] = 255

        return [Spoil(), *impl.bind(call), Spoil()]

    return replace(impl, bind=bind, scratch=lambda call: 24)


COMPOSED = {
    "conv_pool_wgrad": pool_wgrad(needing_scratch(PLAIN[named("conv_wgrad")]), host(REFERENCES[named("unpool")])),
    "upconv_mse_fprop": upconv_mse(
        needing_scratch(host(REFERENCES[named("upconv_fprop")])), needing_scratch(PLAIN[named("mse_fprop")]), PLAIN[named("mse_dgrad")]
    ),
}


@pytest.mark.parametrize("op", COMPOSED)
def test_composed_ops_agree_with_the_fused_reference(op):
    cases = [case for case in fused.cases() if case.op == named(op)]
    assert cases
    for case in cases:
        assert parity(CPU, COMPOSED[op], case, Host()) <= bound(case), case.label


def test_a_part_that_refuses_is_heard():
    refusing = replace(PLAIN[named("conv_wgrad")], supports=lambda call, target: f"no {call.in_shapes[1]}")
    case = next(case for case in fused.cases() if str(case.op) == "conv_pool_wgrad")
    with pytest.raises(ValueError, match=r"no \(1, 4, 6, 10\)"):
        parity(CPU, pool_wgrad(refusing, host(REFERENCES[named("unpool")])), case, Host())
