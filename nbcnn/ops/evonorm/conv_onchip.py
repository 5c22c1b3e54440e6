"""Convolutions with their EvoNorm by Winograd's F(2×2, 3×3) in one kernel (nbcnn/ops/conv/onchip), bound; the ends are conv_onchip_end.py's.

The ops are those of conv.py. Blocks that have rounds of an image tell each other its statistics, so all of them are on the GPU at the same time:
two such launches must not run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, multiprocessors_of_gpu, shared_of_block
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv import im2col
from nbcnn.ops.conv.onchip import conv as onchip
from nbcnn.ops.conv.onchip.conv import OnchipTile, form_of
from nbcnn.ops.conv.onchip.form import FILTERS, KEPT, THREADS, Form
from nbcnn.ops.conv.onchip.kernel import onchip_kernel
from nbcnn.ops.conv.winograd_transform import filters_traffic
from nbcnn.ops.evonorm import traffic
from nbcnn.ops.evonorm.conv import by_end, convolution_of, group_of
from nbcnn.ops.evonorm.conv_onchip_end import norm_end, spare_of
from nbcnn.ops.traffic import Traffic
from nbcnn.shapes import ConvShape, numel


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
    return onchip_kernel(form, norm_end(form, group, end))


def _form(call: Call) -> Form:
    """With as much room behind the products as there is for pixels that wait to be normalised."""
    plain = form_of(_shape(call))
    bare = replace(plain, spare=spare_of(plain, group_of(call)))
    if call.op == "conv_evonorm_b0_fprop":
        return bare
    roomy = (replace(bare, behind=behind) for behind in range(KEPT, 0, -1))
    return next((form for form in roomy if form.shared_bytes <= shared_of_block()), bare)


def launches(call: Call, end: str, z: Any = None, y: Any = None, running: Any = None, shift: Any = None, std: Any = None) -> list[Launch]:
    """Filters to points, then the convolution that ends in `end`; arrays that this end does not touch may be left out.

    Raises ValueError if rounds of an image would wait for blocks that take them only later, or a block for a round.
    """
    c, form, group = _shape(call), _form(call), group_of(call)
    onchip.check_blocks(call.tile.blocks, c.N * form.rounds)
    if call.tile.blocks < form.rounds:
        raise ValueError(f"{call.tile.blocks} blocks for the {form.rounds} rounds of an image, which wait for each other")
    x, _, b, gamma, beta, v, *_ = call.ins
    u, filters = onchip.points_of_filters(call, call.packed, c)
    packets = constant(np.zeros(4 * c.N * form.rounds * (FILTERS // group), np.int32))
    z, running, y, shift, std = (b if array is None else array for array in (z, running, y, shift, std))  # None is never looked at
    args = (x, u, b, gamma, beta, v, running, z, y, shift, std, packets, np.int32(c.N), np.float32(call.attrs["eps"]))
    kernel = _kernel(form, group, end)
    return [filters, Launch(kernel, call.tile.blocks, THREADS, args, form.shared_bytes, name=call.op, together=True)]


def bytes_of(call: Call) -> list[Traffic]:
    """Bytes of every launch: the convolution's, y beside z in training, the groups' statistics and rounds' packets.

    Of a round's packets every round of the image reads all; of B0's in training only the first.
    """
    c, form = _shape(call), _form(call)
    image, sets, training, planes = 4 * numel(c.y_shape), c.N * (FILTERS // group_of(call)), call.op.endswith("_fprop"), "b0_fprop" in call.op
    main = onchip.main_traffic(c, form)
    both = image if training and not planes else 0
    kept = traffic.STATISTICS * sets if training else 0
    packets = traffic.PACKET * sets * form.rounds
    made = Traffic(main.read + packets * (1 if planes else form.rounds), main.write + both + kept + packets, main.distinct + packets)
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


OPS = {op: _implementation(bind) for op, bind in by_end(launches).items()}
"""The fused ops of 3×3 to 64 channels on Hopper."""
