"""EvoNorm-B0 forward on slabs held in registers (held.py).

"all"         everything in one launch: every block waits for the other planes of its channels, so it must fit on the GPU
"statistics"  of planes; what follows is either "batch", or the channels' kernel of b0.py and "apply"
"batch"       every block makes the batch's statistics of its channels from the planes' (b0_batch.py), then y
"apply"       y from x and all statistics
"infer"       y from x and the running variance: one launch, nobody waits
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.norms.b0_batch import batch_statistics
from nbcnn.ops.norms.held import (
    Held,
    block_position,
    frozen,
    grid_of,
    joined,
    reaching,
    spread_of,
    thread_group_of,
)
from nbcnn.ops.norms.plane import deviation_of
from nbcnn.ops.ptx.fast import larger, reciprocal
from nbcnn.ops.ptx.grid import send
from nbcnn.ops.ptx.shuffle import WARP


@cache
def fprop_kernel(kind: str, layout: str, channels: int, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    threads = thread_group_of(held, layout, 1, channels)
    plane_of, elements, fill, put = reaching(kind, threads)
    spread, join = spread_of(threads, keep=threads.planes * threads.joint > 1), joined(threads)
    CHANNELS, IMAGES, WIDE, FLOATS = held.channels, held.images, threads.wide, threads.floats
    KEPT, LONE = 3 * threads.planes * threads.joint, threads.joint == 1  # a warp has a whole plane
    ALL, BATCH, STATISTICS = stage == "all", stage in ("all", "batch"), stage not in ("batch", "apply")
    APPLY, INFER, KNOWN = stage != "statistics", stage == "infer", stage == "apply"
    block, batch = block_position(WIDE), batch_statistics(kind, CHANNELS, held.threads // WARP, WIDE, ALL)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_fprop_kernel(x, gamma, beta, v, running, y, shift, std, batch_shift, batch_std, messages, N, C, HW, eps, momentum):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I), and every statistic; running ← (1 − momentum)·running + momentum·(unbiased variance).

        grid N/images × C/channels, block up to 512; owns: one block per slab, per thread up to 32 pixels of a channel, in registers.
        shared 12 bytes per plane and warp; moves 8·x bytes (4·x where only statistics are made), and messages or statistics of the planes of its
        channels. source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        leasts = cuda.shared.array(CHANNELS, f4)
        values = cuda.local.array(FLOATS, f4)
        tid = cuda.threadIdx.x
        slab, image_group = block()
        first = slab * CHANNELS
        channel, image, rank = plane_of(tid)
        n, own = image_group * IMAGES + image, first + channel
        start, tail = elements(n, own, rank, C, HW)
        fill(values, x, start, tail)
        at_channel, at_plane, lead_at = own, n * C + own, own if WIDE else own * HW
        s, least, origin, sequence, factor, bias, slope = 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0.0
        if ALL:
            origin, sequence = load(x, lead_at), messages[4 * (own * N + n) + 1] + 1
        if APPLY:
            factor, bias, slope = gamma[at_channel], beta[at_channel], v[at_channel]
            if not STATISTICS:
                s = std[at_plane]
            if KNOWN:
                least = batch_std[at_channel]
            if INFER:
                least = deviation_of(running[at_channel] + eps)
        if STATISTICS:
            lead = load(x, n * C * HW + lead_at)
            mean, variance = spread(kept, values, lead, rank, HW)
            if LONE:
                variance = divide(variance, f4(HW))
            else:
                cuda.syncthreads()
                mean, variance = join(kept, image * CHANNELS + channel, f4(HW))
            if ALL and rank == 0:
                send(messages, own * N + n, sequence, lead - origin + mean, variance)
            s = deviation_of(variance + eps)
            if rank == 0 and not INFER:
                shift[at_plane], std[at_plane] = mean, s
        if BATCH:
            batch(leasts, x, shift, std, running, batch_shift, batch_std, messages, sequence, first, image_group, N, C, HW, eps, momentum)
            cuda.syncthreads()
            least = leasts[channel]
        if APPLY:
            for j in range(FLOATS):
                value = values[j]
                values[j] = factor * (value * reciprocal(larger(least, slope * value + s))) + bias
            put(y, values, start, tail)

    return evonorm_b0_fprop_kernel


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_fprop, or of evonorm_b0_infer."""
    running = call.ins[-1]
    (n, c, h, w), held = call.in_shapes[0], call.tile
    y, shift, std, batch_shift, batch_std = (call.outs[0], *(running,) * 4) if stage == "infer" else call.outs[:5]  # infer touches y alone
    together = stage == "all"
    slabs, image_groups = c // held.channels, n // held.images
    messages = constant(np.zeros(4 * n * c if together else 1, np.int32))
    sizes = (np.int32(size) for size in (n, c, h * w))
    numbers = np.float32(call.attrs["eps"]), np.float32(call.attrs.get("momentum", 0))
    args = (*call.ins, y, shift, std, batch_shift, batch_std, messages, *sizes, *numbers)
    grid = grid_of(call.layout, slabs, image_groups)
    return Launch(fprop_kernel(kinds(call)[0], call.layout, frozen(call.layout, c), held, stage), grid, held.threads, args, together=together)
