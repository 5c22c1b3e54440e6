"""Convolutions with their EvoNorm by Winograd's F(2×2, 3×3) in fp32, bound: shapes, slabs, launches (last kernel: winograd_kernel.py).

The ops are those of two_ops.py. Everything up to the products is the plain convolution's (nbcnn/ops/conv/winograd/engine.py); the last kernel has all
pixels of a slab of channels of an image, so that the norm costs no memory traffic but the second of the images z and y where both are kept.
EvoNorm-B0 in training has its planes' statistics made there, and one more pass for y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.winograd import engine as winograd
from nbcnn.ops.conv.winograd.engine import WinogradTile
from nbcnn.ops.conv_norm.two_ops import B0, by_epilogue, convolution_of, group_of
from nbcnn.ops.conv_norm.winograd_kernel import Slab, image_norm_kernel
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.norms import traffic
from nbcnn.ops.norms.quads import PIXELS
from nbcnn.ops.ptx.shuffle import WARP

_CHANNELS = (32, 64, 16)
"""Channels of a slab, the first that are whole groups and fit: 128 neighbouring bytes of a position; more for a wide group; fewer move slower."""
_OWN = 1024
"""Bytes of shared memory that a block takes for itself; a multiprocessor has about as many more than its largest block."""
_WARPS, _MOST_BLOCKS = 4 * 5, 3
"""Warps of a multiprocessor: a scheduler has 96 registers a thread for five; fewer registers do not hold all values of an item in flight."""


@dataclass(frozen=True)
class NormTile(WinogradTile):
    """A Winograd tile with the channels and threads of a block of the last kernel, `blocks` on a multiprocessor (`Slab`)."""

    channels: int = 32
    threads: int = 256
    blocks: int = 1


def slab_of(call: Call, tile: NormTile) -> Slab:
    """What a tile freezes into the last kernel."""
    c = im2col.shape_of(convolution_of(call))
    return Slab(c.H, c.W, c.K, group_of(call), tile.channels, tile.threads, tile.blocks, int(call.op != B0))


def slabs(call: Call, target: Target) -> list[tuple[int, int, int]]:
    """(channels, threads, blocks) of the last kernel, fewest blocks on a multiprocessor first, because large ones won at every batch
    (docs/log/winograd.md); empty where no block keeps an image's pixels of whole groups.
    """
    c, group, made = im2col.shape_of(convolution_of(call)), group_of(call), []
    for channels in _CHANNELS:
        for blocks in range(1, _MOST_BLOCKS + 1) if c.K % channels == channels % group == 0 else ():
            items = c.H * c.W * channels // (PIXELS * PIXELS)
            fewest = ceil_div(items, WARP * (_WARPS // blocks))
            for turns in (fewest, fewest + 1):
                one = channels, ceil_div(items, WARP * turns) * WARP, blocks
                used = slab_of(call, NormTile(0, 0, 0, 0, 0, 1, *one)).shared_bytes
                if blocks * (used + _OWN) <= target.shared_of_block + _OWN and one not in made:
                    made.append(one)
        if made:
            break
    return made


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    reason = winograd.supports(convolution_of(call), target)
    if reason is None and not slabs(call, target):
        c = im2col.shape_of(convolution_of(call))
        return f"no block keeps {c.H}×{c.W} pixels of groups of {group_of(call)} of {c.K} channels in shared memory"
    return reason


def candidates(call: Call, target: Target) -> list[NormTile]:
    """The plain convolution's tile with every slab. Blocks are few and large, so that images which are not worked on all at once are as many as
    fill the GPU a whole number of times.
    """
    plain, c = winograd.tile(convolution_of(call), target), im2col.shape_of(convolution_of(call))

    def at_once(channels: int, blocks: int) -> int:
        wave = max(blocks * target.multiprocessors * channels // c.K, 1)
        return c.N if plain.images == c.N else ceil_div(c.N, ceil_div(c.N, plain.images // wave * wave or plain.images))

    return [
        NormTile(**asdict(replace(plain, images=at_once(channels, blocks))), channels=channels, threads=threads, blocks=blocks)
        for channels, threads, blocks in slabs(call, target)
    ]


def tile(call: Call, target: Target) -> NormTile:
    """The first of `candidates`."""
    return candidates(call, target)[0]


def launches(call: Call, epilogue: str, z: Any = None, y: Any = None, running: Any = None, shift: Any = None, std: Any = None) -> list[Launch]:
    """All launches; the last one for every few images has the `epilogue`. Arrays that this epilogue does not touch may be left out."""
    (_, _, b, gamma, beta, v, *_), slab, eps = call.ins, slab_of(call, call.tile), np.float32(call.attrs["eps"])
    arrays = tuple(b if array is None else array for array in (running, z, y, shift, std))  # None is never looked at

    def last(m: Any, first: int, tiles: int) -> Launch:
        grid, args = tiles // slab.tiles * (slab.K // slab.channels), (m, b, gamma, beta, v, *arrays)
        sizes = np.int32(first // slab.tiles), np.int32(tiles)
        return Launch(image_norm_kernel(slab, epilogue), grid, slab.threads, (*args, *sizes, eps), slab.shared_bytes)

    return winograd.transformed(convolution_of(call), last)


def bytes_of(call: Call) -> Sequence[Traffic]:
    """Bytes of every launch: the last ones read Winograd-domain values, and write an image tensor, or two, and the groups' statistics."""
    conv, training, b0 = convolution_of(call), call.op.direction == "fprop", "groups" not in call.attrs
    c, tensors = im2col.shape_of(conv), 2 if training and not b0 else 1
    kept = traffic.STATISTICS * c.K // group_of(call) if training else 0

    def last(tiles: int) -> Traffic:
        images = tiles * PIXELS // (c.H * c.W)
        return once(4 * winograd.VALUES * tiles * c.K, 4 * PIXELS * tiles * c.K * tensors + images * kept)

    made = winograd.traffic_of(conv, last)
    return [*made, *traffic.b0_behind_planes(call, image=1)] if b0 and training else made


def _implementation(bind: Callable[[Call], list[Launch]]) -> Impl:
    return Impl(
        bind,
        lambda call: winograd.scratch(convolution_of(call)),
        supports,
        tile,
        lambda call: im2col.pack_fprop(convolution_of(call)),
        candidates=candidates,
        traffic=bytes_of,
        products=lambda call, target: winograd.products(convolution_of(call), target),
        engine="winograd with norm",
    )


OPS = {op: _implementation(bind) for op, bind in by_epilogue(launches).items()}
"""The fused ops wherever Winograd's convolution runs and a block can keep an image's pixels of whole groups, if it makes y of them."""
