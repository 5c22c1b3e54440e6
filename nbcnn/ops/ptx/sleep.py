"""`nanosleep`: a thread that lets others go first."""

from __future__ import annotations

from nbcnn.gpu.language import SIMULATOR, cuda, u4

if SIMULATOR:

    @cuda.jit(device=True)
    def nanosleep(nanoseconds):
        pass
else:
    from nbcnn.ops.ptx.asm import instruction

    nanosleep = instruction("nanosleep", "nanosleep.u32 $0;", None, (u4,))
    """(nanoseconds): the warp is not scheduled for about as long, at most twice as long."""
