"""Convolutions with their EvoNorm by Winograd's F(2×2, 3×3) in one kernel (nbcnn/ops/conv/onchip), bound; the ends are conv_onchip_end.py's.

The ops are those of conv.py. An image's statistics are made by the block that has it; small batches have it in parts, whose blocks tell each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, shared_of_block
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv import im2col
from nbcnn.ops.conv.onchip import conv as onchip
from nbcnn.ops.conv.onchip.conv import OnchipTile, form_of
from nbcnn.ops.conv.onchip.form import FILTERS, THREADS, Form
from nbcnn.ops.conv.onchip.kernel import onchip_kernel
from nbcnn.ops.conv.winograd_transform import filters_traffic
from nbcnn.ops.evonorm import traffic
from nbcnn.ops.evonorm.conv import by_end, convolution_of, group_of
from nbcnn.ops.evonorm.conv_onchip_end import norm_end, spare_of
from nbcnn.ops.traffic import Traffic, ceil_div
from nbcnn.shapes import ConvShape, numel


def _shape(call: Call) -> ConvShape:
    return im2col.shape_of(convolution_of(call))


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    reason = onchip.supports(convolution_of(call))
    if reason is None and FILTERS % group_of(call):
        return f"groups of {group_of(call)} channels do not divide the {FILTERS} of a block"
    if reason is None and (used := form_of(_shape(call), 1, spare_of(group_of(call))).shared_bytes) > shared_of_block():
        return f"lines of {_shape(call).W} pixels and statistics take {used} bytes of shared memory, a block has {shared_of_block()}"
    return reason


def candidates(call: Call, multiprocessors: int) -> list[OnchipTile]:
    """Whole images, and where a batch leaves multiprocessors without one, as many parts as give each of them one: those first."""
    c = _shape(call)
    whole = OnchipTile(1, min(c.N, multiprocessors))
    share = ceil_div(form_of(c, 1).rounds, max(multiprocessors // c.N, 1))
    parts = ceil_div(form_of(c, 1).rounds, share)
    return [OnchipTile(parts, c.N * parts), whole] if parts > 1 else [whole]


def tile(call: Call, multiprocessors: int) -> OnchipTile:
    """The first of `candidates`."""
    return candidates(call, multiprocessors)[0]


@cache
def _kernel(form: Form, group: int, end: str) -> Any:
    return onchip_kernel(form, norm_end(form, group, end))


def _form(call: Call) -> Form:
    return form_of(_shape(call), call.tile.parts, spare_of(group_of(call)))


def launches(call: Call, end: str, z: Any = None, y: Any = None, running: Any = None, shift: Any = None, std: Any = None) -> list[Launch]:
    """Filters to points, then the convolution that ends in `end`; arrays that this end does not touch may be left out.
    Without z, what would be z lies in y's place until y is known.

    Raises ValueError if parts would wait for blocks that take them only later.
    """
    c, form, group, parts = _shape(call), _form(call), group_of(call), call.tile.parts
    if parts > 1 and call.tile.blocks != c.N * parts:
        raise ValueError(f"{c.N} images in {parts} parts by {call.tile.blocks} blocks: parts wait for each other, so each has a block of its own")
    x, _, b, gamma, beta, v, *_ = call.ins
    u, filters = onchip.points_of_filters(call, call.packed, c)
    packets = constant(np.zeros(4 * c.N * (FILTERS // group) * parts if parts > 1 else 1, np.int32))
    z = y if z is None else z
    running, y, shift, std = (b if array is None else array for array in (running, y, shift, std))  # None is never looked at
    args = (x, u, b, gamma, beta, v, running, z, y, shift, std, packets, np.int32(c.N), np.float32(call.attrs["eps"]))
    kernel = _kernel(form, group, end)
    return [filters, Launch(kernel, call.tile.blocks, THREADS, args, form.shared_bytes, name=call.op, together=parts > 1)]


def bytes_of(call: Call) -> list[Traffic]:
    """Bytes of every launch: the convolution's, z back and y where it is normalised, the groups' statistics and parts' packets."""
    c, form = _shape(call), _form(call)
    main, image, sets = onchip.main_traffic(c, form), 4 * numel(c.y_shape), c.N * (FILTERS // group_of(call))
    again = 0 if call.op == "conv_evonorm_b0_fprop" else image
    kept = traffic.STATISTICS * sets if call.op.endswith("_fprop") else 0
    packets = traffic.PACKET * sets * form.parts if form.parts > 1 else 0
    made = Traffic(main.read + again + packets * form.parts, main.write + again + kept + packets, main.distinct + again + packets)
    first = [filters_traffic("winograd", c.C, c.K), made]
    return [*first, *traffic.b0_behind_planes(call, image=1)] if call.op == "conv_evonorm_b0_fprop" else first


def _implementation(bind: Callable[[Call], list[Launch]]) -> Impl:
    return Impl(
        bind,
        lambda call: onchip.scratch(convolution_of(call)),
        supports,
        tile,
        lambda call: im2col.pack_fprop(convolution_of(call)),
        candidates=candidates,
        traffic=bytes_of,
        needs=(9, 0),
        exactly=True,
    )


OPS = {op: _implementation(bind) for op, bind in by_end(launches).items()}
"""The fused ops of 3×3 to 64 channels on Hopper."""
