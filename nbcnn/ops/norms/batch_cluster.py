"""Batch normalisation in one launch on Hopper: a cluster of blocks holds some channels of the whole batch in shared memory.

The ops are those of batch.py, and so are the numbers: y and dx are made by the same formulas. A block of a cluster has its part of the pixels of a
few channels, which it loads once and keeps as they are stored; sums of a block become sums of the cluster through its shared memory
(`nbcnn.ops.ptx.cluster`), every block adds them in the order of the ranks, and y or dx is made of what is held. Each tensor moves once, where three
launches read x (and dy) twice and wait for each other twice.

It serves what fits: images of few pixels and many channels, the last layers of a network. `tile_of` says which; the rest are batch.py's launches.
Needs compute capability 9.0 and no other: later GPUs have other amounts of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.activations.activation import passed_on
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, parts
from nbcnn.ops.kernel.cost import STREAM
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.maps import same
from nbcnn.ops.kernel.stored import kinds, widest
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.norms.batch import FORMS, activation_of, adds, gradients_parts
from nbcnn.ops.norms.batch_cluster_backward import grads_kernel
from nbcnn.ops.norms.batch_cluster_forward import fprop_kernel
from nbcnn.ops.norms.cluster_share import Layout, Tile, layout_of
from nbcnn.plan.op import Op, undone

SHARED, BLOCK_SHARED, RESERVED = 228 << 10, 227 << 10, 1 << 10
"""Bytes of shared memory of a multiprocessor, of a block at most, and that the driver keeps of every block."""
CLUSTERS = {8: 15, 6: 16, 5: 23, 4: 31}
"""Blocks of a cluster (8 is what every GPU with clusters takes), and how many such clusters of one block per multiprocessor are on an H100 or H200 at
once: a cluster stays within one of the GPU's eight groups of multiprocessors, of which seven have 16 or 18 and one fewer
(cuOccupancyMaxActiveClusters says 15 clusters of 8 on an H200; an H100 took sixteen of 6 at once, and not sixteen of 7). Counted are groups of 16, as
not every GPU has those of 18: an H100 took eighteen clusters of 6 in two waves, 36.5 µs where sixteen took 21.2. The others follow from such groups.
Where a GPU has room for fewer, they come in more waves."""
COLUMNS = (16, 8, 4, 2)
"""Vectors of 16 bytes that a block has of a pixel: rows of 32 bytes at least, which is what memory moves at once."""
FEWEST = 64
"""Blocks of a launch at least."""
WAVES = 2
"""How many times in turn the blocks may fill the GPU: more than that is a stream, which three launches with more loads in flight do as well."""
WAVE_COST = 1500
"""What a wave of clusters costs besides its loads, in vectors of a multiprocessor."""
_REGISTERS = {1: 80, 2: 128}
"""Registers of a thread at most, by the tensors that a kernel holds: one forward, two backward."""


def together(nbytes: int, tensors: int, threads: int) -> int:
    """Blocks that share a multiprocessor, by their shared memory and registers."""
    return min(SHARED // (nbytes + RESERVED), 65536 // (_REGISTERS[tensors] * threads))


def candidates_of(shape: Shape, kind: str, tensors: int, layout: str, waves: int = WAVES) -> list[Tile]:
    """The tiles that images of logical `shape` (N,C,H,W) stored as `kind` fit into, `tensors` of which are held; the likely fastest first.

    First those of which a multiprocessor has the fewest vectors of a tensor in all the waves that clusters take: sixteen clusters of 6 come at once,
    of 8 they take two waves, which for a gradient of 512×512×4×4 is 16.5 instead of 20.0 µs (H100, bf16). Blocks that share a multiprocessor gain
    nothing, and of 512 threads they have more loads in flight than of 256. They follow from the shape alone, so that every GPU makes the same bits;
    a GPU with fewer multiprocessors than an H200 may take more than `waves`.
    """
    n, channels, h, w = shape
    width, made = widest(kind), []
    for cluster, at_once in CLUSTERS.items():
        pixels = ceil_div(n * h * w, cluster)
        for columns in COLUMNS:
            groups = channels // (columns * width)
            if layout != "NHWC" or channels % (columns * width) or groups * cluster < FEWEST:
                continue
            for threads in (512, 256):
                tile = Tile(columns, threads // columns, cluster)
                nbytes = layout_of(tile, width, pixels, tensors).nbytes
                places = at_once * together(nbytes, tensors, threads)
                if nbytes <= BLOCK_SHARED and groups <= waves * places and (threads == 256 or tile.rows <= pixels):
                    made.append(((ceil_div(groups, at_once) * (pixels * columns + WAVE_COST), -threads), tile))
    return [tile for _, tile in sorted(made, key=lambda each: each[0])]


def _blocks(tile: Tile, channels: int, width: int) -> int:
    return channels // (tile.columns * width) * tile.cluster


def _asked(call: Call) -> tuple[Shape, str, int, str, int]:
    """The images of a call, how they are stored, how many of them are held, their layout, and in how many waves clusters may come.

    Gradients at the end of a residual block, which move five tensors or six, lose in two: 28.0 µs for 512×512×4×4 where three launches take 27.7, and
    one wave 20.6.
    """
    tensors = 2 if call.op.direction == "grads" else 1
    waves = 1 if tensors == 2 and adds(call.op) else WAVES
    return call.in_shapes[tensors - 1], kinds(call)[0], tensors, call.layout, waves


def candidates(call: Call, target: Target) -> Sequence[Tile]:
    return candidates_of(*_asked(call))


def tile_of(call: Call, target: Target) -> Tile | None:
    """The tile of a call, or None where its images do not fit."""
    return next(iter(candidates(call, target)), None)


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why the call is not one launch."""
    if reason := maps.supports(call, target):
        return reason
    shape, kind, tensors, layout, waves = _asked(call)
    least = COLUMNS[-1] * widest(kind)
    if layout != "NHWC":
        return f"clusters of blocks read NHWC, not {layout}"
    if shape[1] % least:
        return f"{shape[1]} channels are no multiple of {least}, the 32 bytes of a block's rows"
    if shape[1] // least * max(CLUSTERS) < FEWEST:
        return f"{shape[1]} channels make fewer than {FEWEST} blocks"
    if not candidates_of(shape, kind, tensors, layout, waves):
        return f"the shared memory of clusters in {waves} wave{'s' * (waves > 1)} at most holds no batch of {'×'.join(map(str, shape))}"
    return None


