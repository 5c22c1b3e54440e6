"""When an image is too small for Hopper's tiles: the portable engine splits GK over the multiprocessors instead.

A wgmma tile is 64 to 256 pixels by 128 filters, so 256 pixels or fewer leave all but a few multiprocessors without work. At batch 1 on
an H200 the portable engine with split sums is then faster in every forward convolution and input gradient: conv4's dgrad 5.9 µs against
12.9, conv2's fprop 6.6 against 8.4 (docs/log/tensor-cores.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl
from nbcnn.plan.op import Op, Pool

MOST_PIXELS = 256
"""Pixels of all result images together, before pooling."""


def for_few_pixels(ops: Mapping[Op, Impl]) -> dict[Op, Impl]:
    """The implementations among `ops` that make images, for calls whose result has at most MOST_PIXELS pixels."""
    return {op: _limited(impl) for op, impl in ops.items() if op.direction in ("fprop", "dgrad")}


def _limited(impl: Impl) -> Impl:
    def slower(call: Call, target: Target) -> str | None:
        n, _, height, width = next(shape for shape in call.out_shapes if len(shape) == 4)
        pixels = n * height * width * (4 if call.op.has(Pool) else 1)
        if pixels > MOST_PIXELS:
            return f"{pixels} pixels are enough for larger tiles"
        return impl.slower(call, target)

    return replace(impl, slower=slower)
