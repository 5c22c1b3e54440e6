"""The backward kernel of batch_cluster.py: all gradients of batch normalisation in one launch. What a block holds says cluster_share.py."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations.activation import passed_on
from nbcnn.ops.kernel.share import floats_io
from nbcnn.ops.kernel.stored import widest
from nbcnn.ops.norms.cluster_share import Tile, block_sums, floats_of, shared_floats, words_io
from nbcnn.ops.ptx.cluster import cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load_of_block


@cache
def grads_kernel(kind: str, tile: Tile, flight: int, gradient: Any, gates: bool, masked: bool, two: bool) -> Any:
    """`flight`: pixels that a thread may load before it uses the first. `gradient`: the device function (dy, z) -> the gradient of z, the input of
    the activation behind the norm, which is made of x once more; `passed_on`: there is none. `gates`: the gradient is dy or 0, which loses nothing
    when it is stored: it is held instead of dy, and not made a second time. `masked`: a ReLU, where y says what passes, and dz keeps that. `two`: dy
    is the sum of two gradients, of which `more` is the second; without `masked` `more` is added to dx.
    """
    read, write, get, put, floats, rounded, STORED, WORD = words_io(kind)
    WIDTH, COLUMNS, ROWS, CLUSTER, THREADS = widest(kind), tile.columns, tile.rows, tile.cluster, tile.threads
    CHANNELS, SUMS, STRIDE = WIDTH * COLUMNS, 2 * WIDTH, WIDTH * THREADS
    NUMBERS, BEGIN = 2 * CHANNELS, floats_of(tile, WIDTH) * WIDTH // 4
    (gather, total), load_floats, (load_channels, _) = block_sums(tile, WIDTH), shared_floats(WIDTH), floats_io(WIDTH)
    of_x, of_y = gradient is not passed_on, masked
    holds_g = masked or (of_x and gates)
    of_x_again = of_x and not holds_g
    # Of three or four tensors, or beside a long activation, fewer pixels: all stay in registers.
    FLIGHT, AGAIN = min(flight, 4 if masked or (of_x and not gates) else 8), min(flight, 2)
    WORDS, WORDS_AGAIN = 4 * FLIGHT, 4 * AGAIN
    adds = two and not masked

    @jit(device=True)
    def take(words, x_words, y_words, more_words, at, grads, values, others, means, factors, biases, sums):
        floats(words, at, grads)
        if two and of_y:
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
        if holds_g:
            rounded(grads, words, at)

    @jit(device=True)
    def make(words, x_words, more_words, at, grads, values, others, means, factors, biases, slopes, offsets):
        floats(words, at, grads)
        floats(x_words, at, values)
        if adds:
            floats(more_words, at, others)
        for q in range(WIDTH):
            away = values[q] - means[q]
            g = gradient(grads[q], away * factors[q] + biases[q]) if of_x_again else grads[q]
            values[q] = factors[q] * ((g - offsets[q]) - away * slopes[q])
            if adds:
                values[q] += others[q]
        rounded(values, x_words, at)

    @jit(launch_bounds=(THREADS, 512 // THREADS), cluster=CLUSTER)
    def batchnorm_cluster_grads_kernel(
        dy, more, x, y, weight, bias, mean, rstd, dx, dz, dweight, dbias, M, C, pixels, held, dy_channels, x_channels, more_channels
    ):  # fmt: skip
        """dbias = Σ g, dweight = rstd·Σ g·(x − mean), dx = weight·rstd·(g − dbias/M − (x − mean)·rstd·dweight/M), dz = g.

        g: dy (plus more, where it reads y) behind the activation; elsewhere more is added to dx. dz is written at last, so that no block waits for
        its stores at the cluster's barrier.

        grid CLUSTER·C/CHANNELS, block 256 or 512; owns: per cluster CHANNELS channels, per block ⌈M/CLUSTER⌉ pixels, per thread 16 bytes of every
        ROWS-th. dy, x and a `more` that is added to dx are parts of so many channels as the last arguments say, or all of them.
        shared: the block's x and dy (g behind a ReLU) as they are stored, and 88 to 152 bytes per channel.
        moves 12·x bytes, 20·x where it reads y and writes dz, 4·x more with `more`. source: S. Ioffe, C. Szegedy, arXiv:1502.03167.
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
        while m < last:
            for j in range(FLIGHT):
                pixel = min(m + j * ROWS, last - 1)
                read(dy, pixel * dy_channels + c, words, 4 * j)
                if two and of_y:
                    read(more, pixel * C + c, more_words, 4 * j)
                read(x, pixel * x_channels + c, x_words, 4 * j)
                if of_y:
                    read(y, pixel * C + c, y_words, 4 * j)
            for j in range(FLIGHT):
                if m + j * ROWS < last:
                    put(kept, at + held + j * STRIDE, x_words, 4 * j)
                    take(words, x_words, y_words, more_words, 4 * j, grads, values, others, means, factors, biases, sums)
                    put(kept, at + j * STRIDE, words, 4 * j)
            m += FLIGHT * ROWS
            at += FLIGHT * STRIDE
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
        while m < last:
            if adds:
                for j in range(AGAIN):
                    read(more, min(m + j * ROWS, last - 1) * more_channels + c, more_words, 4 * j)
            for j in range(AGAIN):
                if m + j * ROWS < last:
                    get(kept, at + j * STRIDE, again, 4 * j)
                    get(kept, at + held + j * STRIDE, x_again, 4 * j)
                    make(again, x_again, more_words, 4 * j, grads, values, others, means, factors, biases, slopes, offsets)
                    write(dx, (m + j * ROWS) * C + c, x_again, 4 * j)
                    if of_y:
                        write(dz, (m + j * ROWS) * C + c, again, 4 * j)
            m += AGAIN * ROWS
            at += AGAIN * STRIDE
        if rank == 0 and tid < CHANNELS:
            dbias[own], dweight[own] = plain, centred
        # A block stays as long as another reads its sums.
        cuda.syncthreads()
        cluster_wait()

    return batchnorm_cluster_grads_kernel
