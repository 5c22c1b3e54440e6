"""Communication between the blocks of one launch: messages that carry a sequence number, a count of arrivals, and loads that no stale cache
line can serve.

A message is two float32. Each lies beside the launch's *sequence number* in eight bytes that are written and read as one. So a block that
reads the right sequence number has the float32 too: no fence, no counter, one trip to the second-level cache and one back. A message takes four
int32, zero before the first launch. It belongs to one launch of a plan, and every run of that launch writes it once; the sequence number is one
more than the one that the message holds. Only blocks that are on the GPU at the same time may wait for each other: a launch in which they do
must fit on it at once. The simulator runs one block after another, so there a block may wait for its own messages only.

`arrive` counts a block in and says whether it is the last, for blocks that need not wait. Its counter is one int32, zero before the first
launch and left at zero by every launch. Neither decides in which order anything is added.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, i4, i8, jit, types
from nbcnn.gpu.simulator import let_others_go_first

if NUMBA_SIMULATOR:

    @jit(device=True)
    def fresh(array, offset):
        return array[offset]

    @jit(device=True)
    def send(messages, at, sequence, a, b):
        messages[4 * at], messages[4 * at + 2] = np.array([a, b], np.float32).view(np.int32)
        messages[4 * at + 1] = messages[4 * at + 3] = sequence

    @jit(device=True)
    def receive(messages, at, sequence):
        while messages[4 * at + 1] != sequence or messages[4 * at + 3] != sequence:
            let_others_go_first()
        return tuple(np.array([messages[4 * at], messages[4 * at + 2]], np.int32).view(np.float32))
else:
    from nbcnn.gpu.language import f4
    from nbcnn.ops.ptx.asm import byte_address_global, instruction

    _relaxed = instruction("ld_relaxed_gpu", "ld.relaxed.gpu.global.f32 $0, [$1];", f4, (types.uint64,))

    # Eight bytes are written and read as one: a float32 and its sequence number. So no fence is needed.
    _send = instruction(
        "send_message",
        "{ .reg .b64 p, q; mov.b64 p, {$1, $3}; mov.b64 q, {$2, $3}; st.relaxed.gpu.global.v2.b64 [$0], {p, q}; }",
        None,
        (types.uint64, f4, f4, i4),
    )
    _receive = instruction(
        "receive_message",
        "{ .reg .b64 p, q; .reg .b32 s, t; .reg .pred old; look: ld.relaxed.gpu.global.v2.b64 {p, q}, [$2];"
        " mov.b64 {$0, s}, p; mov.b64 {$1, t}, q; setp.ne.b32 old, s, $3; @old bra look; setp.ne.b32 old, t, $3; @old bra look; }",
        (f4,) * 2,
        (types.uint64, i4),
    )

    @jit(device=True)
    def send(messages, at, sequence, a, b):
        """Send two float32 as message `at` with this sequence number."""
        _send(byte_address_global(messages) + types.uint64(i8(at) * 16), a, b, sequence)

    @jit(device=True)
    def receive(messages, at, sequence):
        """Wait until message `at` has this sequence number; the two float32 of it."""
        return _receive(byte_address_global(messages) + types.uint64(i8(at) * 16), sequence)

    @jit(device=True)
    def fresh(array, offset):
        """array[offset] of a device array of float32, as the last block to write it left it."""
        return _relaxed(byte_address_global(array) + types.uint64(i8(offset) * 4))


@jit(device=True)
def arrive(counters, index, count):
    """Count the block in at counters[index]; 1 in thread 0 of the last of `count` blocks, else 0. What it wrote before, the last block sees.

    All threads of the block must call it.
    """
    last = 0
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        if cuda.atomic.add(counters, index, 1) == count - 1:
            counters[index] = 0
            cuda.threadfence()
            last = 1
    return last
