"""The backward kernels of batch normalisation (batch.py): `sums` of every chunk, `totals` of the channels from these, `dgrad`.

What a block and a thread have of the batch says share.py. `dgrad` walks through the batch from its end: what `sums` read or wrote last is then still
in the second-level cache, and what `dgrad` writes last is what the next kernel reads first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations.activation import passed_on
from nbcnn.ops.kernel.share import Share, floats_io, lanes_io, place_of, rows_sum, taking
from nbcnn.ops.norms.batch_forward import CHANNEL_THREADS, flight_of
from nbcnn.ops.norms.plane import column_sum


@cache
def sums_kernel(
    kind: str,
    share: Share,
    gradient: Any,
    masked: bool,
    grouped: bool = False,
    two: bool = False,
    short: bool = True,
    dense: bool = True,
) -> Any:
    """`gradient`: the device function (dy, z) -> the gradient of z, the input of the activation behind the norm, which is made of x once more;
    `passed_on`: there is none. `short`: it is of few instructions. `masked`: a ReLU, where y says what passes, and dz keeps that. `grouped`: means
    are of groups (`statistic_of_group`). `two`: dy is the sum of two gradients, of which `more` is the second. `dense`: no operand is a part of a
    larger image.
    """
    (load, store), place, add = lanes_io(kind, share.width), place_of(share.last), rows_sum(share, 2 * share.width)
    take_means, (load_floats, _) = taking(share.width, grouped), floats_io(share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLIGHT = flight_of(share, short)
    FLOATS, SUMS, MEMORY = FLIGHT * share.width, 2 * share.width, 2 * share.width * share.threads
    of_x, of_y = gradient is not passed_on, masked

    @jit(device=True)
    def take(grads, mores, values, ys, at, means, factors, biases, sums):
        for q in range(WIDTH):
            away, g = values[at + q] - means[q], grads[at + q]
            if two:
                g += mores[at + q]
            if of_x:
                g = gradient(g, away * factors[q] + biases[q])
            if of_y:
                g = 0.0 if ys[at + q] <= 0.0 else g
                grads[at + q] = g
            sums[q] += g
            sums[WIDTH + q] += g * away

    @jit(launch_bounds=(THREADS, 2))
    def batchnorm_sums_kernel(dy, more, x, y, weight, bias, mean, rstd, dz, partials, M, C, HW, chunk, group, dy_channels, x_channels):
        """partials (2,C,chunks) = Σ g, Σ g·(x − mean) over the block's chunk of pixels; g: dy (plus more) behind the activation; dz = g.

        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, per thread `width` channels of every ROWS-th pixel of it.
        dy and x are parts of `dy_channels` and `x_channels` channels, or all of them.
        shared 8·width bytes per thread; moves 8·x bytes, 16·x where it reads y and writes dz, 20·x with `more`.
        """
        dy_channels, x_channels = (C, C) if dense else (dy_channels, x_channels)
        memory = cuda.shared.array(MEMORY, f4)
        grads = cuda.local.array(FLOATS, f4)
        values = cuda.local.array(FLOATS, f4)
        ys = cuda.local.array(FLOATS, f4)
        mores = cuda.local.array(FLOATS, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        tid, block, chunks = cuda.threadIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        first = block * chunk
        last = min(first + chunk, M) if c < C else 0
        take_means(mean, first, near, C, HW, group, means)
        if of_x:
            load_floats(weight, near, factors)
            load_floats(rstd, near, biases)
            for q in range(WIDTH):
                factors[q] *= biases[q]
            load_floats(bias, near, biases)
        for k in range(SUMS):
            sums[k] = 0.0
        m = first + row
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                at = place(m + j * ROWS, c, C, HW)
                load(dy, place(m + j * ROWS, c, dy_channels, HW), grads, j * WIDTH)
                if two:
                    load(more, at, mores, j * WIDTH)
                load(x, place(m + j * ROWS, c, x_channels, HW), values, j * WIDTH)
                if of_y:
                    load(y, at, ys, j * WIDTH)
            for j in range(FLIGHT):
                take(grads, mores, values, ys, j * WIDTH, means, factors, biases, sums)
                if of_y:
                    store(dz, place(m + j * ROWS, c, C, HW), grads, j * WIDTH)
            m += FLIGHT * ROWS
        while m < last:
            at = place(m, c, C, HW)
            load(dy, place(m, c, dy_channels, HW), grads, 0)
            if two:
                load(more, at, mores, 0)
            load(x, place(m, c, x_channels, HW), values, 0)
            if of_y:
                load(y, at, ys, 0)
            take(grads, mores, values, ys, 0, means, factors, biases, sums)
            if of_y:
                store(dz, at, grads, 0)
            m += ROWS
        add(memory, sums)
        if row == 0 and c < C:
            for q in range(WIDTH):
                partials[(c + q) * chunks + block] = memory[q * THREADS + tid]
                partials[(C + c + q) * chunks + block] = memory[(WIDTH + q) * THREADS + tid]

    return batchnorm_sums_kernel


@cache
def totals_kernel() -> Any:
    THREADS = CHANNEL_THREADS
    in_block = column_sum(1, THREADS)

    @jit()
    def batchnorm_totals_kernel(partials, rstd, dweight, dbias, again, C, chunks):
        """dbias = Σ g, dweight = rstd·Σ g·(x − mean) of every channel over its chunks; once more, dbias first, into `again` (2,C).

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 8·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        plain, centred = 0.0, 0.0
        for b in range(tid, chunks, THREADS):
            plain += partials[c * chunks + b]
            centred += partials[(C + c) * chunks + b]
        plain, centred = in_block(values, plain), in_block(values, centred) * rstd[c]
        if tid == 0:
            dbias[c], dweight[c] = plain, centred
            again[c], again[C + c] = plain, centred

    return batchnorm_totals_kernel


