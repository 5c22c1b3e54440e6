"""Blocks of one launch that tell each other something: packets that carry their own turn, a count of arrivals, and loads that no stale
cache line can serve.

A packet is two float32, each beside the number of the launch (its *turn*) in eight bytes that are written and read as one. So who sees the
turn has the number: no fence, no counter, one trip to the second-level cache and one back. Packets are four int32 each, zero before the
first launch, belong to one launch alone, and every launch writes each of them once; the turn is one more than what the packet holds. Only
blocks that are on the GPU at the same time may wait for each other: a launch that does must fit on it at once. The simulator runs one
block after another, so there a block may wait for its own packets only.

`arrive` counts a block in and says whether it is the last, for blocks that need not wait: one int32 a meeting place, zero before the first
launch and left at zero by every launch. Neither decides in which order anything is added.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, i4, i8, jit, types
from nbcnn.gpu.simulator import let_others_go_first

if SIMULATOR:

    @jit(device=True)
    def fresh(array, offset):
        return array[offset]

    @jit(device=True)
    def send(packets, at, turn, a, b):
        packets[4 * at], packets[4 * at + 2] = np.array([a, b], np.float32).view(np.int32)
        packets[4 * at + 1] = packets[4 * at + 3] = turn

    @jit(device=True)
    def receive(packets, at, turn):
        while packets[4 * at + 1] != turn or packets[4 * at + 3] != turn:
            let_others_go_first()
        return tuple(np.array([packets[4 * at], packets[4 * at + 2]], np.int32).view(np.float32))
else:
    from nbcnn.gpu.language import f4
    from nbcnn.ops.ptx.asm import byte_address_global, instruction

    _relaxed = instruction("ld_relaxed_gpu", "ld.relaxed.gpu.global.f32 $0, [$1];", f4, (types.uint64,))

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
        _send(byte_address_global(packets) + types.uint64(i8(at) * 16), a, b, turn)

    @jit(device=True)
    def receive(packets, at, turn):
        """The two float32 of packet `at`, when it is of this turn: waits for it."""
        return _receive(byte_address_global(packets) + types.uint64(i8(at) * 16), turn)

    @jit(device=True)
    def fresh(array, offset):
        """array[offset] of a device array of float32, as the last block to write it left it."""
        return _relaxed(byte_address_global(array) + types.uint64(i8(offset) * 4))


@jit(device=True)
def arrive(counters, place, count):
    """Count the block in at `place`; 1 in the thread 0 of the last of `count` blocks, else 0. What it wrote before, the last block sees.

    All threads of the block must call it.
    """
    last = 0
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        if cuda.atomic.add(counters, place, 1) == count - 1:
            counters[place] = 0
            cuda.threadfence()
            last = 1
    return last
