"""Blocks of one launch that wait for each other: integer counters in global memory, and loads that no stale cache line can serve.

`arrive` counts a block in and says whether it is the last; `meet` waits until all have come. Only blocks that are on the GPU at the same
time may meet: a launch whose blocks meet must fit on it at once. Counters are two int32 a meeting place, zero before the first launch;
every launch leaves the first at zero, so nothing has to be cleared between launches. Sums stay deterministic: the counters decide when
a block goes on, never in which order anything is added. The simulator runs one block after another, so there nothing may meet.
"""

from __future__ import annotations

import numpy as np

from nbcnn.cuda import SIMULATOR, cuda, i4, i8, jit, types

if SIMULATOR:

    @cuda.jit(device=True)
    def fresh(array, offset):
        return array[offset]

    @cuda.jit(device=True)
    def _generation(counters, place):
        return counters[2 * place + 1]

    @cuda.jit(device=True)
    def send(packets, at, turn, a, b):
        packets[4 * at], packets[4 * at + 2] = np.array([a, b], np.float32).view(np.int32)
        packets[4 * at + 1] = packets[4 * at + 3] = turn

    @cuda.jit(device=True)
    def receive(packets, at, turn):
        while packets[4 * at + 1] != turn or packets[4 * at + 3] != turn:
            pass
        return tuple(np.array([packets[4 * at], packets[4 * at + 2]], np.int32).view(np.float32))
else:
    from nbcnn.cuda import f4
    from nbcnn.ops.ptx.asm import byte_address_global, instruction

    _relaxed = instruction("ld_relaxed_gpu", "ld.relaxed.gpu.global.f32 $0, [$1];", f4, (types.uint64,))
    _acquire = instruction("ld_acquire_gpu", "ld.acquire.gpu.global.s32 $0, [$1];", i4, (types.uint64,))

    # Eight bytes are written and read as one: a number and the turn that it is of. So who sees the turn has the number, with no fence.
    _send = instruction(
        "send_packet",
        "{ .reg .b64 p, q; mov.b64 p, {$1, $3}; mov.b64 q, {$2, $3}; st.relaxed.gpu.global.v2.b64 [$0], {p, q}; }",
        None,
        (types.uint64, f4, f4, i4),
    )
    _receive = instruction(
        "receive_packet",
        "{ .reg .b64 p, q; .reg .b32 s, t; .reg .pred old; look: ld.relaxed.gpu.global.v2.b64 {p, q}, [$2];"
        " mov.b64 {$0, s}, p; mov.b64 {$1, t}, q; setp.ne.b32 old, s, $3; @old bra look; setp.ne.b32 old, t, $3; @old bra look; }",
        (f4,) * 2,
        (types.uint64, i4),
    )

    @jit(device=True)
    def send(packets, at, turn, a, b):
        """Two float32 as packet `at` of this turn, to whoever waits for it."""
        _send(byte_address_global(packets) + types.uint64(i8(at) * i8(16)), a, b, turn)

    @jit(device=True)
    def receive(packets, at, turn):
        """The two float32 of packet `at`, when it is of this turn: waits for it."""
        return _receive(byte_address_global(packets) + types.uint64(i8(at) * i8(16)), turn)

    @jit(device=True)
    def fresh(array, offset):
        """array[offset] of a device array of float32, as the last block to write it left it."""
        return _relaxed(byte_address_global(array) + types.uint64(i8(offset) * i8(4)))

    @jit(device=True)
    def _generation(counters, place):
        return _acquire(byte_address_global(counters) + types.uint64(i8(i4(2) * place + i4(1)) * i8(4)))


@jit(device=True)
def arrive(counters, place, count):
    """Count the block in at `place`; 1 in the thread 0 of the last of `count` blocks, else 0. What it wrote before, the last block sees.

    All threads of the block must call it.
    """
    last = i4(0)
    cuda.syncthreads()
    if cuda.threadIdx.x == i4(0):
        cuda.threadfence()
        if cuda.atomic.add(counters, i4(2) * place, i4(1)) == count - i4(1):
            counters[i4(2) * place] = i4(0)
            cuda.threadfence()
            last = i4(1)
    return last


@jit(device=True)
def meet(counters, place, count):
    """Wait until `count` blocks have come to `place`, and see what they wrote before (by `fresh`). All threads of a block must call it."""
    generation = i4(0)
    if cuda.threadIdx.x == i4(0):
        generation = _generation(counters, place)
    if arrive(counters, place, count) == i4(1):
        cuda.atomic.add(counters, i4(2) * place + i4(1), i4(1))
    elif cuda.threadIdx.x == i4(0):
        while _generation(counters, place) == generation:
            pass
        cuda.threadfence()
    cuda.syncthreads()
