"""The frame of every map, y[i] = f(a[i], b[i], …): one kernel for up to five inputs, three outputs, and any mix of stored types.

A map's arithmetic is one device function f of float32 scalars; it is frozen into the kernel and inlined. `f(elements …, settings …)` returns one
value, or two or three where the map has as many outputs. *Settings* are numbers that all elements share: numbers of the launch (1/count, a weight),
or what a *prelude* makes of them and of arrays in device memory (the learning rate of this training step). An *indexed* map also asks for the
element's number: `f(i, elements, settings, common)`, elements and settings tuples, so that it may draw random numbers or look up a factor of its
channel. *common* is what `shared(i, settings)` makes once of the first number of four neighbours: one division for their channels, one block of
random words. Where four neighbours have nothing in common, or a function needs many registers, `single` gives a thread one element.

Nothing is reused, so memory bandwidth is the only limit: a thread loads 16 bytes of its first input before it stores any, which keeps enough bytes in
flight, as a multiprocessor has 2,048 threads, and no thread loops. Arrays may alias: an element is read before it is written. Functions take
and give float32, however the operands are stored (stored.py). Operands may be parts of larger ones (`Call.places`): behind each of their rows lie
elements of others, which a kernel of its own skips by one division for four neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.stored import scalar_io, vector_io, widest
from nbcnn.plan.shapes import numel, rows_of

THREADS = 256
SPAN = 4 * THREADS
"""Elements between the vectors of one thread: at each step a block touches SPAN elements in a row."""
BLOCK = 2 * SPAN
"""Elements of one block at most."""
LIMIT = 2**31 - BLOCK
"""Elements of the largest tensor: indices are int32, and the last block looks up to BLOCK elements ahead."""
INPUTS, OUTPUTS, NUMBERS = 5, 3, 8
"""The most inputs, outputs and numbers of a launch that a map may have."""
ABSENT = np.float32(0)


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why a tensor is too large for int32 indices; for every op that stands on this file or windows.py."""
    largest = max(numel(shape) for shape in (*call.in_shapes, *call.out_shapes))
    return None if largest <= LIMIT else f"a tensor of {largest:,} elements is more than 32-bit indices reach ({LIMIT:,})"


def element_part(call: Call, side: str, at: int, alignment: int) -> bool:
    """`Impl.pitched` of maps, for the operands that are read or written element by element: four neighbours lie in one row."""
    shape = (call.in_shapes if side == "in" else call.out_shapes)[at]
    return shape == call.out_shapes[0] and alignment % 16 == 0 and shape[1] * rows_of(shape, call.layout)[1] % 4 == 0


def vectors_of(kind: str) -> int:
    """Groups of four elements that a thread loads of an input stored as `kind`: 16 bytes."""
    return widest(kind) // 4


@jit(device=True)
def place(i, settings):
    """The number of element i of the tensor."""
    return i


@jit(device=True)
def _first_numbers_0(table, state, norm, numbers):
    return ()


@jit(device=True)
def _first_numbers_1(table, state, norm, numbers):
    return (numbers[0],)


@jit(device=True)
def _first_numbers_2(table, state, norm, numbers):
    return numbers[:2]


FIRST_NUMBERS = (_first_numbers_0, _first_numbers_1, _first_numbers_2)
"""The preludes of maps whose settings are the launch's first numbers, by how many there are."""


