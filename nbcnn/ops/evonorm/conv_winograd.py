"""Winograd's convolution with its EvoNorm (fp32, NHWC): the kernel that makes images of points has all tiles of eight filters of an image.

So their statistics are known before anything is written, and the norm costs no pass of its own: see conv_end.py; winograd.py for the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv import winograd
from nbcnn.ops.conv.tiles import ceil_div
from nbcnn.ops.conv.winograd_transform import image_of_points
from nbcnn.ops.evonorm.conv_end import FILTERS, finish
from nbcnn.ops.evonorm.conv_kernel import group_of
from nbcnn.ops.evonorm.traffic import STATISTICS, b0_behind_planes
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import load4
from nbcnn.ops.traffic import Traffic, once
from nbcnn.ops.windows import split

POINTS, PIXELS = winograd.POINTS, 4
LARGEST_BLOCK = 256


@cache
def norm_kernel(end: str, group: int, threads: int) -> Any:
    THREADS, SUMS, ACC, SIXTEEN = threads, threads // WARP * FILTERS, PIXELS * FILTERS, 4 * POINTS
    transform = image_of_points("winograd")

    @jit(device=True)
    def pixel(i, P, Q):
        t, across = i4(cuda.threadIdx.x), i4(Q >> i4(1))
        line, column = split(t, across)
        p = i4(i4(i4(2) * line + i4(i // 2)) * Q + i4(2) * column + i4(i % 2))
        return p if t < across * (P >> i4(1)) else i4(-1)

    finish_ = finish(end, group, threads, PIXELS, pixel)

    @jit(launch_bounds=(THREADS, 2))
    def winograd_norm_kernel(points, b, gamma, beta, v, running, y, z, shift, std, first, tiles, slabs, K, P, Q, eps):
        """The images from `first` on of points[point][t][k], normalised; z = Aᵀ m A + b, y and the statistics as in conv_end.py.

        grid images·K/8, block up to 256, a thread for every tile; owns: a block 8 filters of an image, a thread a tile of 2×2 pixels of them.
        shared 32 bytes a warp; moves 4·16·tiles·K bytes, what it writes once. needs: at most 256 tiles an image. source: arXiv:1509.09308.
        """
        sums = cuda.shared.array(SUMS, f4)
        leads = cuda.shared.array(FILTERS, f4)
        acc = cuda.local.array(ACC, f4)
        m = cuda.local.array(SIXTEEN, f4)
        out = cuda.local.array(16, f4)
        each = i4((P >> i4(1)) * (Q >> i4(1)))
        n, slab = split(i4(cuda.blockIdx.x), slabs)
        k0 = i4(slab * i4(FILTERS))
        # Threads without a tile read the last one.
        t = i4(n * each + min(i4(cuda.threadIdx.x), i4(each - i4(1))))
        for quad in range(FILTERS // 4):
            for point in range(POINTS):
                at = i4(i4(i4(point) * tiles + t) * K + k0 + i4(4 * quad))
                m[4 * point], m[4 * point + 1], m[4 * point + 2], m[4 * point + 3] = load4(points, at)
            transform(out, m)
            for i in range(PIXELS):
                for q in range(4):
                    acc[i * FILTERS + 4 * quad + q] = out[4 * i + q]
        finish_(acc, sums, leads, b, gamma, beta, v, running, y, z, shift, std, i4(first + n), k0, K, P, Q, eps)

    return winograd_norm_kernel


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    c = winograd.shape_of(call)
    if FILTERS % group_of(call):
        return f"a block has {FILTERS} filters, which must be whole groups"
    if c.H * c.W // 4 > LARGEST_BLOCK:
        return f"a block has a thread for each of the {c.H * c.W // 4} tiles of an image, at most {LARGEST_BLOCK}"
    return winograd.supports(call)


def launches(call: Call, end: str, running: Any = None, y: Any = None, z: Any = None, shift: Any = None, std: Any = None) -> list[Launch]:
    """Filters to points, then for some images at a time: points, products, and the end; arrays that this end does not touch may be left out."""
    c = winograd.shape_of(call)
    each, (_, _, b, gamma, beta, v, *_) = c.H * c.W // 4, call.ins
    threads = ceil_div(each, WARP) * WARP
    kernel, eps = norm_kernel(end, group_of(call), threads), np.float32(call.attrs["eps"])
    arrays = tuple(b if array is None else array for array in (running, y, z, shift, std))  # the kernel never looks at these

    def normalised(points: Any, first: int, tiles: int) -> Launch:
        sizes = (np.int32(size) for size in (first // each, tiles, c.K // FILTERS, c.K, c.P, c.Q))
        return Launch(kernel, tiles // each * c.K // FILTERS, threads, (points, b, gamma, beta, v, *arrays, *sizes, eps), name=call.op)

    return winograd.forward(call, normalised)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `launches`: of the last kernel the points, and what the end writes; B0 in training then has its two other launches."""
    c = winograd.shape_of(call)
    kept = STATISTICS * c.K // group_of(call) if call.op.endswith("fprop") else 0
    images = 2 if call.op == "conv_evonorm_s0_fprop" else 1

    def normalised(tiles: int) -> Traffic:
        return once(4 * POINTS * tiles * c.K, images * 16 * tiles * c.K + kept * tiles // (c.H * c.W // 4))

    made = winograd.forward_traffic(call, normalised)
    return [*made, *b0_behind_planes(call, image=1)] if call.op == "conv_evonorm_b0_fprop" else made


def ops(behind_planes: Any) -> dict[str, Impl]:
    """The fused ops. behind_planes: (call, launches that make the planes' statistics) -> all launches of B0 in training."""

    def s0(call: Call) -> list[Launch]:
        y, z, shift, std = call.outs
        return launches(call, "s0", None, y, z, shift, std)

    def b0(call: Call) -> list[Launch]:
        _, z, shift, std, *_ = call.outs
        return list(behind_planes(call, launches(call, "planes", z=z, shift=shift, std=std)))

    bound = {
        "conv_evonorm_s0_fprop": s0,
        "conv_evonorm_s0_infer": lambda call: launches(call, "s0 infer", None, call.outs[0]),
        "conv_evonorm_b0_fprop": b0,
        "conv_evonorm_b0_infer": lambda call: launches(call, "b0 infer", call.ins[6], call.outs[0]),
    }
    plain = winograd.OPS["conv_fprop"]
    return {name: replace(plain, bind=bind, supports=supports, traffic=traffic) for name, bind in bound.items()}
