"""The forward kernel of batch_cluster.py: statistics and y of batch normalisation in one launch. What a block holds says cluster_share.py."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.stored import scalar_io, widest
from nbcnn.ops.norms.cluster_share import Tile, block_sums, floats_of, shared_floats, words_io
from nbcnn.ops.norms.plane import not_negative, rstd_of
from nbcnn.ops.ptx.cluster import cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load_of_block


@cache
def fprop_kernel(kind: str, tile: Tile, flight: int, function: Any, plus: bool) -> Any:
    """`flight`: pixels that a thread loads before it uses the first. `function`: the device function that makes y at last. `plus`: `other`
    is added before.
    """
    read, write, get, put, floats, rounded, STORED, WORD = words_io(kind)
    WIDTH, COLUMNS, ROWS, CLUSTER, THREADS = widest(kind), tile.columns, tile.rows, tile.cluster, tile.threads
    CHANNELS, SUMS, STRIDE = WIDTH * COLUMNS, 2 * WIDTH, WIDTH * THREADS
    NUMBERS, BEGIN = 2 * CHANNELS, floats_of(tile, WIDTH) * WIDTH // 4
    (load_one, _), (gather, total), load_floats = scalar_io(kind), block_sums(tile, WIDTH), shared_floats(WIDTH)
    # In the second pass only loads of `other` have to be waited for.
    FLIGHT, AGAIN = flight, min(flight, 4 if plus else 2)
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
    def batchnorm_cluster_fprop_kernel(
        x, other, weight, bias, y, mean, rstd, running_mean, running_var, M, C, pixels, held, eps, momentum, x_channels, y_channels
    ):  # fmt: skip
        """y = f((x − mean)·(weight·rstd) + bias), or plus `other` inside f; mean, rstd = 1/√(variance + eps) and running statistics.

        A block sums distances from its first pixel, which is one of its values, so a variance loses no digits to a large mean; blocks are joined by
        Chan's formula. That is as exact as batch_forward.py's three launches and needs one pass and one exchange, where a mean first and squares
        behind it need two of each.
        grid CLUSTER·C/CHANNELS, block 256 or 512; owns: per cluster CHANNELS channels, per block ⌈M/CLUSTER⌉ pixels, per thread 16 bytes of every
        ROWS-th. x and y are parts of `x_channels` and `y_channels` channels, or all of them.
        shared: the block's x as it is stored, and 88 to 152 bytes per channel; moves 8·x bytes, 12·x with `other`.
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
        near = min(first, M - 1) * x_channels
        lead, factor, offset = load_one(x, near + own), weight[own], bias[own]
        read(x, near + c, words, 0)
        floats(words, 0, means)
        for k in range(SUMS):
            sums[k] = 0.0
        m, at = first + row, BEGIN + tid * WIDTH
        while m < last:
            for j in range(FLIGHT):
                read(x, min(m + j * ROWS, last - 1) * x_channels + c, words, 4 * j)
            for j in range(FLIGHT):
                if m + j * ROWS < last:
                    put(kept, at + j * STRIDE, words, 4 * j)
                    take(words, 4 * j, values, means, sums)
            m += FLIGHT * ROWS
            at += FLIGHT * STRIDE
        gather(memory, sums)
        if tid < CHANNELS:
            away, squares = total(memory, tid), total(memory, CHANNELS + tid)
            middle = away / max(last - first, 1)
            memory[tid] = lead + middle
            memory[CHANNELS + tid] = not_negative(squares - away * middle)
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
            scale = rstd_of(variance + eps)
            memory[NUMBERS + tid], memory[NUMBERS + CHANNELS + tid], memory[NUMBERS + 2 * CHANNELS + tid] = middle, factor * scale, offset
        cuda.syncthreads()
        cluster_arrive_relaxed()
        numbers = NUMBERS + c - channel
        load_floats(memory, numbers, means)
        load_floats(memory, numbers + CHANNELS, factors)
        load_floats(memory, numbers + 2 * CHANNELS, biases)
        m, at = first + row, BEGIN + tid * WIDTH
        while m < last:
            if plus:
                for j in range(AGAIN):
                    read(other, min(m + j * ROWS, last - 1) * C + c, extra, 4 * j)
            for j in range(AGAIN):
                if m + j * ROWS < last:
                    get(kept, at + j * STRIDE, again, 4 * j)
                    make(again, extra, 4 * j, values, others, means, factors, biases)
                    write(y, (m + j * ROWS) * y_channels + c, again, 4 * j)
            m += AGAIN * ROWS
            at += AGAIN * STRIDE
        if rank == 0 and tid < CHANNELS:
            mean[own], rstd[own] = middle, scale
            running_mean[own] = (1.0 - momentum) * running_mean[own] + momentum * middle
            running_var[own] = (1.0 - momentum) * running_var[own] + momentum * variance * (M / max(M - 1, 1))
        # A block stays as long as another reads its sums.
        cuda.syncthreads()
        cluster_wait()

    return batchnorm_cluster_fprop_kernel