def _shared(call: Call) -> tuple[Tile, str, int, Layout, tuple[np.int32, ...]]:
    """The tile of a call, how images are stored, its grid, its shared memory, and (M, C, pixels of a block, elements that are held of a tensor)."""
    (n, channels, h, w), kind, tensors, *_ = _asked(call)
    tile: Tile = call.tile or candidates_of(*_asked(call))[0]
    width = widest(kind)
    pixels = ceil_div(n * h * w, tile.cluster)
    layout = layout_of(tile, width, pixels, tensors)
    numbers = (n * h * w, channels, pixels, layout.held)
    return tile, kind, _blocks(tile, channels, width), layout, tuple(np.int32(each) for each in numbers)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    tile, kind, grid, layout, numbers = _shared(call)
    activation, plus = activation_of(call.op)
    x, weight, bias = call.ins[:3]
    eps, momentum = (np.float32(call.attrs[name]) for name in ("eps", "momentum"))
    args = (x, call.ins[5] if plus else x, weight, bias, *call.outs, *numbers, eps, momentum)
    args += call.channels("in", 0), call.channels("out", 0)
    function = activation.of(call.attrs) if activation else same
    return [Launch(fprop_kernel(kind, tile, layout.flight, function, plus), grid, tile.threads, args, layout.nbytes)]


def bind_grads(call: Call) -> list[Launch]:
    """One launch."""
    tile, kind, grid, layout, numbers = _shared(call)
    activation, plus = activation_of(call.op)
    dy, x = call.ins[:2]
    two = len(call.ins) > 6
    if plus:
        y, weight, mean, rstd = call.ins[2:6]
        bias, activation = weight, None
        dx, dz, dweight, dbias = call.outs
    else:
        weight, bias, mean, rstd = call.ins[2:6]
        y, (dx, dweight, dbias) = dy, call.outs
        dz = dx
    args = (dy, call.ins[6] if two else dy, x, y, weight, bias, mean, rstd, dx, dz, dweight, dbias, *numbers)
    args += call.channels("in", 0), call.channels("in", 1), call.channels("in", 6 if two else 0)
    gradient, gates = (activation.behind(call.attrs), activation.gates) if activation else (passed_on, True)
    return [Launch(grads_kernel(kind, tile, layout.flight, gradient, gates, plus, two), grid, tile.threads, args, layout.nbytes)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """x, and what is added to it; y; of every channel four numbers read and written."""
    plus, channel = size(call, "in", 5) if adds(call.op) else 0, size(call, "in", 1)
    return [once(size(call, "in", 0) + plus + 4 * channel, size(call, "out", 0) + 4 * channel)]


def traffic_grads(call: Call) -> list[Traffic]:
    """dy and x, of a residual block y and perhaps a second gradient too; dx, of a residual block the masked gradient too."""
    tensors = [at for at, shape in enumerate(call.in_shapes) if len(shape) == 4]
    images, channel = sum(size(call, "in", at) for at in tensors), size(call, "out", len(call.out_shapes) - 1)
    written = sum(size(call, "out", at) for at, shape in enumerate(call.out_shapes) if len(shape) == 4)
    return [once(images + 4 * channel, written + 2 * channel)]


BLOCK_RATE = 2.2e4
"""Bytes a microsecond that a multiprocessor moves, whose one or two blocks first load and then store: fitted to 36 norms on an H100."""


def estimate(call: Call, traffic: Callable[[Call], Sequence[Traffic]]) -> float:
    """Microseconds: in each wave of clusters a multiprocessor moves what its blocks hold, however few the others are."""
    tile, _, grid, layout, _ = _shared(call)
    at_once, tensors = CLUSTERS[tile.cluster], _asked(call)[2]
    places = at_once * together(layout.nbytes, tensors, tile.threads)
    moved = sum(each.logical for each in traffic(call)) / grid
    waves, rest = divmod(grid // tile.cluster, places)
    blocks = waves * (places // at_once) + ceil_div(rest, at_once)
    return STREAM.launch + blocks * moved / BLOCK_RATE


def _impl(bind: Any, traffic: Any, pitched: Any) -> Impl:
    named: dict[str, Any] = {"needs": (9, 0), "exactly": True, "engine": "cluster"}
    named["estimate"] = lambda call, target: estimate(call, traffic)
    return Impl(bind, supports=supports, tile=tile_of, candidates=candidates, traffic=traffic, pitched=pitched, **named)


OPS = dict.fromkeys((Op("batchnorm", "fprop", after=form) for form in FORMS), _impl(bind_fprop, traffic_fprop, parts(ins=(0,), outs=(0,))))
OPS |= dict.fromkeys((Op("batchnorm", "grads", before=undone(form)) for form in FORMS), _impl(bind_grads, traffic_grads, gradients_parts))
