"""EvoNorm behind Winograd's convolution in one kernel: the end that its finishing warps have (nbcnn/ops/conv/onchip/finish.py).

While the next image is multiplied, they normalise the last one, slice by slice: z goes out and comes back from the second-level cache. All
threads of the block normalise its last image, or its part of one.
What an end writes:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone; z lies in its place until it is known
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch
    "b0 infer"  y of EvoNorm-B0 with the running variance; z as above
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.conv.onchip.finish import PLAIN, End
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, QUADS, STRIPS, THREADS, Form
from nbcnn.ops.evonorm.conv_wgmma_ends import merge
from nbcnn.ops.evonorm.quads import MOMENTS, PIXELS, QUAD, spreading
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import receive, send
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.traffic import ceil_div

_WARPS = FINISHERS // WARP
_MOST = {"s0": 8, "s0 infer": 8, "b0 infer": 4}
"""Accesses of 16 bytes that a thread has in flight: of 96 registers, B0's divisors take eight more (they spilled)."""


def spare_of(group: int) -> int:
    """Floats of shared memory: warps' statistics of groups, their first values, their deviations."""
    return (MOMENTS * _WARPS + 2) * (FILTERS // group)


@jit(device=True)
def _add(sums, out, made):
    """Pixels of a tile to the sums of the thread's four channels: a lead (its first value), Σ (x − lead), Σ (x − lead)²."""
    for q in range(QUAD):
        if made == i4(0):
            sums[q], sums[QUAD + q], sums[2 * QUAD + q] = out[q], f4(0), f4(0)
        for p in range(PIXELS):
            away = out[QUAD * p + q] - sums[q]
            sums[QUAD + q] += away
            sums[2 * QUAD + q] += away * away


@cache
def _finishing(form: Form, group: int, tells: bool) -> Any:
    """Device function: `End.finish`. Statistics of the image's groups, of all parts, to shared memory; shift and std if it `tells`."""
    PARTS, SHARE, GROUP, SETS, TELLS, ALL, TILES = form.parts, form.share * STRIPS, group, FILTERS // group, tells, form.strips, form.across
    FIRST, SUMS, COUNT = form.at_spare, MOMENTS * QUAD, group * form.H * form.W
    LEADS = FIRST + MOMENTS * _WARPS * SETS
    SCALES, EACH = LEADS + SETS, _WARPS * SETS
    spread, join = spreading(FILTERS, group, FINISHERS, FIRST), bar_sync(1, FINISHERS)

    @jit(device=True)
    def run(memory, sums, made, arrays, tid, n, part, eps):
        shift, std, packets = arrays[6], arrays[7], arrays[8]
        if made == i4(0):
            for i in range(SUMS):
                sums[i] = f4(0)
        if TELLS and tid < i4(QUADS):
            # The part's first pixel, and of its channels those that begin a group.
            for q in range(QUAD):
                own = i4(tid * i4(QUAD) + i4(q))
                set_ = i4(u4(own) // u4(GROUP))
                if own == set_ * i4(GROUP):
                    memory[u4(i4(LEADS) + set_)] = sums[q]
        spread(memory, sums, made, tid)
        join()
        if tid < i4(SETS):
            count, mean, squares = f4(0), f4(0), f4(0)
            for warp in range(_WARPS):
                at = u4(i4(FIRST) + tid * i4(_WARPS) + i4(warp))
                count, mean, squares = merge(count, mean, squares, memory[u4(at + u4(2 * EACH))], memory[at], memory[u4(at + u4(EACH))])
            if PARTS > 1:
                own_packets = i4(i4(n * i4(SETS) + tid) * i4(PARTS))
                turn = i4(packets[i4(4) * (own_packets + part) + i4(1)] + i4(1))
                send(packets, i4(own_packets + part), turn, mean, squares)
                count, mean, squares = f4(0), f4(0), f4(0)
                for of in range(PARTS):
                    tiles = f4(min(SHARE, ALL - of * SHARE) * TILES * PIXELS * GROUP)
                    other_mean, other_squares = receive(packets, i4(own_packets + i4(of)), turn)
                    count, mean, squares = merge(count, mean, squares, tiles, other_mean, other_squares)
            s = f4(math.sqrt(max(squares, f4(0)) * f4(1 / COUNT) + eps))
            memory[u4(i4(SCALES) + tid)] = s
            if TELLS and part == i4(0):
                to = u4(n * i4(SETS) + tid)
                shift[to], std[to] = mean - memory[u4(i4(LEADS) + tid)], s
        join()

    return run


@cache
def _normalising(form: Form, group: int, name: str, rows: int, each: int) -> Any:
    """Device function (memory, arrays, thread, n, part, first, until, eps): y of the part's pixels first … until − 1, `rows` at a time.

    y = factor·x·σ(…) + plus with 2^(slope·x) for S0, else factor·x/max(least, slope·x + scale) + plus. `each` accesses in flight.
    """
    H, W, GROUP, S0, ROWS, EACH = form.H, form.W, group, name != "b0 infer", rows, each
    SCALES = form.at_spare + (MOMENTS * _WARPS + 1) * (FILTERS // group)
    PART_PIXELS, FLOATS = form.share * form.lines * form.W, 4 * each

    @jit(device=True)
    def run(memory, arrays, thread, n, part, first, until, eps):
        gamma, beta, v, running, z, y = arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5]
        held = cuda.local.array(FLOATS, f4)
        factors = cuda.local.array(QUAD, f4)
        slopes = cuda.local.array(QUAD, f4)
        scales = cuda.local.array(QUAD, f4)
        leasts = cuda.local.array(QUAD, f4)
        c = i4((thread & i4(QUADS - 1)) * i4(QUAD))
        gammas, plus, vs = load4(gamma, c), load4(beta, c), load4(v, c)
        of_batch = vs if S0 else load4(running, c)
        for q in range(QUAD):
            scales[q] = memory[u4(i4(SCALES) + i4(u4(c + i4(q)) // u4(GROUP)))]
            factors[q] = divide(gammas[q], scales[q]) if S0 else gammas[q]
            slopes[q] = vs[q] * f4(-LOG2E) if S0 else vs[q]
            leasts[q] = f4(0) if S0 else f4(math.sqrt(of_batch[q] + eps))
        begin = i4(i4(n * i4(H * W) + part * i4(PART_PIXELS)) * i4(FILTERS) + c)
        pixel = i4(first + i4(u4(thread) // u4(QUADS)))
        while pixel < until:
            at = i4(begin + pixel * i4(FILTERS))
            for i in range(EACH):
                # Beyond the last pixel the thread's first is read once more: loads without branches, all in flight.
                here = i4(at + i4(i * ROWS * FILTERS)) if pixel + i4(i * ROWS) < until else at
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load4(z, here)
            for i in range(EACH):
                for q in range(QUAD):
                    x = held[4 * i + q]
                    if S0:
                        held[4 * i + q] = factors[q] * x * reciprocal(f4(1) + exp2(slopes[q] * x)) + plus[q]
                    else:
                        held[4 * i + q] = factors[q] * (x * reciprocal(max(leasts[q], slopes[q] * x + scales[q]))) + plus[q]
                if pixel + i4(i * ROWS) < until:
                    store4(y, i4(at + i4(i * ROWS * FILTERS)), held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])
            pixel = i4(pixel + i4(EACH * ROWS))

    return run


@cache
def norm_end(form: Form, group: int, name: str) -> End:
    """The end of this name for groups of `group` channels. `form.spare` is `spare_of(group)`."""
    finish = _finishing(form, group, name in ("s0", "planes"))
    if name == "planes":
        return replace(PLAIN, add=_add, finish=finish, sums=MOMENTS * QUAD)
    pixels, own_rows, all_rows = min(form.share * form.lines, form.H) * form.W, FINISHERS // QUADS, THREADS // QUADS
    IMAGE, SHARE = form.H * form.W, form.share * form.lines * form.W
    # A slice a round: all of them together are one image.
    slice_rows = ceil_div(ceil_div(pixels, own_rows), form.share)
    SLICE = slice_rows * own_rows

    def in_flight(most: int) -> int:
        return ceil_div(most, ceil_div(most, _MOST[name]))

    by_finishers = _normalising(form, group, name, own_rows, in_flight(slice_rows))
    by_all = _normalising(form, group, name, all_rows, in_flight(ceil_div(pixels, all_rows)))

    @jit(device=True)
    def some(memory, arrays, tid, n, part, slice, eps):
        first = i4(slice * i4(SLICE))
        by_finishers(memory, arrays, tid, n, part, first, i4(min(i4(first + i4(SLICE)), i4(min(i4(SHARE), i4(i4(IMAGE) - part * i4(SHARE)))))), eps)

    @jit(device=True)
    def rest(memory, arrays, thread, n, part, eps):
        by_all(memory, arrays, thread, n, part, i4(0), i4(min(i4(SHARE), i4(i4(IMAGE) - part * i4(SHARE)))), eps)

    return End(_add, finish, some, rest, MOMENTS * QUAD, True)