@cache
def map_kernel(
    name: str,
    function: Any,
    sources: tuple[str, ...],
    targets: tuple[str, ...],
    prelude: Any,
    indexed: bool = False,
    flag: int = -1,
    shared: Any = place,
    single: bool = False,
    mark: int = 1,
    parts: bool = False,
) -> Any:
    """The kernel `name` of the device function `function`; inputs are stored as `sources`, outputs as `targets`.

    prelude  device function (table, state, norm, numbers) -> the settings, a tuple; every thread calls it first.
    indexed  the function takes (i, elements, settings, common) in place of elements and settings one by one.
    flag     state[flag] becomes `mark` if an element of the first output is not finite; −1 does not look.
    shared   device function (i, settings) -> common, of the first of four neighbours, whose number is a multiple of four; with `single` of each.
    single   a thread owns one element.
    parts    operands may be parts of larger ones: behind each row of `width` elements of operand k lie `gap_k` of others.
    """
    READS, WRITES, INDEXED, CHECKED = len(sources), len(targets), indexed, flag >= 0
    WIDE, LANES, VECTORS = not single, 1 if single else 4, 1 if single else vectors_of(sources[0])
    SPAN = LANES * THREADS
    FLOATS, ALL = LANES * VECTORS, VECTORS * SPAN
    kinds_in, kinds_out = (*sources, *("float32",) * INPUTS)[:INPUTS], (*targets, *("float32",) * OUTPUTS)[:OUTPUTS]
    (load4_a, _), (load4_b, _), (load4_c, _), (load4_d, _), (load4_e, _) = map(vector_io, kinds_in)
    (load_a, _), (load_b, _), (load_c, _), (load_d, _), (load_e, _) = map(scalar_io, kinds_in)
    (_, store4_x), (_, store4_y), (_, store4_z) = map(vector_io, kinds_out)
    (_, store_x), (_, store_y), (_, store_z) = map(scalar_io, kinds_out)

    @jit(device=True)
    def at(i, width, gap):
        """Where element i of an operand lies."""
        return i + quotient(i, width) * gap if parts else i

    @jit(device=True)
    def one(p, q, r, s, t, j, i, settings, common):
        """Element j of the thread, i of the tensor: what f makes of it takes the place of what it is made of."""
        if READS == 1:
            elements: Any = (p[j],)
        elif READS == 2:
            elements = (p[j], q[j])
        elif READS == 3:
            elements = (p[j], q[j], r[j])
        elif READS == 4:
            elements = (p[j], q[j], r[j], s[j])
        else:
            elements = (p[j], q[j], r[j], s[j], t[j])
        if INDEXED:
            made = function(i, elements, settings, common)
        else:
            made = function(*(elements + settings))
        if WRITES == 1:
            p[j] = made
        elif WRITES == 2:
            p[j], q[j] = made
        else:
            p[j], q[j], r[j] = made
        return math.isfinite(p[j]) if CHECKED else True

    def body(
        a, b, c, d, e, x, y, z, table, state, norm, count, n0, n1, n2, n3, n4, n5, n6, n7,
        width, gap_a, gap_b, gap_c, gap_d, gap_e, gap_x, gap_y, gap_z,
    ):  # fmt: skip
        p = cuda.local.array(FLOATS, f4)
        q = cuda.local.array(FLOATS, f4)
        r = cuda.local.array(FLOATS, f4)
        s = cuda.local.array(FLOATS, f4)
        t = cuda.local.array(FLOATS, f4)
        settings = prelude(table, state, norm, (n0, n1, n2, n3, n4, n5, n6, n7))
        finite = True
        start = cuda.blockIdx.x * ALL + LANES * cuda.threadIdx.x
        if WIDE and start + ALL - SPAN + 4 <= count:
            for v in range(VECTORS):
                i, j = start + v * SPAN, 4 * v
                p[j], p[j + 1], p[j + 2], p[j + 3] = load4_a(a, at(i, width, gap_a))
                if READS > 1:
                    q[j], q[j + 1], q[j + 2], q[j + 3] = load4_b(b, at(i, width, gap_b))
                if READS > 2:
                    r[j], r[j + 1], r[j + 2], r[j + 3] = load4_c(c, at(i, width, gap_c))
                if READS > 3:
                    s[j], s[j + 1], s[j + 2], s[j + 3] = load4_d(d, at(i, width, gap_d))
                if READS > 4:
                    t[j], t[j + 1], t[j + 2], t[j + 3] = load4_e(e, at(i, width, gap_e))
            for v in range(VECTORS):
                i, j = start + v * SPAN, 4 * v
                common = shared(i, settings)
                for lane in range(4):
                    finite &= one(p, q, r, s, t, j + lane, i + lane, settings, common)
                store4_x(x, at(i, width, gap_x), p[j], p[j + 1], p[j + 2], p[j + 3])
                if WRITES > 1:
                    store4_y(y, at(i, width, gap_y), q[j], q[j + 1], q[j + 2], q[j + 3])
                if WRITES > 2:
                    store4_z(z, at(i, width, gap_z), r[j], r[j + 1], r[j + 2], r[j + 3])
        else:
            for v in range(VECTORS):
                for lane in range(LANES):
                    i = start + v * SPAN + lane
                    if i < count:
                        p[0] = load_a(a, at(i, width, gap_a))
                        if READS > 1:
                            q[0] = load_b(b, at(i, width, gap_b))
                        if READS > 2:
                            r[0] = load_c(c, at(i, width, gap_c))
                        if READS > 3:
                            s[0] = load_d(d, at(i, width, gap_d))
                        if READS > 4:
                            t[0] = load_e(e, at(i, width, gap_e))
                        finite &= one(p, q, r, s, t, 0, i, settings, shared(i - lane, settings))
                        store_x(x, at(i, width, gap_x), p[0])
                        if WRITES > 1:
                            store_y(y, at(i, width, gap_y), q[0])
                        if WRITES > 2:
                            store_z(z, at(i, width, gap_z), r[0])
        # Whichever threads write, they write the same.
        if CHECKED and not finite:
            state[flag] = i8(mark)

    body.__doc__ = f"""{name}: the map of {READS} inputs and {WRITES} outputs.

        grid    ⌈count / block's elements⌉, block 256
        owns    thread: 16 bytes of the first input, in one group of four elements or two that are SPAN apart (the last block: element by element)
        shared  what the prelude takes
        moves   every element of every operand once; 16-byte aligned arrays
        """
    body.__name__ = body.__qualname__ = name
    return jit()(body)