@cache
def dgrad_kernel(kind: str, share: Share, gradient: Any, plus: bool = False, short: bool = True, dense: bool = True) -> Any:
    """`gradient`, `short` and `dense` as in `sums_kernel`. `plus`: `more` is added to dx."""
    (load, store), place = lanes_io(kind, share.width), place_of(share.last)
    load_floats, _ = floats_io(share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLIGHT = flight_of(share, short)
    FLOATS = FLIGHT * share.width

    @jit(device=True)
    def make(grads, values, mores, at, means, factors, biases, slopes, offsets):
        for q in range(WIDTH):
            away = values[at + q] - means[q]
            g = gradient(grads[at + q], away * factors[q] + biases[q])
            values[at + q] = factors[q] * ((g - offsets[q]) - away * slopes[q])
            if plus:
                values[at + q] += mores[at + q]

    @jit(launch_bounds=(THREADS, 2))
    def batchnorm_dgrad_kernel(dy, x, weight, bias, mean, rstd, sums, more, dx, M, C, HW, chunk, dy_channels, x_channels, more_channels):
        """dx = weight·rstd·(g − dbias/M − (x − mean)·rstd·dweight/M), plus more; sums (2,C): dbias, dweight; g: dy behind the activation.

        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, the last ones first, per thread `width` channels of every
        ROWS-th pixel of it. dy, x and more are parts of so many channels as the last arguments say, or all of them.
        shared none; moves 12·x bytes, 16·x with `more`.
        """
        dy_channels, x_channels, more_channels = (C, C, C) if dense else (dy_channels, x_channels, more_channels)
        grads = cuda.local.array(FLOATS, f4)
        values = cuda.local.array(FLOATS, f4)
        mores = cuda.local.array(FLOATS, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        slopes = cuda.local.array(WIDTH, f4)
        offsets = cuda.local.array(WIDTH, f4)
        scales = cuda.local.array(WIDTH, f4)
        tid = cuda.threadIdx.x
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        first = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * chunk
        last = min(first + chunk, M) if c < C else 0
        load_floats(mean, near, means)
        load_floats(weight, near, factors)
        load_floats(bias, near, biases)
        load_floats(rstd, near, scales)
        load_floats(sums, near, offsets)
        load_floats(sums, C + near, slopes)
        for q in range(WIDTH):
            factors[q] *= scales[q]
            offsets[q], slopes[q] = offsets[q] / M, scales[q] * slopes[q] / M
        m = first + row
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                load(dy, place(m + j * ROWS, c, dy_channels, HW), grads, j * WIDTH)
                load(x, place(m + j * ROWS, c, x_channels, HW), values, j * WIDTH)
                if plus:
                    load(more, place(m + j * ROWS, c, more_channels, HW), mores, j * WIDTH)
            for j in range(FLIGHT):
                make(grads, values, mores, j * WIDTH, means, factors, biases, slopes, offsets)
                store(dx, place(m + j * ROWS, c, C, HW), values, j * WIDTH)
            m += FLIGHT * ROWS
        while m < last:
            load(dy, place(m, c, dy_channels, HW), grads, 0)
            load(x, place(m, c, x_channels, HW), values, 0)
            if plus:
                load(more, place(m, c, more_channels, HW), mores, 0)
            make(grads, values, mores, 0, means, factors, biases, slopes, offsets)
            store(dx, place(m, c, C, HW), values, 0)
            m += ROWS

    return batchnorm_dgrad_kernel
