"""A ladder for CUDA cores: one convolution and one sum, each in a few short kernels, from one thread per result to a tiled matrix product.

Images are NCHW, numbers float32. Nothing trains by these kernels. `python -m nbcnn ladder --cuda-cores` verifies and times them; docs/ladder.md
climbs them with a reader.
"""

from __future__ import annotations

from nbcnn.ops.conv.cuda_ladder import step1_thread, step2_halo, step3_gemm, step4_registers, step5_epilogue, sum1_thread, sum2_tree, sum3_shuffle
from nbcnn.ops.conv.hopper_ladder import Step
from nbcnn.plan.op import Map, Op

STEPS = (
    Step("1 thread", "one thread per result", step1_thread.IMPL),
    Step("2 halo", "a tile of pixels in shared memory", step2_halo.IMPL),
    Step("3 GEMM", "implicit GEMM, 16×16 tiles", step3_gemm.IMPL),
    Step("4 registers", "16 sums per thread", step4_registers.IMPL),
    Step("5 epilogue", "bias and ReLU before the store", step5_epilogue.IMPL, Op("conv", "fprop", after=(Map("relu"),))),
)
BIAS = Op("bias", "wgrad")
SUMS = (
    Step("1 thread", "one thread per channel", sum1_thread.IMPL, BIAS),
    Step("2 tree", "256 threads per channel, tree in shared memory", sum2_tree.IMPL, BIAS),
    Step("3 shuffle", "warps add by shuffles", sum3_shuffle.IMPL, BIAS),
)
