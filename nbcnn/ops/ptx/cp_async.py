"""cp.async (sm_80): copies from global to shared memory that run while the thread goes on.

Order of use: some copies; `cp_async_commit()`; … `cp_async_wait(n)()` until at most n committed groups still run; then a barrier,
since a thread waits for its own copies only. Addresses are bytes: `byte_address_shared(array)`, `byte_address_global(array)`, plus
an offset. `bytes` is how many are read, the rest of the width is filled with zeros: 0 reads nothing, and the address may be any.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import jit, types, u4
from nbcnn.ops.ptx.asm import instruction

_u8 = types.uint64

cp_async_16 = instruction("cp_async_cg_16", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", None, (u4, _u8, u4))
"""(to, from, bytes): 16 bytes, past the first-level cache; the second level fetches 128."""
cp_async_4 = instruction("cp_async_ca_4", "cp.async.ca.shared.global [$0], [$1], 4, $2;", None, (u4, _u8, u4))
"""(to, from, bytes): 4 bytes, through the first-level cache."""
_THROUGH = {
    width: instruction(f"cp_async_ca_{width}", f"cp.async.ca.shared.global [$0], [$1], {width}, $2;", None, (u4, _u8, u4)) for width in (8, 16)
}
cp_async_commit = instruction("cp_async_commit_group", "cp.async.commit_group;", None, ())
"""Close the group of copies issued since the last commit."""


def cp_async_through(width: int) -> Any:
    """Intrinsic (to, from, bytes): 8 or 16 bytes, through the first-level cache, from which threads with common neighbours get them."""
    return _THROUGH[width]


@jit(device=True)
def nothing():
    """What stands for a commit and a wait where threads copy through registers, before compute capability 8.0."""
    return


@cache
def cp_async_wait(running: int) -> Any:
    """Intrinsic (): wait until at most `running` committed groups of this thread have not finished."""
    return instruction(f"cp_async_wait_group_{running}", f"cp.async.wait_group {running};", None, ())
