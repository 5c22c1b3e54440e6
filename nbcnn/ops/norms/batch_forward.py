"""The forward kernels of batch normalisation (batch.py): `moments` of every chunk, `statistics` of the channels from these, `apply`.

What a block and a thread have of the batch says share.py. `apply` walks through the batch from its end: what the kernel before it read or wrote last
is then still in the second-level cache (63 MB of an H200, 50 of an H100), and what it writes last is what the next one reads first.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel.share import IN_FLIGHT, Share, floats_io, lanes_io, place_of, rows_sum, taking
from nbcnn.ops.norms.plane import column_sum, not_negative, rstd_of

CHANNEL_THREADS = 8 if SIMULATOR else 256
"""Threads of a block that adds the partials of one channel."""


def flight_of(share: Share, short: bool) -> int:
    """Pixels that a thread loads before it uses the first: fewer of eight channels whose activation is not short, so that all stay in registers."""
    return IN_FLIGHT if share.width < 8 or short else IN_FLIGHT // 2


@cache
def moments_kernel(kind: str, share: Share, dense: bool = True) -> Any:
    """`dense`: x is no part of a larger image, and has a register less than one that is."""
    (load, _), place, add = lanes_io(kind, share.width), place_of(share.last), rows_sum(share, 2 * share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLOATS, SUMS, MEMORY = IN_FLIGHT * share.width, 2 * share.width, 2 * share.width * share.threads

    @jit(device=True)
    def take(values, at, leads, sums):
        for q in range(WIDTH):
            away = values[at + q] - leads[q]
            sums[q] += away
            sums[WIDTH + q] += away * away

    @jit(launch_bounds=(THREADS, 2))
    def batchnorm_moments_kernel(x, partials, M, C, HW, chunk, x_channels):
        """partials (2,C,chunks) = the mean and Σ (x − mean)² of every channel of the block's chunk of pixels.

        The sums are of distances from the chunk's first pixel, which is one of its values: so a variance loses no digits to a large mean.
        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, per thread `width` channels of every ROWS-th pixel of it.
        x is a part of `x_channels` channels, or all of them.
        shared 8·width bytes per thread; moves 4·x bytes, once.
        source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        x_channels = C if dense else x_channels
        memory = cuda.shared.array(MEMORY, f4)
        values = cuda.local.array(FLOATS, f4)
        leads = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        tid, block, chunks = cuda.threadIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        first = block * chunk
        last = min(first + chunk, M)
        for k in range(SUMS):
            sums[k] = 0.0
        load(x, place(first, near, x_channels, HW), leads, 0)
        m = first + row
        while m + (IN_FLIGHT - 1) * ROWS < last:
            for j in range(IN_FLIGHT):
                load(x, place(m + j * ROWS, near, x_channels, HW), values, j * WIDTH)
            for j in range(IN_FLIGHT):
                take(values, j * WIDTH, leads, sums)
            m += IN_FLIGHT * ROWS
        while m < last:
            load(x, place(m, near, x_channels, HW), values, 0)
            take(values, 0, leads, sums)
            m += ROWS
        add(memory, sums)
        if row == 0 and c < C:
            count = last - first
            for q in range(WIDTH):
                total, squares = memory[q * THREADS + tid], memory[(WIDTH + q) * THREADS + tid]
                away = total / count
                partials[(c + q) * chunks + block] = leads[q] + away
                partials[(C + c + q) * chunks + block] = not_negative(squares - total * away)

    return batchnorm_moments_kernel


@cache
def over_chunks(threads: int) -> Any:
    """Device function (values, partials, c, M, C, chunk, chunks): the mean and the variance of channel c from its chunks' (Chan's formula).

    values: shared, one float32 per thread. All threads of the block call it.
    """
    in_block = column_sum(1, threads)
    THREADS = threads

    @jit(device=True)
    def join(values, partials, c, M, C, chunk, chunks):
        lead, total = partials[c * chunks], 0.0
        for b in range(cuda.threadIdx.x, chunks, THREADS):
            total += min(chunk, M - b * chunk) * (partials[c * chunks + b] - lead)
        offset = in_block(values, total) / M
        total = 0.0
        for b in range(cuda.threadIdx.x, chunks, THREADS):
            away = partials[c * chunks + b] - lead - offset
            total += partials[(C + c) * chunks + b] + min(chunk, M - b * chunk) * away * away
        return lead + offset, in_block(values, total) / M

    return join


@cache
def statistics_kernel() -> Any:
    THREADS = CHANNEL_THREADS
    join = over_chunks(THREADS)

    @jit()
    def batchnorm_statistics_kernel(partials, mean, rstd, running_mean, running_var, M, C, chunk, chunks, eps, momentum):
        """mean, rstd = 1/√(variance + eps) of every channel; running ← (1 − momentum)·running + momentum·(of the batch, the variance unbiased).

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 8·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        c = cuda.blockIdx.x
        middle, variance = join(values, partials, c, M, C, chunk, chunks)
        if cuda.threadIdx.x == 0:
            mean[c] = middle
            rstd[c] = rstd_of(variance + eps)
            running_mean[c] = (1.0 - momentum) * running_mean[c] + momentum * middle
            running_var[c] = (1.0 - momentum) * running_var[c] + momentum * variance * (M / max(M - 1, 1))

    return batchnorm_statistics_kernel


@cache
def part_kernel() -> Any:
    THREADS = CHANNEL_THREADS
    join = over_chunks(THREADS)

    @jit()
    def batchnorm_part_kernel(partials, parts, M, C, chunk, chunks, ranks, rank, images):
        """parts[rank] = (images, mean, variance) of every channel of this rank's part of the batch, 0 in the other ranks' rows.

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 8·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        middle, variance = join(values, partials, c, M, C, chunk, chunks)
        for row in range(tid, ranks * 3, THREADS):
            which, value = row - row // 3 * 3, 0.0
            if row // 3 == rank:
                value = variance if which == 2 else middle if which == 1 else images
            parts[row * C + c] = value

    return batchnorm_part_kernel


