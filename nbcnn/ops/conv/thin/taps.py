"""The taps of a pixel that threads load from images of few channels: those of x, or of dy in a gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import i8, jit
from nbcnn.ops.kernel.loops import within
from nbcnn.ops.ptx.vector import load1_if


@cache
def fetch_taps(R: int, S: int, channels: int, stride: int, sharing: int) -> Any:
    """Device function (staged, thin, inside, n, p, q, share, H, W, top, left): every `sharing`-th tap of pixel (p, q), from tap `share` on.

    `thin` holds images of H×W pixels; staged[i·channels + c] is channel c of the i-th of these taps, zero outside the image, beyond the last tap,
    or where not `inside`.
    """
    TAPS, LOADS = R * S, -(-R * S // sharing)

    @jit(device=True)
    def fetch(staged, thin, inside, n, p, q, share, H, W, top, left):
        for i in range(LOADS):
            tap = share + i * sharing
            r = tap // S
            h = p * stride + r - top
            w = q * stride + tap - r * S - left
            # As unsigned numbers, negative coordinates lie beyond any extent.
            ok = inside & (tap < TAPS) & within(h, H) & within(w, W)
            at = (n * H + h) * W + w
            for c in range(channels):
                staged[i * channels + c] = load1_if(thin, i8(at) * channels + c, ok)

    return fetch
