"""Sums of a map over the batch and its pixels, one for each channel, as gradients of what a layer has by channel: db[c] = Σ f(dy[n,c,…], …).

Blocks share the pixels in chunks (share.py), whose sums a second launch adds in order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.reduce import group_reduction, plus
from nbcnn.ops.kernel.share import IN_FLIGHT, Share, lanes_io, place_of, rows_sum, shared_call
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size

TOTAL_THREADS = 8 if SIMULATOR else 256
"""Threads of a block that adds the sums of one channel."""


@cache
def chunks_kernel(function: Any, operands: int, kind: str, share: Share) -> Any:
    """The kernel of the sums of `function`(element of each operand) over chunks; one or two operands, stored as `kind`."""
    (load, _), place, add = lanes_io(kind, share.width), place_of(share.last), rows_sum(share, share.width)
    WIDTH, COLUMNS, ROWS, THREADS, TWO = share.width, share.columns, share.rows, share.threads, operands == 2
    FLOATS, MEMORY = IN_FLIGHT * share.width, share.width * share.threads

    @jit(device=True)
    def load_all(a, b, i, first, second, at):
        load(a, i, first, at)
        if TWO:
            load(b, i, second, at)

    @jit(device=True)
    def term(first, second, at):
        return function(first[at], second[at]) if TWO else function(first[at])

    @jit(launch_bounds=(THREADS, 2))
    def channel_chunks_kernel(a, b, partials, M, C, HW, chunk, channels):
        """partials (C,chunks) = Σ function(elements) over the block's chunk of pixels; operands are parts of `channels` channels, or all of them.

        grid    (tiles of channels, chunks), block up to 256
        owns    block: a chunk; thread: `width` channels of every ROWS-th pixel of it
        shared  4·width bytes per thread
        moves   every element of every operand once
        """
        memory = cuda.shared.array(MEMORY, f4)
        first = cuda.local.array(FLOATS, f4)
        second = cuda.local.array(FLOATS, f4)
        sums = cuda.local.array(WIDTH, f4)
        tid, block, chunks = cuda.threadIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        last = min((block + 1) * chunk, M)
        for q in range(WIDTH):
            sums[q] = 0.0
        m = block * chunk + row
        while m + (IN_FLIGHT - 1) * ROWS < last:
            for j in range(IN_FLIGHT):
                load_all(a, b, place(m + j * ROWS, near, channels, HW), first, second, j * WIDTH)
            for j in range(IN_FLIGHT):
                for q in range(WIDTH):
                    sums[q] += term(first, second, j * WIDTH + q)
            m += IN_FLIGHT * ROWS
        while m < last:
            load_all(a, b, place(m, near, channels, HW), first, second, 0)
            for q in range(WIDTH):
                sums[q] += term(first, second, q)
            m += ROWS
        add(memory, sums)
        if row == 0 and c < C:
            for q in range(WIDTH):
                partials[(c + q) * chunks + block] = memory[q * THREADS + tid]

    return channel_chunks_kernel


@cache
def total_kernel() -> Any:
    THREADS = TOTAL_THREADS
    in_block = group_reduction(THREADS, plus)

    @jit()
    def channel_total_kernel(partials, total, chunks):
        """total = Σ of the partials (C,chunks) of every channel.

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 4·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        mine = 0.0
        for b in range(tid, chunks, THREADS):
            mine += partials[c * chunks + b]
        mine = in_block(values, mine)
        if tid == 0:
            total[c] = mine

    return channel_total_kernel


def scratch_of_sums(call: Call) -> int:
    """Bytes of a number of every channel and chunk."""
    _, _, extent = shared_call(call, 0)
    return 4 * extent.channels * extent.chunks


def launch_sums(function: Any, call: Call) -> list[Launch]:
    """The call's output (C) = Σ `function`(elements of its inputs, images) by channel. Two launches: sums of the chunks, those of the channels."""
    kind, share, extent = shared_call(call, 0)
    (total,), partials = call.outs, call.scratch.view(np.float32)
    numbers = (np.int32(each) for each in (extent.pixels, extent.channels, extent.plane, extent.chunk))
    kernel = chunks_kernel(function, len(call.ins), kind, share)
    return [
        Launch(kernel, extent.grid, share.threads, (call.ins[0], call.ins[-1], partials, *numbers, call.channels("in", 0))),
        Launch(total_kernel(), extent.channels, TOTAL_THREADS, (partials, total, np.int32(extent.chunks))),
    ]


def traffic_of_sums(call: Call) -> list[Traffic]:
    """The inputs; the partials."""
    partials = scratch_of_sums(call)
    return [once(sum(size(call, "in", at) for at in range(len(call.in_shapes))), partials), once(partials, outputs(call))]
