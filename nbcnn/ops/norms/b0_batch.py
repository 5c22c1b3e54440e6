"""The batch's statistics of a few channels, made by every block that needs them (b0_held.py): one warp per channel, a lane every 32nd image.

The statistics of a plane come as a message from the block that has just made them, or lie in memory since an earlier launch. Then the blocks may do
without a launch in between that makes the batch's statistics once, at the price of reading the planes' again and again: `by_every_block`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Shape
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.held import Held
from nbcnn.ops.norms.plane import deviation_of, not_negative
from nbcnn.ops.ptx.grid import receive
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere

PLANE_BYTES = 12
"""Bytes of a plane's statistics: shift, std and, at most, its first element, from which shift counts."""
LAUNCH_BYTES = 16 << 20
"""What the second-level cache gives away (5 TB/s on an H200) in the 3 µs that a launch of a few small blocks takes at least."""


def by_every_block(shape: Shape, held: Held) -> bool:
    """True if the blocks of images (N,C,H,W) all together read planes' statistics in less time than a launch takes.

    Each reads those of its channels, so all of them N/images times `PLANE_BYTES` of each of N·C planes.
    """
    n, c = shape[:2]
    return n // held.images * n * c * PLANE_BYTES <= LAUNCH_BYTES


@cache
def batch_statistics(kind: str, channels: int, warps: int, wide: bool, sent: bool) -> Any:
    """Device function (leasts, x, shift, std, running, batch_shift, batch_std, messages, sequence, first, image_group, N, C, HW, eps, momentum).

    leasts[i] = s_B of channel first + i, i < channels, shared; behind it comes a barrier. The block of image_group 0 also writes batch_shift and
    batch_std, and running in place. sent: planes come as messages with this sequence number, else as shift and std. wide: NHWC.
    Planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)². All threads of the block call it.
    """
    load, _ = scalar_io(kind)
    CHANNELS, WARPS, WIDE, SENT, PASSES = channels, warps, wide, sent, -(-channels // warps)

    @jit(device=True)
    def of_message(x, shift, std, messages, sequence, origin, n, c, at, N, C, eps):
        return receive(messages, c * N + n, sequence)

    @jit(device=True)
    def of_memory(x, shift, std, messages, sequence, origin, n, c, at, N, C, eps):
        plane = n * C + c
        s = std[plane]
        return load(x, at) - origin + shift[plane], not_negative(s * s - eps)

    plane = of_message if sent else of_memory

    @jit(device=True)
    def make(leasts, x, shift, std, running, batch_shift, batch_std, messages, sequence, first, image_group, N, C, HW, eps, momentum):
        warp, lane = split(cuda.threadIdx.x, WARP)
        for each in range(PASSES):
            at = warp + each * WARPS
            its = first + min(at, CHANNELS - 1)
            lead_at = its if WIDE else its * HW
            origin = 0.0 if SENT else load(x, lead_at)
            # Welford's way over a lane's planes, Chan's over the lanes.
            count, centre, squares = 0.0, 0.0, 0.0
            for n in range(lane, N if at < CHANNELS else 0, WARP):
                mean, variance = plane(x, shift, std, messages, sequence, origin, n, its, n * C * HW + lead_at, N, C, eps)
                count += 1.0
                away = mean - centre
                centre += divide(away, count)
                squares += variance + away * (mean - centre)
            mean = divide(warp_sum_everywhere(count * centre), f4(N))
            away = centre - mean
            variance = divide(warp_sum_everywhere(squares + count * away * away), f4(N))
            if lane == 0 and at < CHANNELS:
                deviation = deviation_of(variance + eps)
                leasts[at] = deviation
                if image_group == 0:
                    batch_shift[its], batch_std[its] = mean, deviation
                    m = f4(N) * HW
                    running[its] = (1.0 - momentum) * running[its] + momentum * variance * (m / max(m - 1.0, 1.0))

    return make