@cache
def together_kernel() -> Any:
    @jit()
    def batchnorm_together_kernel(parts, mean, rstd, running_mean, running_var, ranks, C, HW, eps, momentum):
        """mean, rstd of every channel of the batch of all ranks, and running statistics, from every rank's row of `parts`.

        Chan's formula: mean = Σ n_r·mean_r / n, variance = Σ n_r·(variance_r + (mean_r − mean)²) / n; the same bits on every rank.
        grid ⌈C/256⌉, block 256; owns: one thread per channel; shared none; moves 12·ranks·C bytes.
        """
        c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if c < C:
            lead, images, middle = parts[C + c], 0.0, 0.0
            for rank in range(0, ranks):
                row = rank * 3 * C + c
                images += parts[row]
                middle += parts[row] * (parts[row + C] - lead)
            middle = lead + middle / images
            variance = 0.0
            for rank in range(0, ranks):
                row = rank * 3 * C + c
                away = parts[row + C] - middle
                variance += parts[row] * (parts[row + 2 * C] + away * away)
            variance = variance / images
            m = images * HW
            mean[c] = middle
            rstd[c] = rstd_of(variance + eps)
            running_mean[c] = (1.0 - momentum) * running_mean[c] + momentum * middle
            running_var[c] = (1.0 - momentum) * running_var[c] + momentum * variance * (m / max(m - 1.0, 1.0))

    return batchnorm_together_kernel


@cache
def apply_kernel(
    kind: str,
    share: Share,
    function: Any,
    plus: bool,
    infer: bool,
    grouped: bool = False,
    affine: bool = True,
    short: bool = True,
    dense: bool = True,
) -> Any:
    """`function`: the device function that makes y at last; `short`: of few instructions. `plus`: `other` is added before. `infer`: `spread` holds
    variances instead of 1/deviation. `grouped`: statistics are of groups (`statistic_of_group`). `affine`: there are weight and bias.
    `dense`: neither x nor y is a part of a larger image.
    """
    (load, store), place, take = lanes_io(kind, share.width), place_of(share.last), taking(share.width, grouped)
    load_floats, _ = floats_io(share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLIGHT = flight_of(share, short)
    FLOATS = FLIGHT * share.width

    @jit(device=True)
    def make(values, others, at, means, factors, biases):
        for q in range(WIDTH):
            value = (values[at + q] - means[q]) * factors[q] + biases[q]
            if plus:
                value += others[at + q]
            values[at + q] = function(value)

    @jit(launch_bounds=(THREADS, 2))
    def batchnorm_apply_kernel(x, other, weight, bias, mean, spread, y, M, C, HW, chunk, group, eps, x_channels, y_channels):
        """y = f((x − mean)·(weight·rstd) + bias), or plus `other` inside f.

        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, the last ones first, per thread `width` channels of every
        ROWS-th pixel of it. x and y are parts of `x_channels` and `y_channels` channels, or all of them.
        shared none; moves 8·x bytes, 12·x with `other`. source: S. Ioffe, C. Szegedy, arXiv:1502.03167.
        """
        x_channels, y_channels = (C, C) if dense else (x_channels, y_channels)
        values = cuda.local.array(FLOATS, f4)
        others = cuda.local.array(FLOATS, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        weights = cuda.local.array(WIDTH, f4)
        tid = cuda.threadIdx.x
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        first = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * chunk
        last = min(first + chunk, M) if c < C else 0
        take(mean, first, near, C, HW, group, means)
        take(spread, first, near, C, HW, group, factors)
        if affine:
            load_floats(weight, near, weights)
            load_floats(bias, near, biases)
        for q in range(WIDTH):
            if infer:
                factors[q] = 1.0 / math.sqrt(factors[q] + eps)
            factors[q] = weights[q] * factors[q] if affine else factors[q]
            biases[q] = biases[q] if affine else 0.0
        m = first + row
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                load(x, place(m + j * ROWS, c, x_channels, HW), values, j * WIDTH)
                if plus:
                    load(other, place(m + j * ROWS, c, C, HW), others, j * WIDTH)
            for j in range(FLIGHT):
                make(values, others, j * WIDTH, means, factors, biases)
                store(y, place(m + j * ROWS, c, y_channels, HW), values, j * WIDTH)
            m += FLIGHT * ROWS
        while m < last:
            load(x, place(m, c, x_channels, HW), values, 0)
            if plus:
                load(other, place(m, c, C, HW), others, 0)
            make(values, others, 0, means, factors, biases)
            store(y, place(m, c, y_channels, HW), values, 0)
            m += ROWS

    return batchnorm_apply_kernel
