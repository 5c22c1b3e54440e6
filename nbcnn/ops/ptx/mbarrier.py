"""mbarrier (sm_90 forms): barriers in shared memory that count arrivals of threads and bytes written by TMA; named barriers.

A barrier (8 bytes, 8-aligned, given by its shared byte address) runs through phases. A phase ends when `count` arrivals came
and all expected bytes are there. `mbarrier_wait(barrier, parity)` returns once the phase of that parity has ended: of a fresh
barrier, parity 1 counts as ended (so a producer passes at once through barriers of empty stages), parity 0 does not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import u4
from nbcnn.ops.ptx.asm import instruction

mbarrier_init = instruction("mbarrier_init", "mbarrier.init.shared::cta.b64 [$0], $1;", None, (u4, u4))
"""(barrier, count): a phase takes `count` arrivals. By one thread; then `fence_mbarrier_init` and a barrier of the block."""
fence_mbarrier_init = instruction("fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", None, ())
"""Makes initialised barriers visible to TMA."""
mbarrier_arrive = instruction("mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", None, (u4,))
"""(barrier): one arrival; what this thread did before is visible to whoever waits."""
mbarrier_arrive_expect_tx = instruction("mbarrier_arrive_expect_tx", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, (u4, u4))
"""(barrier, bytes): one arrival, and the phase also waits for `bytes` written by TMA."""
mbarrier_wait = instruction(
    "mbarrier_try_wait_parity",
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }",
    None,
    (u4, u4),
)
"""(barrier, parity): wait until the phase of this parity has ended."""


@cache
def bar_sync(barrier: int, threads: int) -> Any:
    """Intrinsic (): wait for `threads` threads of the block (whole warps) at named barrier 1 … 15; 0 is `cuda.syncthreads`."""
    return instruction(f"bar_sync_{barrier}_{threads}", f"bar.sync {barrier}, {threads};", None, ())


@cache
def bar_arrive(barrier: int, threads: int) -> Any:
    """Intrinsic (): come to named barrier 1 … 15 of `threads` threads without waiting there; whole warps."""
    return instruction(f"bar_arrive_{barrier}_{threads}", f"bar.arrive {barrier}, {threads};", None, ())