def launch_map(
    name: str,
    function: Any,
    call: Call,
    *numbers: Any,
    reads: int | None = None,
    prelude: Any = None,
    indexed: bool = False,
    flag: int = -1,
    arrays: Sequence[Any] = (),
    shared: Any = place,
    single: bool = False,
    mark: int = 1,
) -> list[Launch]:
    """`function` over all elements of the call: one launch. Shapes and layout do not matter.

    numbers  of the launch, NumPy scalars; without a prelude they are the settings.
    reads    how many of the call's inputs are read element by element, the first ones; None is all.
    flag     as for `map_kernel`, and so is `mark`; the call's last output is then the state.
    arrays   the table, the state and the norm for the prelude; those that are left out are not read.
    The others as for `map_kernel`.
    """
    ins = call.ins[:reads]
    sources = (call.in_dtypes or ("float32",) * len(call.ins))[:reads]
    targets = (call.out_dtypes or ("float32",) * len(call.outs))[: len(call.outs) - (1 if flag >= 0 else 0)]
    count, outs = numel(call.out_shapes[0]), call.outs[: len(targets)]
    width, gaps = _gaps(call, len(ins), len(outs))
    how = (indexed, flag, shared, single, mark, bool(call.places))
    kernel = map_kernel(name, function, tuple(sources), tuple(targets), prelude or FIRST_NUMBERS[len(numbers)], *how)
    unread = ins[0]
    operands = (
        *(*ins, *(unread,) * INPUTS)[:INPUTS],
        *(*outs, *(unread,) * OUTPUTS)[:OUTPUTS],
        *(*arrays, *(unread,) * 3)[:3],
    )
    args = (*operands, np.int32(count), *(*numbers, *(ABSENT,) * NUMBERS)[:NUMBERS], width, *gaps)
    return [Launch(kernel, blocks(count, THREADS if single else vectors_of(sources[0]) * SPAN), THREADS, args)]


def _gaps(call: Call, reads: int, writes: int) -> tuple[np.int32, list[np.int32]]:
    """The elements of a row, and those that lie behind each row of the inputs and the outputs of a map, none of those that it does not have."""
    if not call.places:
        return np.int32(1), [np.int32(0)] * (INPUTS + OUTPUTS)
    shape = call.out_shapes[0]
    each = rows_of(shape, call.layout)[1]
    operands = [*(("in", at) for at in range(INPUTS)), *(("out", at) for at in range(OUTPUTS))]
    there = {("in", at) for at in range(reads)} | {("out", at) for at in range(writes)}
    return np.int32(each * shape[1]), [np.int32(each * (call.channels(*key) - shape[1]) if key in there else 0) for key in operands]


@jit(device=True)
def same(x):
    """x."""
    return x


def copy(call: Call) -> list[Launch]:
    """The call's input copied to its output, element by element in storage order."""
    return launch_map("copy_kernel", same, call)
