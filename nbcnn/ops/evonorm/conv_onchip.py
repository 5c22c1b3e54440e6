"""Convolutions with their EvoNorm by Winograd's F(2×2, 3×3) in one kernel (nbcnn/ops/conv/onchip), bound; the ends are conv_onchip_end.py's and,
of B0 in training on batches of few rounds a block, conv_onchip_batch.py's.

The ops are those of conv.py. Blocks that have rounds of an image tell each other its statistics, so all of them are on the GPU at the same time:
two such launches must not run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant, multiprocessors_of_gpu, shared_of_block
from nbcnn.ops.conv.onchip import conv as onchip
from nbcnn.ops.conv.onchip.conv import OnchipTile, form_of
from nbcnn.ops.conv.onchip.form import FILTERS, STRIPS, THREADS, Form
from nbcnn.ops.conv.onchip.kernel import onchip_kernel
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.winograd.transform import filters_traffic
from nbcnn.ops.conv_norm.two_ops import behind_planes, by_end, convolution_of, group_of
from nbcnn.ops.evonorm.conv_onchip_batch import batch_end, batch_packets, batch_spare_of
from nbcnn.ops.evonorm.conv_onchip_end import norm_end, spare_of
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.norms import traffic
from nbcnn.plan.shapes import ConvShape, numel

_ARRAYS = "z", "y", "running", "shift", "std", "batch_shift", "batch_std"
"""The kernel's arrays that an end may leave alone."""
_MOST_ROUNDS = 8
"""Of a block, if EvoNorm-B0 in training is to be one kernel: with four it is faster than in two, with fourteen slower (bench/LOG.md)."""


def _shape(call: Call) -> ConvShape:
    return im2col.shape_of(convolution_of(call))


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    reason = onchip.supports(convolution_of(call))
    if reason is None and FILTERS % group_of(call):
        return f"groups of {group_of(call)} channels do not divide the {FILTERS} of a block"
    if reason is None and (used := _form(call).shared_bytes) > shared_of_block():
        c = _shape(call)
        return f"images of {c.H}×{c.W} and their statistics take {used} bytes of shared memory, a block has {shared_of_block()}"
    if reason is None and (rounds := _form(call).rounds) > multiprocessors_of_gpu():
        return f"an image has {rounds} rounds, which wait for each other, and the GPU {multiprocessors_of_gpu()} multiprocessors"
    return reason


def tile(call: Call, multiprocessors: int) -> OnchipTile:
    """As of the plain convolution."""
    return onchip.tile(convolution_of(call), multiprocessors)


@cache
def _kernel(form: Form, group: int, end: str) -> Any:
    return onchip_kernel(form, batch_end(form) if end == "b0" else norm_end(form, group, end))


def _form(call: Call) -> Form:
    """With room for what warps have of groups."""
    plain = form_of(_shape(call))
    return replace(plain, spare=spare_of(plain, group_of(call)))


def _in_one(call: Call) -> Form | None:
    """Of EvoNorm-B0 in training: the form whose one kernel also has the batch's statistics and y, if there is room for that."""
    form, blocks = form_of(_shape(call)), call.tile.blocks
    rounds = ceil_div(_shape(call).N * form.rounds, blocks)
    whole = replace(form, spare=batch_spare_of(form, blocks, rounds))
    return whole if form.strips % STRIPS == 0 and rounds <= _MOST_ROUNDS and whole.shared_bytes <= shared_of_block() else None


def launches(call: Call, end: str, **arrays: Any) -> list[Launch]:
    """Filters to points, then the convolution that ends in `end`; arrays that this end does not touch may be left out.

    Raises ValueError if rounds of an image would wait for blocks that take them only later, or a block for a round.
    """
    c, group, form = _shape(call), group_of(call), (_in_one(call) if end == "b0" else None) or _form(call)
    onchip.check_blocks(call.tile.blocks, c.N * form.rounds)
    if call.tile.blocks < form.rounds:
        raise ValueError(f"{call.tile.blocks} blocks for the {form.rounds} rounds of an image, which wait for each other")
    x, _, b, gamma, beta, v, *_ = call.ins
    u, filters = onchip.points_of_filters(call, call.packed, c)
    count = c.N * form.rounds * (FILTERS // group) + (batch_packets(call.tile.blocks) if end == "b0" else 0)
    packets = constant(np.zeros(4 * count, np.int32))
    z, y, running, shift, std, batch_shift, batch_std = (arrays.get(name, b) for name in _ARRAYS)  # what is left out is never looked at
    numbers = np.int32(c.N), np.float32(call.attrs["eps"]), np.float32(call.attrs.get("momentum", 0))
    args = (x, u, b, gamma, beta, v, running, z, y, shift, std, packets, batch_shift, batch_std, *numbers)
    kernel = _kernel(form, group, end)
    return [filters, Launch(kernel, call.tile.blocks, THREADS, args, form.shared_bytes, name=call.op, together=True)]


def _b0_fprop(call: Call) -> list[Launch]:
    """In one kernel, or planes' statistics, then the batch's and y."""
    y, z, shift, std, batch_shift, batch_std, running = call.outs
    if _in_one(call) is None:
        return behind_planes(call, launches(call, "planes", z=z, shift=shift, std=std))
    return launches(call, "b0", z=z, y=y, running=running, shift=shift, std=std, batch_shift=batch_shift, batch_std=batch_std)


def bytes_of(call: Call) -> list[Traffic]:
    """Bytes of every launch: the convolution's, y beside z in training, the groups' statistics and rounds' packets.

    Of a round's packets every round of the image reads all; of B0's in two kernels only the first. In one, z of all but the blocks' last rounds is
    read back, a channel's packets of all blocks by one of them, and its deviation by all. What blocks tell each other, and what comes back, counts
    among the different bytes.
    """
    c, form, blocks = _shape(call), _form(call), call.tile.blocks
    image, sets, training, b0 = 4 * numel(c.y_shape), c.N * (FILTERS // group_of(call)), call.op.endswith("_fprop"), "b0_fprop" in call.op
    main, whole = onchip.main_traffic(c, form), b0 and _in_one(call) is not None
    planes = b0 and not whole
    both = image if training and not planes else 0
    kept = traffic.STATISTICS * (sets + (FILTERS if whole else 0)) + (4 * FILTERS if whole else 0) if training else 0
    packets, batch = traffic.PACKET * sets * form.rounds, traffic.PACKET * batch_packets(blocks) if whole else 0
    heard = packets * (1 if planes else form.rounds) + (traffic.PACKET * FILTERS * (2 * blocks + 1) if whole else 0)
    again = image * (c.N * form.rounds - blocks) // (c.N * form.rounds) if whole else 0
    made = Traffic(main.read + heard + again, main.write + both + kept + packets + batch, main.distinct + packets + batch + again)
    first = [filters_traffic("winograd", c.C, c.K), made]
    return [*first, *traffic.b0_behind_planes(call, image=1)] if planes else first


def _implementation(bind: Callable[[Call], list[Launch]]) -> Impl:
    return Impl(
        bind,
        lambda call: onchip.scratch(convolution_of(call)),
        supports,
        tile,
        lambda call: im2col.pack_fprop(convolution_of(call)),
        traffic=bytes_of,
        needs=(9, 0),
        exactly=True,
    )


OPS = {op: _implementation(bind) for op, bind in (by_end(launches) | {"conv_evonorm_b0_fprop": _b0_fprop}).items()}
"""The fused ops of 3×3 to 64 channels on Hopper."""
