"""The plain convolution, bound: which shapes, how rounds are shared by blocks, launches, bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.ops.conv.onchip.finish import PLAIN
from nbcnn.ops.conv.onchip.form import CHANNELS, FILTERS, POINTS, STRIPS, THREADS, TURNS, Form, across_of
from nbcnn.ops.conv.onchip.kernel import onchip_kernel
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.winograd import engine as winograd
from nbcnn.ops.conv.winograd.transform import filters_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.shapes import ConvShape, numel

_CHANNELS = CHANNELS * TURNS
"""What the source's channels are a multiple of: every filling warp brings as many stages of a round."""
LEAST_CHANNELS, LEAST_TILES = 64, 64 * 14 * 14
"""Fewer channels have not been timed, nor have fewer tiles than those of 64 images of 28×28 (bench/LOG.md), the only size that was."""


@dataclass(frozen=True)
class OnchipTile:
    """Rounds of all images, which `blocks` blocks take in turn."""

    blocks: int


def form_of(c: ConvShape) -> Form:
    """What images freeze into the kernel."""
    return Form(c.H, c.W, c.C, across_of(c.W))


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    c = im2col.shape_of(call)
    if call.layout != "NHWC":
        return "the Winograd kernels read images stored NHWC"
    if (c.R, c.S, c.stride, c.pad) != (3, 3, 1, 1):
        return f"a window of {c.R}×{c.S}, stride {c.stride}, padding {c.pad} is not 3×3, 1, 1"
    if c.K != FILTERS or c.C % _CHANNELS or c.C < LEAST_CHANNELS:
        return f"{c.C} to {c.K} channels: a block has {FILTERS} filters, and takes {_CHANNELS} channels at a time, {LEAST_CHANNELS} or more"
    if c.H % 2 or c.W % 2 or not across_of(c.W):
        return f"an image of {c.H}×{c.W} is not whole tiles of 2×2, of which {STRIPS} strips make whole lines"
    if c.N * c.H * c.W // 4 < LEAST_TILES:
        return f"{c.N * c.H * c.W // 4} output tiles are fewer than {LEAST_TILES}"
    if max(numel(c.x_shape), numel(c.y_shape)) >= 2**31:
        return "an image tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def tile(call: Call, multiprocessors: int) -> OnchipTile:
    """A block for every multiprocessor, or for every round."""
    c = im2col.shape_of(call)
    return OnchipTile(min(c.N * form_of(c).rounds, multiprocessors))


def scratch(call: Call) -> int:
    """Bytes of the filters' points."""
    c = im2col.shape_of(call)
    return 4 * POINTS * c.C * c.K


def points_of_filters(call: Call, packed: np.ndarray, c: ConvShape) -> tuple[np.ndarray, Launch]:
    """(u, the launch that makes it)."""
    u = call.scratch.view(np.float32)[: POINTS * c.C * c.K]
    return u, winograd.launch_filters("winograd", packed, u, c.C, c.K)


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), w, b -> y (N,64,H,W). Raises ValueError as `check_blocks`."""
    c, (x, _, b), z = im2col.shape_of(call), call.ins, call.outs[0]
    form = form_of(c)
    check_blocks(call.tile.blocks, c.N * form.rounds)
    u, filters = points_of_filters(call, call.packed, c)
    args = (x, u, b, b, b, b, b, z, z, b, b, b, b, b, np.int32(c.N), np.float32(0), np.float32(0))
    return [filters, Launch(onchip_kernel(form, PLAIN), call.tile.blocks, THREADS, args, form.shared_bytes)]


def check_blocks(blocks: int, rounds: int) -> None:
    """Raises ValueError if a block would have no round: it would wait for one."""
    if blocks > rounds:
        raise ValueError(f"{blocks} blocks for {rounds} rounds: every block needs one")


def main_traffic(c: ConvShape, form: Form) -> Traffic:
    """Of the kernel without its end: x four lines and a border for two lines of a strip of tiles, filters once a round, z once."""
    lines = 4 * c.H // 2 - 2
    columns = form.strips_of_line * (2 * form.across + 2) - 2
    rounds = c.N * form.rounds
    x, u, z = 4 * numel(c.x_shape), 4 * POINTS * c.C * c.K, 4 * numel(c.y_shape)
    return Traffic(4 * c.N * c.C * lines * columns + rounds * u, z, x + u)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    c = im2col.shape_of(call)
    return [filters_traffic("winograd", c.C, c.K), main_traffic(c, form_of(c))]


OPS = {"conv_fprop": Impl(bind, scratch, supports, tile, im2col.pack_fprop, traffic=traffic, needs=(9, 0), exactly=True)}
"""The plain convolution of 3×3 to 64 channels, on Hopper."""
