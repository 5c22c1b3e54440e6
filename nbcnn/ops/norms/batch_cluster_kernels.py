"""The kernels of batch_cluster.py: batch normalisation and its gradients, by clusters of blocks that hold their channels in shared memory.

Block `rank` of a cluster has pixels rank·⌈M/CLUSTER⌉ … of CHANNELS neighbouring channels. A thread has 16 bytes of every ROWS-th of them, which it
alone reads again, from where the threads of a warp lie side by side. In shared memory, in this order:

    2·CHANNELS          what the block gives to its cluster
    4·CHANNELS          numbers of every channel, from which y or dx is made
    2·CHANNELS·warps    sums of every warp
    the pixels          of a thread one after the other, THREADS·16 bytes apart; of the gradients g (or dy) before x

Sums are added over the lanes of a warp, over the warps, and over the ranks, always in the same order: the bits do not depend on timing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, types, u4
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.share import floats_io
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.norms.batch_backward import gradient_of
from nbcnn.ops.ptx import cvt, vector
from nbcnn.ops.ptx.cluster import cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load_of_block
from nbcnn.ops.ptx.shuffle import WARP

ALL_LANES = 0xFFFFFFFF
LEAN = ("", "relu", "relu6")
"""Activations of a few instructions; beside the others a thread has fewer loads in flight, so that all stay in registers."""


@dataclass(frozen=True)
class Tile:
    """A block has `rows` × `columns` threads, of 16 bytes of a pixel each; a cluster has `cluster` blocks."""

    columns: int
    rows: int
    cluster: int

    @property
    def threads(self) -> int:
        return self.columns * self.rows


@dataclass(frozen=True)
class Layout:
    """A block's shared memory: the elements of a tensor that it holds, and the bytes of all."""

    held: int
    nbytes: int


