"""The GPU's own watches: cycles of this multiprocessor (`%clock64`) and nanoseconds (`%globaltimer`)."""

from __future__ import annotations

from nbcnn.gpu.language import NUMBA_SIMULATOR, jit, types

if NUMBA_SIMULATOR:
    import time

    @jit(device=True)
    def cycles():
        return time.perf_counter_ns()

    nanoseconds = cycles
else:
    from nbcnn.ops.ptx.asm import instruction

    cycles = instruction("read_clock64", "mov.u64 $0, %clock64;", types.int64, ())
    """() -> cycles of this multiprocessor since some moment; it stands still in no clock state, but runs at the SM clock."""
    nanoseconds = instruction("read_globaltimer", "mov.u64 $0, %globaltimer;", types.int64, ())
    """() -> nanoseconds since some moment, the same for all multiprocessors; an H200's moves in steps of 32."""
