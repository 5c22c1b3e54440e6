"""Blocks of one launch that wait for each other: integer counters in global memory, and loads that no stale cache line can serve.

`arrive` counts a block in and says whether it is the last; `meet` waits until all have come. Only blocks that are on the GPU at the same
time may meet: a launch whose blocks meet must fit on it at once. Counters are two int32 a meeting place, zero before the first launch;
every launch leaves the first at zero, so nothing has to be cleared between launches. Sums stay deterministic: the counters decide when
a block goes on, never in which order anything is added. The simulator runs one block after another, so there nothing may meet.
"""

from __future__ import annotations

from nbcnn.cuda import SIMULATOR, cuda, i4, i8, jit, types

if SIMULATOR:

    @cuda.jit(device=True)
    def fresh(array, offset):
        return array[offset]

    @cuda.jit(device=True)
    def _generation(counters, place):
        return counters[2 * place + 1]
else:
    from nbcnn.cuda import f4
    from nbcnn.ops.ptx.asm import byte_address_global, instruction

    _relaxed = instruction("ld_relaxed_gpu", "ld.relaxed.gpu.global.f32 $0, [$1];", f4, (types.uint64,))
    _acquire = instruction("ld_acquire_gpu", "ld.acquire.gpu.global.s32 $0, [$1];", i4, (types.uint64,))

    @jit(device=True)
    def fresh(array, offset):
        """array[offset] of a device array of float32, as the last block to write it left it."""
        return _relaxed(byte_address_global(array) + types.uint64(i8(offset) * i8(4)))

    @jit(device=True)
    def _generation(counters, place):
        return _acquire(byte_address_global(counters) + types.uint64(i8(i4(2) * place + i4(1)) * i8(4)))


@jit(device=True)
def _count_in(counters, place, count):
    """By one thread, behind a barrier: counts its block in; 1 if it is the last."""
    cuda.threadfence()
    if cuda.atomic.add(counters, i4(2) * place, i4(1)) == count - i4(1):
        counters[i4(2) * place] = i4(0)
        cuda.threadfence()
        return i4(1)
    return i4(0)


@jit(device=True)
def arrive(counters, place, count):
    """Count the block in at `place`; 1 in the thread 0 of the last of `count` blocks, else 0. What it wrote before, the last block sees.

    All threads of the block must call it.
    """
    last = i4(0)
    cuda.syncthreads()
    if cuda.threadIdx.x == i4(0):
        last = _count_in(counters, place, count)
    return last


@jit(device=True)
def meet_alone(counters, place, count):
    """As `meet`, by one thread for others: those who wrote wait for a barrier before it, those who will read for one behind it."""
    generation = _generation(counters, place)
    if _count_in(counters, place, count) == i4(1):
        cuda.atomic.add(counters, i4(2) * place + i4(1), i4(1))
    else:
        while _generation(counters, place) == generation:
            pass
        cuda.threadfence()


@jit(device=True)
def meet(counters, place, count):
    """Wait until `count` blocks have come to `place`, and see what they wrote before (by `fresh`). All threads of a block must call it."""
    cuda.syncthreads()
    if cuda.threadIdx.x == i4(0):
        meet_alone(counters, place, count)
    cuda.syncthreads()
