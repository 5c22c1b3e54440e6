"""Shared parts of the steps, which none of them teaches: tile, extents, tensor maps, and how a step becomes an implementation of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation, correlation, pack, refusal
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES

BM, BN, BK = 128, 128, 64
"""A block makes BM pixels × BN channels of y; a k-tile has BK channels of one tap: a row of 64 bfloat16, 128 bytes."""
WARPS = 8
"""Warps that multiply: two warpgroups."""
THREADS = 32 * WARPS
SUMS = BM * BN // THREADS
"""Sums that a thread holds."""
BLOCKS = 2
"""Blocks that share a multiprocessor: while one waits, the other multiplies."""
A_BYTES, B_BYTES = BM * ROW_BYTES, BN * ROW_BYTES
STAGE_BYTES = A_BYTES + B_BYTES
"""One k-tile of both operands, 32 KiB."""
ALIGNMENT = 1024
"""TMA swizzles by address bits 7 … 9, so a tile starts at a multiple of 1,024 bytes."""
BARRIERS = 64
"""Bytes for barriers, 8 each."""


@jit(device=True)
def aligned(address):
    """The first multiple of ALIGNMENT at or behind a shared address."""
    return (address + (ALIGNMENT - 1)) & -ALIGNMENT


@jit(device=True)
def first_corner(m, P, Q, stride, top, left):
    """(image, row, column) of the source at which the window of output pixel m begins; negative in the padding."""
    line = m // Q
    image = line // P
    return image, (line - image * P) * stride - top, (m - line * Q) * stride - left


def shared_bytes(stages: int) -> int:
    """Dynamic shared memory of a block with `stages` k-tiles: room to align, the k-tiles, barriers."""
    return ALIGNMENT + stages * STAGE_BYTES + BARRIERS


def blocks(g: Correlation) -> int:
    """The grid: tiles of pixels times tiles of channels."""
    return ceil_div(g.GM, BM) * ceil_div(g.K, BN)


def operand_maps(call: Call, g: Correlation) -> tuple[np.ndarray, np.ndarray]:
    """Tensor maps of x, whose im2col TMA makes, and of the filters as a matrix (K, R·S·C)."""
    lower, upper = g.corners
    return (
        tensor_maps.encode_im2col(call.ins[0], (g.N, g.H, g.W, g.C), g.C, lower, upper, g.stride, BK, BM),
        tensor_maps.encode_tiled(call.packed, (g.GK, g.K), (BK, BN)),
    )


def extents(g: Correlation) -> tuple[np.int32, ...]:
    """What a kernel of steps 2 … 6 must know: GM, C, P, Q, K, S, stride, top, left, tiles of channels, k-tiles."""
    found = (g.GM, g.C, g.P, g.Q, g.K, g.S, g.stride, g.top, g.left, ceil_div(g.K, BN), g.GK // BK)
    return tuple(np.int32(value) for value in found)


def words(y: Any) -> Any:
    """The bfloat16 of y, two to a word: a thread writes its two neighbouring channels at once."""
    return y.view(np.uint32)


def tma_step(kernel: Any, threads: int, stages: int) -> Impl:
    """The implementation of steps 2 … 5."""

    def bind(call: Call) -> list[Launch]:
        g = correlation(call)
        maps = tensor_maps.upload(*operand_maps(call, g))
        args = (maps, words(call.outs[0]), *extents(g))
        return [Launch(kernel, blocks(g), threads, args, shared_bytes(stages), keep=(maps, call.ins[0], call.packed))]

    return step(bind)


def step(bind: Callable[[Call], list[Launch]], biased: bool = False) -> Impl:
    """`conv_fprop` without a bias (`biased`: `conv_relu_fprop`) in bfloat16, images NHWC, filters packed as rows (k) of (r, s, c)."""

    def supports(call: Call, target: Target) -> str | None:
        if not biased and len(call.in_shapes) > 2:
            return "a bias is added in step 6"
        channels = correlation(call).C
        return refusal(call) or (f"{channels} channels to sum over are not a multiple of {BK}" if channels % BK else None)

    return Impl(bind, supports=supports, pack=pack, packed="bfloat16", needs=(9, 0), exactly=True)
