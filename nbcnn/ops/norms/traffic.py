"""Bytes that the EvoNorm kernels ask memory for (`nbcnn.ops.kernel.traffic`).

Left out besides what that file names: the first element of a plane, which every thread loads to take it off the others, and what idle
threads load in its place (an element that they never use). Statistics and partial sums of planes count once for every kernel that
reads them: a thread's own copy of a number of its plane is a scalar.
"""

from __future__ import annotations

from nbcnn.gpu.language import SIMULATOR
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs, size
from nbcnn.ops.norms.b0_batch import by_every_block
from nbcnn.ops.norms.held import slabs_of
from nbcnn.plan.shapes import numel

STATISTICS = 8
"""Bytes of shift and std of a plane, group or channel."""
MESSAGE = 16
"""Bytes of a message from block to block (`nbcnn.ops.ptx.grid`)."""


def s0_fprop(call: Call) -> list[Traffic]:
    """x once where it is held, else three times; y, and the groups' statistics."""
    x = size(call, "in", 0)
    return [Traffic(x if call.tile is not None else 3 * x, outputs(call), x)]


def s0_grads(call: Call) -> list[Traffic]:
    """x and dy once where they are held, else twice; dx, and three sums of planes, which somebody adds over the images."""
    n, c = call.in_shapes[1][:2]
    both, sums, dx, grads = size(call, "in", 0) + size(call, "in", 1), 12 * n * c, size(call, "out", 0), 12 * c
    kept = STATISTICS * numel(call.in_shapes[4])
    if call.tile is not None:
        return [Traffic(both + kept + sums, dx + sums + grads, both + kept + sums)]
    return [Traffic(2 * both + kept, dx + sums, both + kept), once(sums, grads)]


def b0_fprop(call: Call) -> list[Traffic]:
    """One launch: x once; every slab's messages by each of its blocks. Else planes (x, or twice), channels, y."""
    x, y = size(call, "in", 0), size(call, "out", 0)
    n, c = call.in_shapes[0][:2]
    planes, held = STATISTICS * n * c, call.tile
    if held is not None and held.together:
        messages = MESSAGE * n * c
        return [Traffic(x + n // held.images * messages, y + planes + messages + 3 * 4 * c, x + messages)]
    return [Traffic(x if held is not None else 2 * x, planes, x), *b0_behind_planes(call)]


def b0_behind_planes(call: Call, image: int = 0) -> list[Traffic]:
    """Channels: every plane's shift twice, its std and twice the first element of x; then y from x.

    One launch where every block makes its channels' statistics: it reads of all their planes shift, std and first element. image: of the
    call's tensors the one that is normalised; behind a convolution it is the output, in slabs of one image.
    """
    shape = (call.in_shapes if image == 0 else call.out_shapes)[0]
    n, c = shape[:2]
    y, planes = size(call, "out", 0), n * c
    first = element(call, "out") * planes
    held = call.tile if image == 0 else next(iter([] if SIMULATOR else slabs_of(shape, call.layout, 1, (1,), 1)), None)
    if held is not None and by_every_block(shape, held):
        return [Traffic(y + 4 * planes + n // held.images * (8 * planes + first), y + 12 * c, y + 8 * planes)]
    return [Traffic(12 * planes + 2 * first, 12 * c, 8 * planes + first), once(y + 4 * planes, y)]


def b0_infer(call: Call) -> list[Traffic]:
    """One launch where x is held, else planes and y."""
    x, y = size(call, "in", 0), size(call, "out", 0)
    n, c = call.in_shapes[0][:2]
    if call.tile is not None:
        return [once(x, y)]
    return [Traffic(2 * x, STATISTICS * n * c, x), once(x + 4 * n * c, y)]


def b0_grads(call: Call) -> list[Traffic]:
    """One launch: x and dy once (dy twice if it is not held), a message of every plane by each of its channel's blocks, both by one of them.
    Else sums of planes, of channels, dx."""
    n, c = call.in_shapes[0][:2]
    dy, x, dx = size(call, "in", 0), size(call, "in", 1), size(call, "out", 0)
    planes, held = 4 * n * c, call.tile
    kept = STATISTICS * n * c
    if held is not None and held.together:
        again = dy if held.tensors == 1 else 0
        messages = MESSAGE * n * c
        read = x + dy + again + kept + 2 * messages + n // held.images * messages
        return [Traffic(read, dx + 2 * messages + 12 * c, x + dy + kept + 2 * messages)]
    sums = Traffic(x + dy + planes, 5 * planes, x + dy + planes)
    return [sums, once(4 * planes, 16 * c), Traffic(x + dy + kept + planes, dx, x + dy + kept + planes)]
