"""EvoNorm-B0 forward in one launch where the blocks that hold a channel's images are a thread block cluster (NCHW, from Hopper on).

They tell each other their planes' statistics in shared memory (nbcnn/ops/ptx/cluster.py). The GPU starts a cluster's blocks together, so
the other channels need not be there at the same time: any number of channels will do, and a batch of up to `MOST` blocks' images.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.check.one_op import Unsupported
from nbcnn.gpu import device as gpu
from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Call, Launch, Shape
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.norms.held import MOST_FLOATS, OTHERS, REGISTERS, Held, elements_of, joined, loading, place_of, spread_of, storing, team_of
from nbcnn.ops.ptx.cluster import MOST, room_of, told
from nbcnn.ops.ptx.fast import reciprocal
from nbcnn.ops.ptx.shuffle import WARP, sum_over

LARGEST_BLOCK = 1024
THREADS, BLOCKS = 2048, 32
"""Of an H200's multiprocessor."""
UNIT = 8
"""Registers that a thread gets at a time."""
MOST_CHANNELS = 65535
"""What the second axis of a grid has."""
LIKELY = 256
"""Threads that a block should have."""
PAIRS = 4
"""Planes that a lane adds up by itself before lanes do."""


@cache
def moments_of(images: int) -> Any:
    """Device function (room, lane) -> mean and variance of a channel, from those of its planes, which are pairs of the room.

    Chan's formula for planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)². Every warp makes it for itself
    and in one order, so all blocks of a cluster have the same bits.
    """
    LANES = min(power_of_two(-(-images // PAIRS)), WARP)
    EACH, IMAGES = -(-images // LANES), images
    across = sum_over(LANES - 1)

    @jit(device=True)
    def moments(room, lane):
        means, variances = cuda.local.array(EACH, f4), cuda.local.array(EACH, f4)
        part, total, squares = i4(lane & i4(LANES - 1)), f4(0), f4(0)
        for j in range(EACH):
            at = i4(part + i4(j * LANES))
            means[j], variances[j] = told(room, min(at, i4(IMAGES - 1)))
            total += means[j] if at < i4(IMAGES) else f4(0)
        mean = across(total) * divide(f4(1), f4(IMAGES))
        for j in range(EACH):
            away = means[j] - mean
            squares += variances[j] + away * away if i4(part + i4(j * LANES)) < i4(IMAGES) else f4(0)
        return mean, across(squares) * divide(f4(1), f4(IMAGES))

    return moments


@cache
def fprop_kernel(kind: str, held: Held) -> Any:
    load, _ = scalar_io(kind)
    team = team_of(held, "NCHW", 1, 0)
    LONE = team.warps == 1  # a warp has a whole plane
    place, elements, fill, put, spread, join = (
        place_of(team),
        elements_of(team),
        loading(kind, team),
        storing(kind, team),
        spread_of(team, keep=not LONE),
        joined(team),
    )
    IMAGES, FLOATS, SIZE, N = held.images, team.floats, held.cluster, held.images * held.cluster
    KEPT, PLACES = 3 * team.planes * team.joint, N + 1
    gather, open_room, enter, tell, hear = room_of(SIZE, N)
    moments = moments_of(N)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_cluster_kernel(x, gamma, beta, v, running, y, shift, std, batch_shift, batch_std, C, HW, eps, momentum):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I), and every statistic; running ← (1 − momentum)·running + momentum·(unbiased variance).

        grid cluster × C, clusters of the first; block up to 1024; owns: a block images of a channel, a thread up to 32 pixels, in registers.
        shared 12 bytes a plane and warp, 8 a plane of the channel; moves 8·x bytes. needs sm_90. source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        room = cuda.shared.array(PLACES, i8)
        values = cuda.local.array(FLOATS, f4)
        gather()
        tid, party, own = i4(cuda.threadIdx.x), i4(cuda.blockIdx.x), i4(cuda.blockIdx.y)
        _, image, rank = place(tid)
        n = i4(party * i4(IMAGES) + image)
        start, tail = elements(n, own, rank, C, HW)
        at_channel, at_plane = u4(own), u4(n * C + own)
        fill(values, x, start, tail)
        open_room(room)
        lead, origin = load(x, u4(i4(at_plane) * HW)), load(x, u4(own * HW))
        factor, bias, slope = gamma[at_channel], beta[at_channel], v[at_channel]
        mean, variance = spread(kept, values, lead, rank, HW)
        if LONE:
            variance = divide(variance, f4(HW))
        else:
            cuda.syncthreads()
            mean, variance = join(kept, image, f4(HW))
        enter()
        if rank < i4(SIZE):
            tell(room, n, rank, lead - origin + mean, variance)
        # Nothing is stored before the pairs are on their way.
        s = f4(math.sqrt(variance + eps))
        if rank == i4(0):
            shift[at_plane], std[at_plane] = mean, s
        hear(room)
        mean, variance = moments(room, i4(tid & i4(WARP - 1)))
        least = f4(math.sqrt(variance + eps))
        for j in range(FLOATS):
            value = values[j]
            values[j] = factor * (value * reciprocal(max(least, slope * value + s))) + bias
        put(y, values, start, tail)
        if party == i4(0) and tid == i4(0):
            batch_shift[at_channel], batch_std[at_channel] = mean, least
            m = f4(N) * f4(HW)
            running[at_channel] = (f4(1) - momentum) * running[at_channel] + momentum * variance * (m / max(m - f4(1), f4(1)))

    return evonorm_b0_cluster_kernel


def launch(call: Call) -> Launch:
    """The launch of evonorm_b0_fprop with a tile of `slabs_of`. Raises Unsupported if the tile is for other images, or for another GPU."""
    (n, c, h, w), held = call.in_shapes[0], call.tile
    if n != held.images * held.cluster or call.layout != "NCHW":
        raise Unsupported(f"{call.op}: {held.cluster} blocks of {held.images} images are not {n}, or the images are not stored NCHW")
    if held.cluster > 1 and not gpu.has_tma():
        raise Unsupported(f"{call.op}: clusters of blocks need compute capability 9.0")
    sizes = np.int32(c), np.int32(h * w)
    args = (*call.ins, *call.outs[:5], *sizes, np.float32(call.attrs["eps"]), np.float32(call.attrs["momentum"]))
    return Launch(fprop_kernel(kinds(call)[0], held), (held.cluster, c), held.threads, args, cluster=held.cluster)


def slabs_of(shape: Shape) -> list[Held]:
    """Slabs for images of logical `shape` (N,C,H,W) in NCHW, the likely fastest first. Empty where nothing fits."""
    n, c, h, w = shape
    made: dict[tuple[int, int], Held] = {}
    sizes = [size for size in (1, 2, 4, MOST) if n % size == 0] if h * w % 4 == 0 and c <= MOST_CHANNELS else []
    for cluster in sizes:
        images = n // cluster
        # The fewest warps of a plane for every number of elements.
        for warps in range(1, LARGEST_BLOCK // (WARP * images) + 1):
            slots, threads = -(-h * w // (4 * WARP * warps)), warps * WARP * images
            registers = -(-(4 * slots + OTHERS) // UNIT) * UNIT
            blocks = min(THREADS // threads, REGISTERS // (threads * registers), BLOCKS)
            # One access a thread is slow wherever there could be two.
            if 4 * slots <= MOST_FLOATS and blocks and (slots > 1 or warps == 1):
                made.setdefault((slots, cluster), Held(1, images, threads, slots, 1, blocks, cluster=cluster))
    return sorted(made.values(), key=order)


def enough(held: Held, channels: int, multiprocessors: int) -> bool:
    """True if most multiprocessors have a block."""
    return 4 * held.cluster * channels >= 3 * multiprocessors


def order(held: Held) -> tuple[float, ...]:
    """Sort key of `slabs_of`: many blocks in a cluster, then blocks of about `LIKELY` threads (measured on an H200, bench/LOG.md)."""
    return (-held.cluster, abs(math.log2(held.threads / LIKELY)))
