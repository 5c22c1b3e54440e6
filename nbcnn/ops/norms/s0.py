"""EvoNorm-S0: on slabs held in registers where they fit (s0_held.py), else by the kernels here, which take any shape.

A block has whole groups of one image, so one kernel has statistics, result and gradient; it reads x again for each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.sigmoid import both_sides
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.norms import s0_held, traffic
from nbcnn.ops.norms.held import Held, slabs_of
from nbcnn.ops.norms.plane import Slab, column_sum, deviation_of, group_sum, slab_of, slab_position, steps
from nbcnn.ops.norms.rows import launch_rows
from nbcnn.plan.op import Op

PARTIALS = 3
"""Sums of every plane that the gradients of the parameters are made of."""


@cache
def fprop_kernel(kind: str, slab: Slab) -> Any:
    load, store = scalar_io(kind)
    position, in_column, in_group = slab_position(slab), column_sum(slab.columns, slab.threads), group_sum(slab)
    GROUP, COLUMNS, ROWS, THREADS = slab.group, slab.columns, slab.rows, slab.threads

    @jit()
    def evonorm_s0_fprop_kernel(x, gamma, beta, v, y, shift, std, slabs, C, HW, step_c, step_p, eps):
        """y = γ·x·σ(v·x)/s + β; shift, std of every group.

        grid N·slabs, block 32–256; owns: per block whole groups of an image, per thread pixels of one channel at a time.
        shared 4 bytes per thread; moves 8·x bytes (two further reads of x hit L1). source: arXiv:2004.02967.
        """
        values = cuda.shared.array(THREADS, f4)
        n, first, column, row, mine, channels = position(slabs, C)
        start, working = n * C * HW, column < channels
        lead = load(x, start + (first + mine * GROUP) * step_c) if working else 0.0

        total = 0.0
        for c in range(column, channels, COLUMNS):
            for p in range(row, HW, ROWS):
                total += load(x, start + (first + c) * step_c + p * step_p) - lead
        count = f4(GROUP * HW)
        offset = in_group(values, in_column(values, total)) / count

        total = 0.0
        for c in range(column, channels, COLUMNS):
            for p in range(row, HW, ROWS):
                centred = load(x, start + (first + c) * step_c + p * step_p) - lead - offset
                total += centred * centred
        s = deviation_of(in_group(values, in_column(values, total)) / count + eps)
        groups = C // GROUP
        if working and row == 0 and column == mine * GROUP:
            at = n * groups + first // GROUP + mine
            shift[at] = offset
            std[at] = s

        scale = 1.0 / s
        for c in range(column, channels, COLUMNS):
            factor, plus, slope = gamma[first + c] * scale, beta[first + c], v[first + c]
            for p in range(row, HW, ROWS):
                at = start + (first + c) * step_c + p * step_p
                value = load(x, at)
                sigma, _ = both_sides(slope * value)
                store(y, at, factor * value * sigma + plus)

    return evonorm_s0_fprop_kernel


@cache
def grads_kernel(kind: str, slab: Slab) -> Any:
    load, store = scalar_io(kind)
    position, in_column, in_group = slab_position(slab), column_sum(slab.columns, slab.threads), group_sum(slab)
    GROUP, COLUMNS, ROWS, THREADS = slab.group, slab.columns, slab.rows, slab.threads

    @jit()
    def evonorm_s0_grads_kernel(dy, x, gamma, v, shift, std, dx, partials, slabs, N, C, HW, step_c, step_p):
        """dx; and of every plane Σ g, Σ g·p/s, Σ h·x²σ(1−σ)/s, in partials (3,N,C).

        grid N·slabs, block 32–256; owns: per block whole groups of an image, per thread pixels of one channel at a time.
        shared 4 bytes per thread; moves 12·x bytes (the second read of x and dy hits L1). source: arXiv:2004.02967.
        """
        values = cuda.shared.array(THREADS, f4)
        n, first, column, row, mine, channels = position(slabs, C)
        start, working = n * C * HW, column < channels
        groups = C // GROUP
        of_group = n * groups + first // GROUP + mine
        scale = 1.0 / std[of_group] if working else 0.0
        lead = load(x, start + (first + mine * GROUP) * step_c) + 0.0 if working else 0.0
        offset = shift[of_group] if working else 0.0

        pull = 0.0
        for column0 in range(0, channels, COLUMNS):
            c = column0 + column
            inside = c < channels
            sum_g, sum_p, sum_v = 0.0, 0.0, 0.0
            slope = v[first + c] if inside else 0.0
            factor = gamma[first + c] if inside else 0.0
            for p in range(row, HW if inside else 0, ROWS):
                at = start + (first + c) * step_c + p * step_p
                value, g = load(x, at), load(dy, at)
                sigma, rest = both_sides(slope * value)
                gp = g * value * sigma
                sum_g += g
                sum_p += gp
                sum_v += gp * value * rest
            sum_g = in_column(values, sum_g)
            sum_p = in_column(values, sum_p) * scale
            sum_v = in_column(values, sum_v) * (scale * factor)
            pull += factor * sum_p
            if inside and row == 0:
                plane = n * C + first + c
                partials[plane] = sum_g
                partials[N * C + plane] = sum_p
                partials[2 * N * C + plane] = sum_v
        pull = in_group(values, pull) * scale / f4(GROUP * HW)

        for c in range(column, channels, COLUMNS):
            slope, factor = v[first + c], gamma[first + c] * scale
            for p in range(row, HW, ROWS):
                at = start + (first + c) * step_c + p * step_p
                value = load(x, at)
                sigma, rest = both_sides(slope * value)
                direct = factor * load(dy, at) * (sigma + slope * value * sigma * rest)
                store(dx, at, direct - pull * scale * ((value - lead) - offset))

    return evonorm_s0_grads_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    if call.tile is not None:
        return s0_held.bind_fprop(call)
    slab, slabs, grid, extents = _extents(call, 0)
    kernel = fprop_kernel(kinds(call)[0], slab)
    return [Launch(kernel, grid, slab.threads, (*call.ins, *call.outs, slabs, *extents, np.float32(call.attrs["eps"])))]


def bind_grads(call: Call) -> list[Launch]:
    """One launch for dx and the sums of every plane, one that adds these over the images; or one for all."""
    if call.tile is not None:
        return s0_held.bind_grads(call)
    slab, slabs, grid, extents = _extents(call, 1)
    n, c = call.in_shapes[0][:2]
    dx, dgamma, dbeta, dv = call.outs
    partials = call.scratch[: scratch_grads(call)].view(np.float32)
    kernel = grads_kernel(kinds(call)[0], slab)
    first = Launch(kernel, grid, slab.threads, (*call.ins, dx, partials, slabs, np.int32(n), *extents))
    return [first, launch_rows(partials, (dbeta, dgamma, dv), n, c)]


def scratch_grads(call: Call) -> int:
    """Bytes of the sums of every plane."""
    n, c = call.in_shapes[0][:2]
    return 4 * PARTIALS * n * c


def _extents(call: Call, image: int) -> tuple[Slab, np.int32, int, tuple[np.int32, ...]]:
    """The slab, slabs per image, the grid, and the extents that the kernels take."""
    shape = call.in_shapes[image]
    slab = slab_of(shape, call.layout, shape[1] // call.attrs["groups"])
    slabs = -(-shape[1] // slab.channels)
    return slab, np.int32(slabs), shape[0] * slabs, tuple(np.int32(s) for s in steps(call))


def candidates(call: Call, target: Target) -> list[Held]:
    """Slabs that can be held: of x, or of x and dy."""
    image = len(call.in_shapes[0]) == len(call.in_shapes[1])
    shape, tensors = call.in_shapes[1 if image else 0], 2 if image else 1
    return slabs_of(shape, call.layout, shape[1] // call.attrs["groups"], (tensors,), target.multiprocessors)


def tile(call: Call, target: Target) -> Held | None:
    """The first of `candidates`. The simulator runs a thread as a Python thread: there only a test asks for a slab to be held."""
    return None if target.simulated else next(iter(candidates(call, target)), None)


FPROP = Impl(bind_fprop, supports=maps.supports, tile=tile, candidates=candidates, traffic=traffic.s0_fprop)
GRADS = Impl(bind_grads, scratch_grads, maps.supports, tile, candidates=candidates, traffic=traffic.s0_grads)
OPS = {Op("evonorm_s0", "fprop"): FPROP, Op("evonorm_s0", "grads"): GRADS}
