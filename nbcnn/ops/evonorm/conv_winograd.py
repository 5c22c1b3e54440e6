"""Convolutions with their EvoNorm by Winograd's F(2×2, 3×3) in fp32, bound: shapes, slabs, launches (last kernel: conv_winograd_kernel.py).

The ops are those of conv.py. Everything up to the products is the plain convolution's (nbcnn/ops/conv/winograd.py); the last kernel has all
pixels of a slab of channels of an image, so that the norm costs no memory traffic but the second of the images z and y where both are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nbcnn.cuda import SIMULATOR, constant
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv import im2col, winograd
from nbcnn.ops.conv.composed import inner, operands
from nbcnn.ops.conv.winograd import WinogradTile
from nbcnn.ops.evonorm import traffic
from nbcnn.ops.evonorm.conv import behind_planes
from nbcnn.ops.evonorm.conv_winograd_kernel import HELD, PIXELS, Slab, image_norm_kernel
from nbcnn.ops.evonorm.held import THREADS
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.traffic import Traffic, ceil_div

_CHANNELS = (16, 8, 32, 64)
"""Channels of a slab, likely fastest first: 64 neighbouring bytes of a point; a sector; 128."""
_SLOTS = (1, 2)
_LARGEST_BLOCK, _MOST_BLOCKS, _SCHEDULERS = 1024, 16, 4
_REGISTERS, _WARPS = 16384 // WARP, 16
"""Of a scheduler, registers of a lane and warps (compute capability 8.0 and 9.0; others have as many registers, so that a block still fits)."""
_OTHERS, _GRANULE = 32, 8
"""Registers of a thread besides what it holds, for points in flight and addresses; they are given out in eights."""


@dataclass(frozen=True)
class NormTile(WinogradTile):
    """A Winograd tile with what a block of the last kernel holds (`Slab`).

    together: 1 if all blocks of the last kernel fit on the GPU at once, so that EvoNorm-B0 in training is all in it.
    """

    channels: int = 16
    slots: int = 1
    blocks: int = 1
    together: int = 0


def _convolution(call: Call) -> Call:
    """The plain convolution inside the call."""
    geometry = {name: call.attrs[name] for name in ("stride", "pad")}
    return inner(call, "conv_fprop", operands(call, "in")[:3], operands(call, "out")[:1], attrs=geometry)


def group_of(call: Call) -> int:
    """Channels of a group: 1 for B0, whose planes are their own."""
    return int(call.in_shapes[1][0] // call.attrs["groups"]) if "groups" in call.attrs else 1


def slabs(call: Call) -> list[Slab]:
    """What a block may hold, the likely fastest first; empty where no block holds an image's pixels of whole groups.

    Two blocks on a multiprocessor come before one: while one makes statistics and stores, the other loads.
    """
    c, group, made = im2col.shape_of(_convolution(call)), group_of(call), []
    for channels in _CHANNELS:
        for slots in _SLOTS if c.K % channels == channels % group == 0 else ():
            one = Slab(c.H, c.W, c.K, group, channels, slots, 1)
            blocks = _blocks(one.threads // WARP, slots * HELD + _OTHERS)
            if one.threads <= _LARGEST_BLOCK and blocks and ceil_div(one.items, one.threads) == slots:
                made.append(replace(one, blocks=blocks))
    return sorted(made, key=lambda slab: slab.blocks < 2)  # the others' order stays


def _blocks(warps: int, registers: int) -> int:
    """Blocks of so many warps that a multiprocessor holds if a thread is to have as many registers."""

    def fits(blocks: int) -> bool:
        of_scheduler = ceil_div(warps * blocks, _SCHEDULERS)
        return of_scheduler <= _WARPS and _REGISTERS // of_scheduler // _GRANULE * _GRANULE >= registers

    return max((blocks for blocks in range(1, _MOST_BLOCKS + 1) if fits(blocks)), default=0)


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    reason = winograd.supports(_convolution(call))
    if reason is None and not slabs(call):
        c = im2col.shape_of(_convolution(call))
        return f"no block holds {c.H}×{c.W} pixels of groups of {group_of(call)} of {c.K} channels in registers"
    return reason


def candidates(call: Call, multiprocessors: int) -> list[NormTile]:
    """The plain convolution's tile with every slab; of EvoNorm-B0 in training first those of which all blocks fit on the GPU at once.

    The simulator runs one block after another: there only a test asks for these.
    """
    plain, c, made = winograd.tile(_convolution(call), multiprocessors), im2col.shape_of(_convolution(call)), slabs(call)
    tiles = [NormTile(**asdict(plain), channels=one.channels, slots=one.slots, blocks=one.blocks) for one in made]
    if call.op != "conv_evonorm_b0_fprop" or plain.images < c.N or SIMULATOR:
        return tiles
    threads = {(one.channels, one.slots): one.threads for one in made}

    def at_once(tile: NormTile) -> bool:
        blocks = min(tile.blocks, THREADS // threads[tile.channels, tile.slots])
        return c.N * c.K // tile.channels <= blocks * multiprocessors

    return [*(replace(tile, together=1) for tile in tiles if at_once(tile)), *tiles]


def tile(call: Call, multiprocessors: int) -> NormTile:
    """The first of `candidates`."""
    return candidates(call, multiprocessors)[0]


def launches(
    call: Call, end: str, z: Any = None, y: Any = None, running: Any = None, planes: Sequence[Any] = (None, None), batch: Sequence[Any] = (None, None)
) -> list[Launch]:
    """All launches, of which the last of every few images ends in `end`; arrays that this end does not touch may be left out.

    planes, batch: shift and std of groups of images, and of the batch.
    """
    conv, tile = _convolution(call), call.tile
    c, (_, _, b, gamma, beta, v, *_) = im2col.shape_of(conv), call.ins
    slab = Slab(c.H, c.W, c.K, group_of(call), tile.channels, tile.slots, tile.blocks)
    arrays = tuple(b if array is None else array for array in (running, z, y, *planes, *batch))  # None is never looked at
    together = end == "b0"
    packets = constant(np.zeros(4 * c.N * c.K if together else 1, np.int32))
    numbers = np.float32(call.attrs["eps"]), np.float32(call.attrs.get("momentum", 0))

    def last(m: Any, first: int, tiles: int) -> Launch:
        sizes = np.int32(first // slab.tiles), np.int32(tiles), np.int32(c.N)
        grid, args = tiles // slab.tiles * (c.K // slab.channels), (m, b, gamma, beta, v, *arrays, packets)
        return Launch(image_norm_kernel(slab, end), grid, slab.threads, (*args, *sizes, *numbers), together=together)

    return winograd.transformed(conv, last)


def _s0(call: Call) -> list[Launch]:
    y, z, *planes = call.outs
    return launches(call, "s0", z, y, planes=planes)


def _s0_infer(call: Call) -> list[Launch]:
    return launches(call, "s0 infer", y=call.outs[0])


def _b0(call: Call) -> list[Launch]:
    """All in the last kernel, or its planes' statistics there and two launches more. Raises ValueError if it would wait for a later launch."""
    y, z, shift, std, *batch, _ = call.outs
    if call.tile.together and call.tile.images < call.out_shapes[1][0]:
        raise ValueError(f"blocks of {call.tile.images} images cannot wait for all of {call.out_shapes[1][0]} together")
    if call.tile.together:
        return launches(call, "b0", z, y, call.ins[6], (shift, std), batch)
    return behind_planes(call, launches(call, "planes", z, planes=(shift, std)))


