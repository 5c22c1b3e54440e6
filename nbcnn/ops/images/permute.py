"""The elements of each example with their axes in another order: y = x.transpose(axes), of examples that have `shape`.

Operands are vectors (N,F) in C, H, W order, seen as (N, *shape), so that one kernel serves every row, and examples may have more axes than images
do: what a pixel shuffle (W. Shi et al., arXiv:1609.05158) and a channel shuffle (X. Zhang et al., arXiv:1707.01083) need. The gradient is the same op
with the inverse order.

    permute           x (N,F) -> y (N,F)                       shape, axes

`axes[i]` is the axis of `shape` that becomes axis i.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.ops.kernel.windows import launch, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Axes = tuple[int, ...]


def permute(x: np.ndarray, y: np.ndarray, *, shape: Axes, axes: Axes) -> None:
    """y (N,F) = x (N,F), seen as (N, *shape), with its axes in the order `axes`."""
    made = x.reshape(len(x), *shape).transpose(0, *(1 + axis for axis in axes))
    np.copyto(y, made.reshape(y.shape))


def joined(shape: Axes, axes: Axes) -> tuple[Axes, Axes]:
    """The same permutation of as few axes as it takes: axes of 1 are left out, and those that stay side by side are one."""
    kept = [axis for axis in axes if shape[axis] > 1]
    runs: list[list[int]] = []
    for axis in kept:
        between = shape[runs[-1][-1] + 1 : axis] if runs and runs[-1][-1] < axis else None
        if between is not None and all(extent == 1 for extent in between):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    order = sorted(range(len(runs)), key=lambda at: runs[at][0])
    sizes = tuple(numel(tuple(shape[axis] for axis in runs[at])) for at in order)
    return sizes, tuple(order.index(at) for at in range(len(runs)))


@cache
def permute_kernel(kind: str, sizes: Axes, steps: Axes) -> Any:
    """The kernel for examples whose made axes have `sizes`, the first of them left out, and lie `steps` apart in x; x and y stored as `kind`."""
    load, store = scalar_io(kind)
    AXES = len(sizes)

    @jit(device=True)
    def whole(rest, at):
        return rest, at

    def behind(one: Any, extent: int, step: int) -> Any:
        @jit(device=True)
        def place(rest, at):
            rest, here = split(rest, extent)
            return one(rest, at + here * step)

        return place

    place = whole
    for axis in range(AXES):
        place = behind(place, sizes[axis], steps[axis + 1])
    FIRST = steps[0]

    @jit()
    def permute_kernel(x, y, count, width):
        """y[n, i₀, i₁, …] = x[n·width + Σ i·step].

        grid    ⌈count / 256⌉, block 256
        owns    thread: one element of y
        shared  none
        moves   8·count bytes of float32; reads of x that lie apart share their lines in the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        n, within_example = split(i, width)
        first, at = place(within_example, 0)
        store(y, i, load(x, n * width + at + first * FIRST))

    return permute_kernel


def bind(call: Call) -> list[Launch]:
    """One launch."""
    shape, axes = joined(tuple(call.attrs["shape"]), tuple(call.attrs["axes"]))
    n, width = call.in_shapes[0]
    strides = [numel(shape[axis + 1 :]) for axis in range(len(shape))]
    sizes, steps = tuple(shape[axis] for axis in axes[1:]), tuple(strides[axis] for axis in axes)
    kernel = permute_kernel(kinds(call)[0], sizes, steps or (0,))
    return launch(kernel, n * width, (*call.ins, *call.outs), width)


HOST, OPS = {Op("permute"): host(permute)}, {Op("permute"): Impl(bind, supports=supports, traffic=streamed)}

CASES: tuple[tuple[Axes, Axes], ...] = (
    ((5,), (0,)),
    ((2, 3, 4), (2, 0, 1)),
    ((2, 3, 4), (0, 2, 1)),
    ((1, 3, 1, 5), (3, 0, 2, 1)),
    ((2, 2, 3, 4, 5), (2, 3, 0, 4, 1)),
)


def cases() -> Iterator[Case]:
    """One axis, two that change places, axes of one element, a pixel shuffle."""
    for shape, axes in CASES:
        size = numel(shape)
        yield Case(Op("permute"), f"{shape} as {axes}", (normal(46, 3, size),), (((3, size), "float32"),), {"shape": shape, "axes": axes})
