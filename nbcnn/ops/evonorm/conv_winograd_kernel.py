"""Winograd's last kernel with EvoNorm behind it: a block makes all pixels of a slab of channels of an image, and keeps them in registers.

Neighbouring lanes have neighbouring quads of channels, as in the plain kernel (winograd_transform.py), so a slab of sixteen channels reads
64 neighbouring bytes of every point of a tile. Statistics are two passes over registers in every warp, put together by Chan's formula.

What it then writes is the `end`:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch
    "b0"        all of EvoNorm-B0 in training, where the batch fits on the GPU at once: blocks send each other their planes' statistics
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.conv.thin_shape import unrolled
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import receive, send
from nbcnn.ops.ptx.shuffle import WARP, sum_over
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.sigmoid import divide

QUAD, PIXELS, SIDE = 4, 4, 4
"""Channels of an access; pixels of a tile; its points lie 4×4."""
HELD = QUAD * PIXELS
"""Numbers of an item: a quad of channels of a tile."""


@dataclass(frozen=True)
class Slab:
    """What is frozen into the kernel: a block has `channels` of an image of H×W×K, in groups of `group`; `blocks` of them run on a multiprocessor.

    An item is a quad of channels of a tile of 2×2 pixels. Thread t has the items t, t + threads, …, up to `slots` of them.
    """

    H: int
    W: int
    K: int
    group: int
    channels: int
    slots: int
    blocks: int

    @property
    def quads(self) -> int:
        """Lanes that have a tile's channels."""
        return self.channels // QUAD

    @property
    def tiles(self) -> int:
        """Tiles of an image."""
        return self.H * self.W // PIXELS

    @property
    def items(self) -> int:
        """Items of a block."""
        return self.tiles * self.quads

    @property
    def threads(self) -> int:
        """Whole warps that hold the items."""
        return -(-self.items // (self.slots * WARP)) * WARP

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.channels // self.group


@cache
def _filling(slab: Slab) -> Any:
    """Device function (held, points, b, tile, tiles, c, tail): the thread's items, channels c … c + 3 of the tiles `tile`, tile + step, … of `tiles`.

    The last item stands behind a branch, so that its loads do not take the registers of the one before.
    tail: 1 if the thread has its last item too; if not, zeros are in its place.
    """
    K, STEP, LAST = slab.K, slab.threads // slab.quads, slab.slots - 1

    def line(slot: int, a: int) -> Any:
        """Aᵀ m A is linear in the lines of m: line a of four points, with what it adds to both lines of pixels."""
        BEHIND, AT, POINT = slot * STEP * K, slot * HELD, SIDE * a

        @jit(device=True)
        def run(held, points, b, tile, tiles, c):
            m = cuda.local.array(HELD, f4)
            first, step = i4(i4(tile * i4(K)) + c + i4(BEHIND)), i4(tiles * i4(K))
            for j in range(SIDE):
                m[4 * j], m[4 * j + 1], m[4 * j + 2], m[4 * j + 3] = load4(points, i4(first + i4(POINT + j) * step))
            for q in range(QUAD):
                left, right = m[q] + m[4 + q] + m[8 + q], m[4 + q] - m[8 + q] - m[12 + q]
                if a == 0:
                    held[AT + q], held[AT + 4 + q] = left, right
                elif a < 3:
                    held[AT + q] += left
                    held[AT + 4 + q] += right
                if a == 1:
                    held[AT + 8 + q], held[AT + 12 + q] = left, right
                elif a > 1:
                    held[AT + 8 + q] -= left
                    held[AT + 12 + q] -= right

        return run

    def one(slot: int) -> Any:
        AT, IF, lines = slot * HELD, slot == LAST, unrolled([line(slot, a) for a in range(SIDE)])

        @jit(device=True)
        def run(held, points, b, tile, tiles, c, tail):
            if IF:
                for i in range(HELD):
                    held[AT + i] = f4(0)
            if not IF or tail:
                lines(held, points, b, tile, tiles, c)
                plus = load4(b, c)
                for pixel in range(PIXELS):
                    for q in range(QUAD):
                        held[AT + 4 * pixel + q] += plus[q]

        return run

    return unrolled([one(slot) for slot in range(slab.slots)])


@cache
def _putting(slab: Slab) -> Any:
    """Device function (array, held, n, tile, c, tail): the thread's items to array (N,H,W,K), the counterpart of `_filling`."""
    H, W, K, STEP, LAST, ACROSS = slab.H, slab.W, slab.K, slab.threads // slab.quads, slab.slots - 1, slab.W // 2

    def one(slot: int) -> Any:
        BEHIND, AT, IF = slot * STEP, slot * HELD, slot == LAST

        @jit(device=True)
        def run(array, held, n, tile, c, tail):
            if not IF or tail:
                own = i4(tile + i4(BEHIND))
                line = i4(u4(own) // u4(ACROSS))
                across = i4(own - line * i4(ACROSS))
                at = i4(i4(i4(i4(n * i4(H) + i4(2) * line) * i4(W)) + i4(2) * across) * i4(K) + c)
                for pixel in range(PIXELS):
                    j = AT + 4 * pixel
                    store4(array, i4(at + i4((pixel // 2 * W + pixel % 2) * K)), held[j], held[j + 1], held[j + 2], held[j + 3])

        return run

    return unrolled([one(slot) for slot in range(slab.slots)])


@cache
def _spreading(slab: Slab) -> Any:
    """Device function (kept, held, tid, tail): of each of the thread's groups the mean of what its warp has, Σ (x − mean)² and the count,
    to kept (3, group, warp), for `merged`. Two passes over registers.
    """
    QUADS, GROUP, SLOTS, WARPS, ALL = slab.quads, slab.group, slab.slots, slab.threads // WARP, slab.groups * (slab.threads // WARP)
    OWN, WIDE = min(GROUP, QUAD), max(GROUP // QUAD, 1)  # channels of a group that a thread has; lanes of a tile that share a group
    PARTS, BEFORE, PER_LANE, ITEMS = QUAD // OWN, (SLOTS - 1) * slab.threads, PIXELS * OWN, slab.items
    across = sum_over(WARP - QUADS | WIDE - 1)

    @jit(device=True)
    def run(kept, held, tid, tail):
        means = cuda.local.array(PARTS, f4)
        sums = cuda.local.array(PARTS, f4)
        warp, lane = i4(u4(tid) // u4(WARP)), i4(tid & i4(WARP - 1))
        behind = min(max(i4(i4(ITEMS - BEFORE) - warp * i4(WARP)), i4(0)), i4(WARP))
        count = f4(i4((i4((SLOTS - 1) * WARP) + behind) * i4(PER_LANE))) * f4(WIDE / QUADS)
        # What is not there is zero: it adds nothing to the first sum, nor to the second, about zero. Groups in turn, for their sums do not wait
        # for each other.
        for part in range(PARTS):
            means[part], sums[part] = f4(0), f4(0)
        for slot in range(SLOTS):
            for pixel in range(PIXELS):
                for q in range(QUAD):
                    means[q // OWN] += held[HELD * slot + QUAD * pixel + q]
        for part in range(PARTS):
            means[part] = across(means[part]) * divide(f4(1), count)
        for slot in range(SLOTS):
            for pixel in range(PIXELS):
                for q in range(QUAD):
                    away = held[HELD * slot + QUAD * pixel + q] - (means[q // OWN] if slot < SLOTS - 1 or tail else f4(0))
                    sums[q // OWN] += away * away
        for part in range(PARTS):
            squares = across(sums[part])
            if lane < i4(QUADS) and lane & i4(WIDE - 1) == i4(0):
                group = i4(u4(lane * i4(QUAD)) // u4(GROUP)) + i4(part)
                at = u4(i4(group * i4(WARPS)) + warp)
                kept[at], kept[u4(u4(ALL) + at)], kept[u4(u4(2 * ALL) + at)] = means[part], squares, count

    return run


@cache
def _joining(slab: Slab, keeps: bool, sends: bool) -> Any:
    """Device function (kept, leads, scales, shift, std, packets, tid, at, to, step, turn, eps): s of the block's groups to scales.

    Also shift, std from `at` on if `keeps`; mean and variance as packets to, to + step, … if `sends`. A warp takes a group, a lane what one
    warp knows of it: Chan's formula.
    """
    GROUPS, WARPS, KEEPS, SENDS = slab.groups, slab.threads // WARP, keeps, sends
    ALL, COUNT, TURNS = GROUPS * WARPS, slab.group * slab.H * slab.W, -(-GROUPS // WARPS)
    across = sum_over(WARP - 1)

    @jit(device=True)
    def run(kept, leads, scales, shift, std, packets, tid, at, to, step, turn, eps):
        warp, lane = i4(u4(tid) // u4(WARP)), i4(tid & i4(WARP - 1))
        for round in range(TURNS):
            group = i4(warp + i4(round * WARPS))
            own, squares, count = f4(0), f4(0), f4(0)
            if lane < i4(WARPS) and group < i4(GROUPS):
                of = u4(i4(group * i4(WARPS)) + lane)
                own, squares, count = kept[of], kept[u4(u4(ALL) + of)], kept[u4(u4(2 * ALL) + of)]
            mean = across(own * count) * f4(1 / COUNT)
            away = own - mean
            variance = across(squares + count * away * away) * f4(1 / COUNT)
            s = f4(math.sqrt(variance + eps))
            if lane == i4(0) and group < i4(GROUPS):
                scales[u4(group)] = s
                if SENDS:
                    send(packets, i4(to + group * step), turn, mean, variance)
                if KEEPS:
                    shift[u4(at + group)], std[u4(at + group)] = mean - leads[u4(group)], s

    return run


@cache
def _meeting(slab: Slab) -> Any:
    """Device function (leads, leasts, running, batch_shift, batch_std, packets, tid, n, c0, turn, N, eps, momentum): s_B of the block's channels
    to leasts, from all images' packets of this turn; of image 0 the channels' statistics to memory.

    A warp takes a channel, a lane every 32nd image: Welford's way over a lane's planes, Chan's over the lanes.
    """
    CHANNELS, WARPS, HW = slab.channels, slab.threads // WARP, slab.H * slab.W
    TURNS, across = -(-CHANNELS // WARPS), sum_over(WARP - 1)

    @jit(device=True)
    def run(leads, leasts, running, batch_shift, batch_std, packets, tid, n, c0, turn, N, eps, momentum):
        warp, lane = i4(u4(tid) // u4(WARP)), i4(tid & i4(WARP - 1))
        for round in range(TURNS):
            own = i4(warp + i4(round * WARPS))
            c, count, centre, squares = i4(c0 + own), f4(0), f4(0), f4(0)
            for image in range(lane, N if own < i4(CHANNELS) else i4(0), i4(WARP)):
                mean, variance = receive(packets, i4(c * N + image), turn)
                count += f4(1)
                away = mean - centre
                centre += divide(away, count)
                squares += variance + away * (mean - centre)
            mean = divide(across(count * centre), f4(N))
            away = centre - mean
            variance = divide(across(squares + count * away * away), f4(N))
            if lane == i4(0) and own < i4(CHANNELS):
                s = f4(math.sqrt(variance + eps))
                leasts[u4(own)] = s
                if n == i4(0):
                    m = f4(N) * f4(HW)
                    batch_shift[u4(c)], batch_std[u4(c)] = mean - leads[u4(own)], s
                    running[u4(c)] = (f4(1) - momentum) * running[u4(c)] + momentum * variance * (m / max(m - f4(1), f4(1)))

    return run


@cache
def _normalising(slab: Slab, end: str) -> Any:
    """Device function (held, scales, factors, plus, slopes, least, quad): y of the thread's items; scales: s of the block's groups."""
    GROUP, ITEMS, S0 = slab.group, slab.slots * PIXELS, end in ("s0", "s0 infer")

    def one(q: int) -> Any:
        @jit(device=True)
        def run(held, scales, factors, plus, slopes, least, quad):
            s = scales[u4(i4(quad * i4(QUAD)) + i4(q)) // u4(GROUP)]
            factor, slope = divide(factors[q], s) if S0 else factors[q], slopes[q] * f4(-LOG2E) if S0 else slopes[q]
            for i in range(ITEMS):
                x = held[QUAD * i + q]
                if S0:
                    held[QUAD * i + q] = factor * x * reciprocal(f4(1) + exp2(slope * x)) + plus[q]
                else:
                    held[QUAD * i + q] = factor * (x * reciprocal(max(least[q], slope * x + s))) + plus[q]

        return run

    return unrolled([one(q) for q in range(QUAD)])


@cache
def image_norm_kernel(slab: Slab, end: str) -> Any:
    """The kernel of one slab and end."""
    fill, put, spread, normalise = _filling(slab), _putting(slab), _spreading(slab), _normalising(slab, end)
    KEEPS, NORMALISES, RUNS, MEETS = end in ("s0", "planes", "b0"), end != "planes", end == "b0 infer", end == "b0"
    join, meet = _joining(slab, KEEPS, MEETS), _meeting(slab)
    THREADS, QUADS, TILES, ITEMS, GROUP, GROUPS = slab.threads, slab.quads, slab.tiles, slab.items, slab.group, slab.groups
    CHANNELS, SLABS, BEFORE, FLOATS = slab.channels, slab.K // slab.channels, (slab.slots - 1) * slab.threads, HELD * slab.slots
    KEPT, GROUPS_OF_IMAGE = 3 * slab.groups * (slab.threads // WARP), slab.K // slab.group

    @jit(launch_bounds=(THREADS, slab.blocks))
    def winograd_image_norm_kernel(
        points, b, gamma, beta, v, running, z, y, shift, std, batch_shift, batch_std, packets, first, tiles, N, eps, momentum
    ):  # fmt: skip
        """z = Aᵀ m A + b of points[point][t][k]; y = γ·z·σ(v·z)/s + β or γ·z/max(s_B, v·z + s) + β; shift, std of every group.

        s_B: of the batch, with its statistics, or √(running + eps).
        grid images · K/channels, block up to 1024; owns: a block `channels` of the image first + …, a thread up to `slots` quads of them of a tile
        shared 12 bytes a group and warp; moves 4·(4 + 1)·H·W·K bytes an image, 4·H·W·K more where z and y are kept
        needs whole groups in a block; with batch statistics all blocks on the GPU at once. source: arXiv:1509.09308, arXiv:2004.02967
        """
        kept = cuda.shared.array(KEPT, f4)
        leads = cuda.shared.array(GROUPS, f4)
        scales = cuda.shared.array(GROUPS, f4)
        leasts = cuda.shared.array(GROUPS, f4)
        held = cuda.local.array(FLOATS, f4)
        tid, block = i4(cuda.threadIdx.x), i4(cuda.blockIdx.x)
        image = i4(u4(block) // u4(SLABS))
        c0 = i4((block - image * i4(SLABS)) * i4(CHANNELS))
        tile, quad = i4(u4(tid) // u4(QUADS)), i4(tid & i4(QUADS - 1))
        n, c = i4(first + image), i4(c0 + quad * i4(QUAD))
        tail = i4(tid + i4(BEFORE)) < i4(ITEMS)
        packet, turn = i4(c0 * N + n), i4(0)
        if MEETS:
            turn = i4(packets[u4(i4(4) * packet + i4(1))] + i4(1))
        fill(held, points, b, i4(image * i4(TILES) + tile), tiles, c, tail)
        if KEEPS:
            put(z, held, n, tile, c, tail)
            if tid < i4(QUADS):
                # The image's first pixel, and of its channels those that begin a group.
                for q in range(QUAD):
                    own = i4(quad * i4(QUAD) + i4(q))
                    group = i4(u4(own) // u4(GROUP))
                    if own == group * i4(GROUP):
                        leads[u4(group)] = held[q]
        spread(kept, held, tid, tail)
        factors = plus = slopes = least = f4(0), f4(0), f4(0), f4(0)
        if NORMALISES and not MEETS:
            factors, plus, slopes = load4(gamma, c), load4(beta, c), load4(v, c)
            if RUNS:
                least = load4(running, c)
        cuda.syncthreads()
        at = i4(i4(n * i4(GROUPS_OF_IMAGE)) + i4(u4(c0) // u4(GROUP)))
        join(kept, leads, scales, shift, std, packets, tid, at, packet, N, turn, eps)
        if MEETS:
            meet(leads, leasts, running, batch_shift, batch_std, packets, tid, n, c0, turn, N, eps, momentum)
            factors, plus, slopes = load4(gamma, c), load4(beta, c), load4(v, c)
        if NORMALISES:
            cuda.syncthreads()
            if MEETS:
                own = u4(quad * i4(QUAD))
                least = leasts[own], leasts[u4(own + u4(1))], leasts[u4(own + u4(2))], leasts[u4(own + u4(3))]
            elif RUNS:
                least = f4(math.sqrt(least[0] + eps)), f4(math.sqrt(least[1] + eps)), f4(math.sqrt(least[2] + eps)), f4(math.sqrt(least[3] + eps))
            normalise(held, scales, factors, plus, slopes, least, quad)
            put(y, held, n, tile, c, tail)

    return winograd_image_norm_kernel