def _b0_infer(call: Call) -> list[Launch]:
    return launches(call, "b0 infer", y=call.outs[0], running=call.ins[6])


def bytes_of(call: Call) -> Sequence[Traffic]:
    """Bytes of every launch: the last ones read points, and write one image tensor, or two and the statistics.

    Blocks that meet write a packet for every plane, and each reads those of its channels.
    """
    conv, training = _convolution(call), call.op.endswith("_fprop")
    c, b0, meets = im2col.shape_of(conv), "groups" not in call.attrs, bool(call.tile.together)
    tensors = 2 if training and (meets or not b0) else 1
    kept = traffic.STATISTICS * c.K // group_of(call) if training else 0
    packets, batch = (traffic.PACKET * c.N * c.K, 3 * 4 * c.K) if meets else (0, 0)

    def last(tiles: int) -> Traffic:
        points, images = 4 * winograd.POINTS * tiles * c.K, tiles * PIXELS // (c.H * c.W)
        write = 4 * PIXELS * tiles * c.K * tensors + images * kept
        return Traffic(points + c.N * packets, write + packets + batch, points + packets)

    made = winograd.traffic_of(conv, last)
    return [*made, *traffic.b0_behind_planes(call, image=1)] if b0 and training and not meets else made


def _implementation(bind: Callable[[Call], list[Launch]]) -> Impl:
    return Impl(
        bind,
        lambda call: winograd.scratch(_convolution(call)),
        supports,
        tile,
        lambda call: im2col.pack_fprop(_convolution(call)),
        candidates=candidates,
        traffic=bytes_of,
    )


OPS = {
    "conv_evonorm_s0_fprop": _implementation(_s0),
    "conv_evonorm_s0_infer": _implementation(_s0_infer),
    "conv_evonorm_b0_fprop": _implementation(_b0),
    "conv_evonorm_b0_infer": _implementation(_b0_infer),
}
"""The fused ops wherever Winograd's convolution runs and a block can hold an image's pixels of whole groups."""
