"""A ladder for Hopper: one convolution in six kernels, each with one idea more than the one before, from im2col to nearly `nbcnn.ops.conv.wgmma`.

Nothing trains by them. `python -m nbcnn ladder --hopper` verifies and times them; docs/hopper-ladder.md climbs them with a reader.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbcnn.ops.conv.hopper_ladder import step1_im2col, step2_tma, step3_ring, step4_wgmma, step5_roles, step6_epilogue
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Map, Op

CONV = Op("conv", "fprop")


@dataclass(frozen=True)
class Step:
    """A step: its name, its idea in a few words, the op that its kernel computes, and the implementation."""

    name: str
    idea: str
    impl: Impl
    op: Op = CONV


STEPS = (
    Step("1 im2col", "implicit GEMM, mma.sync", step1_im2col.IMPL),
    Step("2 TMA", "one thread fetches", step2_tma.IMPL),
    Step("3 ring", "fetch while multiplying", step3_ring.IMPL),
    Step("4 wgmma", "operands from shared memory", step4_wgmma.IMPL),
    Step("5 roles", "producer and consumers", step5_roles.IMPL),
    Step("6 epilogue", "bias, ReLU, TMA store", step6_epilogue.IMPL, Op("conv", "fprop", after=(Map("relu"),))),
)