def layout_of(tile: Tile, width: int, pixels: int, tensors: int) -> Layout:
    """The shared memory of a block with so many pixels of `tensors` tensors, 16 bytes of which are `width` channels."""
    held = ceil_div(pixels, tile.rows) * tile.threads * width
    return Layout(held, 4 * _floats(tile, width) + 16 // width * held * tensors)


def _floats(tile: Tile, width: int) -> int:
    """Numbers in front of the pixels."""
    return 2 * tile.columns * width * (3 + tile.threads // WARP)


@cache
def words_io(kind: str) -> tuple[Any, ...]:
    """Device functions that move 16 bytes, as four words of a local array from element `at` on, and what they are stored and worded as.

    read(array, i, words, at), write(array, i, words, at): of a device array. put, get: of a shared one. floats(words, at, into): as float32,
    4 or 8 of them. rounded(values, words, at): the reverse.
    """
    if kind == "bfloat16":

        @jit(device=True)
        def read(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.load_bf16x8(array, i)

        @jit(device=True)
        def write(array, i, words, at):
            vector.store_bf16x8(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def get(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.shared_load_bf16x8(array, i)

        @jit(device=True)
        def put(array, i, words, at):
            vector.shared_store_bf16x8(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def floats(words, at, into):
            for k in range(4):
                into[2 * k], into[2 * k + 1] = cvt.bf16_low(words[at + k]), cvt.bf16_high(words[at + k])

        @jit(device=True)
        def rounded(values, words, at):
            for k in range(4):
                words[at + k] = cvt.bf16x2(values[2 * k], values[2 * k + 1])

        return read, write, get, put, floats, rounded, types.uint16, u4

    tf32 = kind == "tfloat32"

    @jit(device=True)
    def read(array, i, words, at):
        words[at], words[at + 1], words[at + 2], words[at + 3] = vector.load4(array, i)

    @jit(device=True)
    def write(array, i, words, at):
        vector.store4(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

    @jit(device=True)
    def get(array, i, words, at):
        words[at], words[at + 1], words[at + 2], words[at + 3] = vector.shared_load4(array, i)

    @jit(device=True)
    def put(array, i, words, at):
        vector.shared_store4(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

    @jit(device=True)
    def floats(words, at, into):
        for k in range(4):
            into[k] = words[at + k]

    @jit(device=True)
    def rounded(values, words, at):
        for k in range(4):
            words[at + k] = cvt.tf32(values[k]) if tf32 else values[k]

    return read, write, get, put, floats, rounded, f4, f4


@cache
def over_lanes(count: int, step: int) -> Any:
    """Device function (sums, lane): adds `count` sums over the lanes whose numbers differ in bits from `step` on.

    With every step a lane gives half of what it has left to the lane across and keeps the other half: sums[0], … at last, from the sum on whose
    number has, for every bit of the lane, half of what was left then.
    """
    if step == WARP:

        @jit(device=True)
        def nothing(sums, lane):
            pass

        return nothing
    HALF, STEP, rest = count // 2, step, over_lanes(max(count // 2, 1), 2 * step)

    @jit(device=True)
    def add(sums, lane):
        if HALF == 0:
            sums[0] += cuda.shfl_xor_sync(ALL_LANES, sums[0], STEP)
        else:
            upper = lane & STEP
            for k in range(HALF):
                give = sums[k] if upper else sums[HALF + k]
                keep = sums[HALF + k] if upper else sums[k]
                sums[k] = keep + cuda.shfl_xor_sync(ALL_LANES, give, STEP)
        rest(sums, lane)

    return add


@cache
def block_sums(tile: Tile, width: int) -> tuple[Any, Any]:
    """Device functions gather(memory, sums), which all threads call with 2·width sums each, and behind it total(memory, i): the i-th of the block.

    Sums 0 … width − 1 of a thread are the first CHANNELS of the block, the others the second.
    """
    WIDTH, COLUMNS, CHANNELS, WARPS = width, tile.columns, width * tile.columns, tile.threads // WARP
    STEPS, COUNT = (WARP // tile.columns).bit_length() - 1, 2 * width
    KEPT, AT = max(COUNT >> STEPS, 1), 6 * width * tile.columns
    add = over_lanes(COUNT, tile.columns)

    @jit(device=True)
    def gather(memory, sums):
        tid = cuda.threadIdx.x
        lane = tid & WARP - 1
        column, first = tid & COLUMNS - 1, 0
        add(sums, lane)
        for k in range(STEPS):
            first += COUNT >> k + 1 if lane & COLUMNS << k else 0
        for k in range(KEPT):
            which = (first + k) // WIDTH
            q = first + k - which * WIDTH
            memory[AT + tid // WARP * 2 * CHANNELS + which * CHANNELS + column * WIDTH + q] = sums[k]
        cuda.syncthreads()

    @jit(device=True)
    def total(memory, i):
        value = 0.0
        for w in range(WARPS):
            value += memory[AT + w * 2 * CHANNELS + i]
        return value

    return gather, total


@jit(device=True)
def _same(value):
    return value


@cache
def fprop_kernel(kind: str, tile: Tile, activation: str, plus: bool) -> Any:
    """`activation`: what y is made by at last, "" for none. `plus`: `other` is added before."""
    read, write, get, put, floats, rounded, STORED, WORD = words_io(kind)
    WIDTH, COLUMNS, ROWS, CLUSTER, THREADS = 8 if kind == "bfloat16" else 4, tile.columns, tile.rows, tile.cluster, tile.threads
    CHANNELS, SUMS, STRIDE = WIDTH * COLUMNS, 2 * WIDTH, WIDTH * THREADS
    NUMBERS, BEGIN = 2 * CHANNELS, _floats(tile, WIDTH) * WIDTH // 4
    (load_one, _), (gather, total), load_floats = scalar_io(kind), block_sums(tile, WIDTH), shared_floats(WIDTH)
    function = ACTIVATIONS[activation].function if activation else _same
    # x alone is read in the first pass; in the second no activation has more than two pixels to wait for, but loads of `other` have.
    FLIGHT, AGAIN = 8, 4 if plus else 2
    WORDS, WORDS_AGAIN = 4 * FLIGHT, 4 * AGAIN

    @jit(device=True)
    def take(words, at, values, leads, sums):
        floats(words, at, values)
        for q in range(WIDTH):
            away = values[q] - leads[q]
            sums[q] += away
            sums[WIDTH + q] += away * away

    @jit(device=True)
    def make(words, extra, at, values, others, means, factors, biases):
        floats(words, at, values)
        if plus:
            floats(extra, at, others)
        for q in range(WIDTH):
            value = (values[q] - means[q]) * factors[q] + biases[q]
            if plus:
                value += others[q]
            values[q] = function(value)
        rounded(values, words, at)

    @jit(launch_bounds=(THREADS, 512 // THREADS), cluster=CLUSTER)
    def batchnorm_cluster_fprop_kernel(x, other, weight, bias, y, mean, rstd, running_mean, running_var, M, C, pixels, held, eps, momentum):
        """y = f((x − mean)·(weight·rstd) + bias), or plus `other` inside f; mean, rstd = 1/√(variance + eps) and running statistics.

        A block sums distances from its first pixel, which is one of its values, so a variance loses no digits to a large mean; blocks are joined by
        Chan's formula. That is as exact as batch_forward.py's three launches and needs one pass and one exchange, where a mean first and squares
        behind it need two of each.
        grid CLUSTER·C/CHANNELS, block 256 or 512; owns: a cluster CHANNELS channels, a block ⌈M/CLUSTER⌉ pixels, a thread 16 bytes of every ROWS-th.
        shared: the block's x as it is stored, and 32 to 152 bytes a channel; moves 8·x bytes, 12·x with `other`.
        source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        memory = cuda.shared.array(0, f4)
        kept = cuda.shared.array(0, STORED)
        words = cuda.local.array(WORDS, WORD)
        again = cuda.local.array(WORDS_AGAIN, WORD)
        extra = cuda.local.array(WORDS_AGAIN, WORD)
        values = cuda.local.array(WIDTH, f4)
        others = cuda.local.array(WIDTH, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        of_ranks = cuda.local.array(CLUSTER, f4)
        squares_of_ranks = cuda.local.array(CLUSTER, f4)
        tid, rank = cuda.threadIdx.x, cluster_rank()
        row = tid // COLUMNS
        channel = cuda.blockIdx.x // CLUSTER * CHANNELS
        c = channel + (tid - row * COLUMNS) * WIDTH
        own = channel + min(tid, CHANNELS - 1)
        first = rank * pixels
        last = min(first + pixels, M)
        near = min(first, M - 1) * C
        lead, factor, offset = load_one(x, near + own), weight[own], bias[own]
        read(x, near + c, words, 0)
        floats(words, 0, means)
        for k in range(SUMS):
            sums[k] = 0.0
        m, at = first + row, BEGIN + tid * WIDTH
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                read(x, (m + j * ROWS) * C + c, words, 4 * j)
            for j in range(FLIGHT):
                put(kept, at + j * STRIDE, words, 4 * j)
                take(words, 4 * j, values, means, sums)
            m += FLIGHT * ROWS
            at += FLIGHT * STRIDE
        while m < last:
            read(x, m * C + c, words, 0)
            put(kept, at, words, 0)
            take(words, 0, values, means, sums)
            m += ROWS
            at += STRIDE
        gather(memory, sums)
        if tid < CHANNELS:
            away, squares = total(memory, tid), total(memory, CHANNELS + tid)
            middle = away / max(last - first, 1)
            memory[tid] = lead + middle
            memory[CHANNELS + tid] = max(squares - away * middle, 0.0)
        cuda.syncthreads()
        cluster_arrive()
        cluster_wait()
        middle, variance, scale = 0.0, 0.0, 0.0
        if tid < CHANNELS:
            for r in range(CLUSTER):
                of_ranks[r], squares_of_ranks[r] = load_of_block(memory, tid, r), load_of_block(memory, CHANNELS + tid, r)
            for r in range(CLUSTER):
                middle += max(min(pixels, M - r * pixels), 0) * (of_ranks[r] - of_ranks[0])
            middle = of_ranks[0] + middle / M
            for r in range(CLUSTER):
                away = of_ranks[r] - middle
                variance += squares_of_ranks[r] + max(min(pixels, M - r * pixels), 0) * away * away
            variance = variance / M
            scale = 1.0 / math.sqrt(variance + eps)
            memory[NUMBERS + tid], memory[NUMBERS + CHANNELS + tid], memory[NUMBERS + 2 * CHANNELS + tid] = middle, factor * scale, offset
        cuda.syncthreads()
        cluster_arrive_relaxed()
        numbers = NUMBERS + c - channel
        load_floats(memory, numbers, means)
        load_floats(memory, numbers + CHANNELS, factors)
        load_floats(memory, numbers + 2 * CHANNELS, biases)
        m, at = first + row, BEGIN + tid * WIDTH
        while m + (AGAIN - 1) * ROWS < last:
            for j in range(AGAIN):
                get(kept, at + j * STRIDE, again, 4 * j)
                if plus:
                    read(other, (m + j * ROWS) * C + c, extra, 4 * j)
            for j in range(AGAIN):
                make(again, extra, 4 * j, values, others, means, factors, biases)
                write(y, (m + j * ROWS) * C + c, again, 4 * j)
            m += AGAIN * ROWS
            at += AGAIN * STRIDE
        while m < last:
            get(kept, at, again, 0)
            if plus:
                read(other, m * C + c, extra, 0)
            make(again, extra, 0, values, others, means, factors, biases)
            write(y, m * C + c, again, 0)
            m += ROWS
            at += STRIDE
        if rank == 0 and tid < CHANNELS:
            mean[own], rstd[own] = middle, scale
            running_mean[own] = (1.0 - momentum) * running_mean[own] + momentum * middle
            running_var[own] = (1.0 - momentum) * running_var[own] + momentum * variance * (M / max(M - 1, 1))
        # A block stays as long as another reads its sums.
        cuda.syncthreads()
        cluster_wait()

    return batchnorm_cluster_fprop_kernel


@cache
def shared_floats(width: int) -> Any:
    """Device function (memory, i, into): `width` float32 of shared memory, four at a time."""
    WIDTH = width

    @jit(device=True)
    def load(memory, i, into):
        for q in range(0, WIDTH, 4):
            into[q], into[q + 1], into[q + 2], into[q + 3] = vector.shared_load4(memory, i + q)

    return load


@cache
def grads_kernel(kind: str, tile: Tile, activation: str, masked: bool, two: bool) -> Any:
    """`activation`: the one behind the norm, whose input is made of x once more; "": none. `masked`: a ReLU, where y says what passes, and dz keeps
    that. `two`: dy is the sum of two gradients, of which `more` is the second.
    """
    read, write, get, put, floats, rounded, STORED, WORD = words_io(kind)
    WIDTH, COLUMNS, ROWS, CLUSTER, THREADS = 8 if kind == "bfloat16" else 4, tile.columns, tile.rows, tile.cluster, tile.threads
    CHANNELS, SUMS, STRIDE = WIDTH * COLUMNS, 2 * WIDTH, WIDTH * THREADS
    NUMBERS, BEGIN = 2 * CHANNELS, _floats(tile, WIDTH) * WIDTH // 4
    (gather, total), load_floats, (load_channels, _) = block_sums(tile, WIDTH), shared_floats(WIDTH), floats_io(WIDTH)
    of_x, of_y, gradient = bool(activation), masked, gradient_of(activation)
    FLIGHT, AGAIN = 2 if masked or activation not in LEAN else 4, 2
    WORDS, WORDS_AGAIN = 4 * FLIGHT, 4 * AGAIN

    @jit(device=True)
    def take(words, x_words, y_words, more_words, at, grads, values, others, means, factors, biases, sums):
        floats(words, at, grads)
        if two:
            floats(more_words, at, others)
            for q in range(WIDTH):
                grads[q] += others[q]
        floats(x_words, at, values)
        if of_y:
            floats(y_words, at, others)
        for q in range(WIDTH):
            away, g = values[q] - means[q], grads[q]
            if of_x:
                g = gradient(g, away * factors[q] + biases[q])
            if of_y:
                g = 0.0 if others[q] <= 0.0 else g
                grads[q] = g
            sums[q] += g
            sums[WIDTH + q] += g * away
        if of_y:
            rounded(grads, words, at)

    @jit(device=True)
    def make(words, x_words, at, grads, values, means, factors, biases, slopes, offsets):
        floats(words, at, grads)
        floats(x_words, at, values)
        for q in range(WIDTH):
            away = values[q] - means[q]
            g = gradient(grads[q], away * factors[q] + biases[q]) if of_x else grads[q]
            values[q] = factors[q] * ((g - offsets[q]) - away * slopes[q])
        rounded(values, x_words, at)

    @jit(launch_bounds=(THREADS, 512 // THREADS), cluster=CLUSTER)
    def batchnorm_cluster_grads_kernel(dy, more, x, y, weight, bias, mean, rstd, dx, dz, dweight, dbias, M, C, pixels, held):
        """dbias = Σ g, dweight = rstd·Σ g·(x − mean), dx = weight·rstd·(g − dbias/M − (x − mean)·rstd·dweight/M); g: dy behind the activation; dz = g.

        grid CLUSTER·C/CHANNELS, block 256 or 512; owns: a cluster CHANNELS channels, a block ⌈M/CLUSTER⌉ pixels, a thread 16 bytes of every ROWS-th.
        shared: the block's x and dy (of a ReLU dz) as they are stored, and 32 to 152 bytes a channel; moves 12·x bytes, 20·x where it reads y and
        writes dz, 24·x with `more`. dz is written at last, so that no block waits for its stores at the cluster's barrier. source: S. Ioffe, C. Szegedy, arXiv:1502.03167.
        """
        memory = cuda.shared.array(0, f4)
        kept = cuda.shared.array(0, STORED)
        words = cuda.local.array(WORDS, WORD)
        x_words = cuda.local.array(WORDS, WORD)
        y_words = cuda.local.array(WORDS, WORD)
        more_words = cuda.local.array(WORDS, WORD)
        again = cuda.local.array(WORDS_AGAIN, WORD)
        x_again = cuda.local.array(WORDS_AGAIN, WORD)
        grads = cuda.local.array(WIDTH, f4)
        values = cuda.local.array(WIDTH, f4)
        others = cuda.local.array(WIDTH, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        slopes = cuda.local.array(WIDTH, f4)
        offsets = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        tid, rank = cuda.threadIdx.x, cluster_rank()
        row = tid // COLUMNS
        channel = cuda.blockIdx.x // CLUSTER * CHANNELS
        c = channel + (tid - row * COLUMNS) * WIDTH
        own = channel + min(tid, CHANNELS - 1)
        first = rank * pixels
        last = min(first + pixels, M)
        scale, factor = rstd[own], weight[own]
        load_channels(mean, c, means)
        if of_x:
            load_channels(bias, c, biases)
            load_channels(weight, c, factors)
            load_channels(rstd, c, slopes)
            for q in range(WIDTH):
                factors[q] *= slopes[q]
        for k in range(SUMS):
            sums[k] = 0.0
        m, at = first + row, BEGIN + tid * WIDTH
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                i = (m + j * ROWS) * C + c
                read(dy, i, words, 4 * j)
                if two:
                    read(more, i, more_words, 4 * j)
                read(x, i, x_words, 4 * j)
                if of_y:
                    read(y, i, y_words, 4 * j)
            for j in range(FLIGHT):
                put(kept, at + held + j * STRIDE, x_words, 4 * j)
                take(words, x_words, y_words, more_words, 4 * j, grads, values, others, means, factors, biases, sums)
                put(kept, at + j * STRIDE, words, 4 * j)
            m += FLIGHT * ROWS
            at += FLIGHT * STRIDE
        while m < last:
            i = m * C + c
            read(dy, i, words, 0)
            if two:
                read(more, i, more_words, 0)
            read(x, i, x_words, 0)
            if of_y:
                read(y, i, y_words, 0)
            put(kept, at + held, x_words, 0)
            take(words, x_words, y_words, more_words, 0, grads, values, others, means, factors, biases, sums)
            put(kept, at, words, 0)
            m += ROWS
            at += STRIDE
        gather(memory, sums)
        if tid < 2 * CHANNELS:
            memory[tid] = total(memory, tid)
        cuda.syncthreads()
        cluster_arrive()
        cluster_wait()
        plain, centred = 0.0, 0.0
        if tid < CHANNELS:
            for r in range(CLUSTER):
                plain += load_of_block(memory, tid, r)
                centred += load_of_block(memory, CHANNELS + tid, r)
            centred *= scale
            memory[NUMBERS + tid], memory[NUMBERS + CHANNELS + tid] = factor * scale, plain / M
            memory[NUMBERS + 2 * CHANNELS + tid] = scale * centred / M
        cuda.syncthreads()
        cluster_arrive_relaxed()
        numbers = NUMBERS + c - channel
        load_floats(memory, numbers, factors)
        load_floats(memory, numbers + CHANNELS, offsets)
        load_floats(memory, numbers + 2 * CHANNELS, slopes)
        m, at = first + row, BEGIN + tid * WIDTH
        while m + (AGAIN - 1) * ROWS < last:
            for j in range(AGAIN):
                get(kept, at + j * STRIDE, again, 4 * j)
                get(kept, at + held + j * STRIDE, x_again, 4 * j)
            for j in range(AGAIN):
                make(again, x_again, 4 * j, grads, values, means, factors, biases, slopes, offsets)
                write(dx, (m + j * ROWS) * C + c, x_again, 4 * j)
                if of_y:
                    write(dz, (m + j * ROWS) * C + c, again, 4 * j)
            m += AGAIN * ROWS
            at += AGAIN * STRIDE
        while m < last:
            get(kept, at, again, 0)
            get(kept, at + held, x_again, 0)
            make(again, x_again, 0, grads, values, means, factors, biases, slopes, offsets)
            write(dx, m * C + c, x_again, 0)
            if of_y:
                write(dz, m * C + c, again, 0)
            m += ROWS
            at += STRIDE
        if rank == 0 and tid < CHANNELS:
            dbias[own], dweight[own] = plain, centred
        # A block stays as long as another reads its sums.
        cuda.syncthreads()
        cluster_wait()

    return batchnorm_cluster_grads_kernel
