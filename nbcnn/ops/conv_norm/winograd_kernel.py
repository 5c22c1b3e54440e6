"""Winograd's last kernel with EvoNorm behind it: a block makes all pixels of a slab of channels of an image, and keeps them in shared memory.

Neighbouring lanes have neighbouring quads of channels, as in the plain kernel (winograd/transform.py): a slab of 32 channels reads 128
neighbouring bytes at every position of a tile, stores as many of a pixel, and other blocks of the multiprocessor do so while this one makes
statistics and normalises. A thread has one quad of channels all along, so statistics are its own sums, put together by Chan's formula; and
it reads back only what it has kept itself.

What the kernel then writes is its `epilogue`:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch. Nothing is kept
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.winograd.transform import output_tile
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.norms.quads import MOMENTS, PIXELS, QUAD, spreading
from nbcnn.ops.ptx.fast import LOG2E, exp2, larger, reciprocal
from nbcnn.ops.ptx.shuffle import WARP, sum_over
from nbcnn.ops.ptx.vector import load4, shared_load4, shared_store4, store4


@dataclass(frozen=True)
class Slab:
    """What is frozen into the kernel: a block has `channels` of an image of H×W×K, in groups of `group`.

    An item is a quad of channels of a tile of 2×2 pixels. Thread t has the items t, t + threads, …; `threads` is a multiple of the quads.
    keeps: 1 if items stay in shared memory until they are normalised. blocks: that the compiler leaves registers for on a multiprocessor.
    """

    H: int
    W: int
    K: int
    group: int
    channels: int
    threads: int
    blocks: int
    keeps: int

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
    def groups(self) -> int:
        """Groups of a block."""
        return self.channels // self.group

    @property
    def kept(self) -> int:
        """Floats of shared memory that items stay in: pixel by pixel of the tile, so that neighbouring lanes have neighbouring accesses."""
        return self.items * QUAD * PIXELS * self.keeps

    @property
    def moments(self) -> int:
        """Floats of shared memory that warps' statistics of groups lie in, behind the items."""
        return MOMENTS * self.groups * (self.threads // WARP)

    @property
    def shared_bytes(self) -> int:
        """Items, statistics, and of every group its first value and s."""
        return 4 * (self.kept + self.moments + 2 * self.groups)


@cache
def _transforming(slab: Slab, stores: bool) -> Any:
    """Device function (memory, sums, z, values, b, tid, image, n, c, tiles) -> items: makes the thread's items, to z if `stores`, and keeps them.

    sums: for each of the thread's channels a lead (its first value), Σ (x − lead), Σ (x − lead)².
    """
    H, W, K, QUADS, TILES, ITEMS, THREADS = slab.H, slab.W, slab.K, slab.quads, slab.tiles, slab.items, slab.threads
    ACROSS, KEEPS, STORES, make = slab.W // 2, slab.keeps, stores, output_tile("winograd", True)
    FLOATS = QUAD * PIXELS

    @jit(device=True)
    def run(memory, sums, z, values, b, tid, image, n, c, tiles):
        out = cuda.local.array(FLOATS, f4)
        for i in range(MOMENTS * QUAD):
            sums[i] = 0.0
        item = tid
        while item < ITEMS:
            tile = item // QUADS
            make(out, values, b, image * TILES + tile, c // QUAD, tiles, K // QUAD)
            if STORES:
                # 2·line rows of W pixels, then 2·across pixels, with tile = line·W/2 + across.
                pixel0 = 2 * (tile + tile // ACROSS * ACROSS)
                at = (n * (H * W) + pixel0) * K + c
                for p in range(PIXELS):
                    store4(z, at + (p // 2 * W + p % 2) * K, out[4 * p], out[4 * p + 1], out[4 * p + 2], out[4 * p + 3])
            if KEEPS:
                for p in range(PIXELS):
                    shared_store4(memory, item * QUAD + QUAD * ITEMS * p, out[4 * p], out[4 * p + 1], out[4 * p + 2], out[4 * p + 3])
            for q in range(QUAD):
                sums[q] = out[q] if item == tid else sums[q]
                for p in range(PIXELS):
                    away = out[QUAD * p + q] - sums[q]
                    sums[QUAD + q] += away
                    sums[2 * QUAD + q] += away * away
            item += THREADS
        return (item - tid) // THREADS

    return run


@cache
def _merging(slab: Slab, stores: bool) -> Any:
    """Device function (memory, shift, std, tid, at, eps): s of the block's groups to `memory`; shift, std from `at` on if `stores`.

    A warp takes a group, a lane what one warp knows of it: Chan's formula.
    """
    GROUPS, WARPS, STORES, FIRST, LEADS = slab.groups, slab.threads // WARP, stores, slab.kept, slab.kept + slab.moments
    ALL, COUNT, TURNS, SCALES = GROUPS * WARPS, slab.group * slab.H * slab.W, -(-GROUPS // WARPS), LEADS + slab.groups
    across = sum_over(WARP - 1)

    @jit(device=True)
    def run(memory, shift, std, tid, at, eps):
        warp, lane = tid // WARP, tid & WARP - 1
        for round in range(TURNS):
            group = warp + round * WARPS
            own, squares, count = 0.0, 0.0, 0.0
            if lane < WARPS and group < GROUPS:
                of = u4(FIRST + group * WARPS + lane)
                own, squares, count = memory[of], memory[ALL + of], memory[2 * ALL + of]
            mean = across(own * count) * 1 / COUNT
            away = own - mean
            s = math.sqrt(across(squares + count * away * away) * 1 / COUNT + eps)
            if lane == 0 and group < GROUPS:
                memory[SCALES + group] = s
                if STORES:
                    shift[at + group], std[at + group] = mean - memory[LEADS + group], s

    return run


@cache
def _normalising(slab: Slab, s0: bool) -> Any:
    """Device function (memory, y, tid, n, c, factors, plus, slopes, scales, leasts): y of the thread's items, of what it has kept.

    y = factor·x·σ(…) + plus with 2^(slope·x) for S0, else factor·x/max(least, slope·x + scale) + plus.
    """
    H, W, K, QUADS, ITEMS, THREADS, ACROSS, S0 = slab.H, slab.W, slab.K, slab.quads, slab.items, slab.threads, slab.W // 2, s0

    def one(p: int) -> Any:
        BEHIND, FROM = (p // 2 * W + p % 2) * K, QUAD * ITEMS * p

        @jit(device=True)
        def run(memory, y, item, at, factors, plus, slopes, scales, leasts):
            made = cuda.local.array(QUAD, f4)
            x = shared_load4(memory, item * QUAD + FROM)
            for q in range(QUAD):
                if S0:
                    made[q] = factors[q] * x[q] * reciprocal(1.0 + exp2(slopes[q] * x[q])) + plus[q]
                else:
                    made[q] = factors[q] * (x[q] * reciprocal(larger(leasts[q], slopes[q] * x[q] + scales[q]))) + plus[q]
            store4(y, at + BEHIND, made[0], made[1], made[2], made[3])

        return run

    pixels = unrolled([one(p) for p in range(PIXELS)])

    @jit(device=True)
    def run(memory, y, tid, n, c, factors, plus, slopes, scales, leasts):
        item = tid
        while item < ITEMS:
            tile = item // QUADS
            pixel0 = 2 * (tile + tile // ACROSS * ACROSS)
            pixels(memory, y, item, (n * (H * W) + pixel0) * K + c, factors, plus, slopes, scales, leasts)
            item += THREADS

    return run


@cache
def image_norm_kernel(slab: Slab, epilogue: str) -> Any:
    """The kernel of one slab and epilogue. Raises ValueError if the epilogue normalises what the slab does not keep."""
    STORES, NORMALISES, S0, RUNS = epilogue in ("s0", "planes"), epilogue != "planes", epilogue in ("s0", "s0 infer"), epilogue == "b0 infer"
    if bool(slab.keeps) != NORMALISES:
        raise ValueError(f"a slab that keeps {slab.kept} floats for a kernel whose epilogue is {epilogue}")
    make, join, normalise = _transforming(slab, STORES), _merging(slab, STORES), _normalising(slab, S0)
    spread = spreading(slab.channels, slab.group, slab.threads, slab.kept)
    QUADS, CHANNELS, GROUP, SLABS, SUMS = slab.quads, slab.channels, slab.group, slab.K // slab.channels, MOMENTS * QUAD
    GROUPS_OF_IMAGE, LEADS, SCALES = slab.K // slab.group, slab.kept + slab.moments, slab.kept + slab.moments + slab.groups

    @jit(launch_bounds=(slab.threads, slab.blocks))
    def winograd_image_norm_kernel(values, b, gamma, beta, v, running, z, y, shift, std, first, tiles, eps):
        """z = Aᵀ m A + b of values[position][t][k]; y = γ·z·σ(v·z)/s + β or γ·z/max(√(running + eps), v·z + s) + β; shift, std of every group.

        grid images · K/channels, block up to 640; owns: a block `channels` of the image first + …, a thread a quad of them of every few tiles
        shared 4 bytes a pixel and channel where y is made, 12 a group and warp; moves 4·(4 + 1)·H·W·K bytes an image, 4·H·W·K more with z and y
        needs whole groups in a block. source: arXiv:1509.09308, arXiv:2004.02967
        """
        memory = cuda.shared.array(0, f4)  # the only shared array, so that it begins where accesses of 16 bytes may
        sums = cuda.local.array(SUMS, f4)
        tid, block = cuda.threadIdx.x, cuda.blockIdx.x
        image = block // SLABS
        c0 = (block - image * SLABS) * CHANNELS
        quad = tid & QUADS - 1
        n, c = first + image, c0 + quad * QUAD
        items = make(memory, sums, z, values, b, tid, image, n, c, tiles)
        if STORES and tid < QUADS:
            # The image's first pixel, and of its channels those that begin a group.
            for q in range(QUAD):
                own = quad * QUAD + q
                group = own // GROUP
                if own == group * GROUP:
                    memory[LEADS + group] = sums[q]
        spread(memory, sums, items, tid)
        cuda.syncthreads()
        join(memory, shift, std, tid, n * GROUPS_OF_IMAGE + c0 // GROUP, eps)
        if NORMALISES:
            scales = cuda.local.array(QUAD, f4)
            factors = cuda.local.array(QUAD, f4)
            slopes = cuda.local.array(QUAD, f4)
            leasts = cuda.local.array(QUAD, f4)
            gammas, plus, vs = load4(gamma, c), load4(beta, c), load4(v, c)
            of_batch = load4(running, c) if RUNS else vs
            cuda.syncthreads()
            for q in range(QUAD):
                scales[q] = memory[SCALES + (quad * QUAD + q) // GROUP]
                factors[q] = divide(gammas[q], scales[q]) if S0 else gammas[q]
                slopes[q] = vs[q] * -LOG2E if S0 else vs[q]
                leasts[q] = math.sqrt(of_batch[q] + eps) if RUNS else 0.0
            normalise(memory, y, tid, n, c, factors, plus, slopes, scales, leasts)

    return winograd_image_norm_kernel
