"""Registers that go from one warpgroup to another (sm_90a): `setmaxnreg`.

A kernel starts with what its launch bounds allow, the same for all. Warpgroups that need few give some back; others then take more, and wait
until they are there. All warps of a warpgroup must execute the same instruction. Together they must not ask for more than the kernel began with.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.ops.ptx.asm import instruction


@cache
def give_registers(left: int) -> Any:
    """Intrinsic (): this warpgroup keeps `left` registers a thread, a multiple of 8 from 24 to 256, and gives back the others."""
    return instruction(f"setmaxnreg_dec_{left}", f"setmaxnreg.dec.sync.aligned.u32 {left};", None, ())


@cache
def take_registers(wanted: int) -> Any:
    """Intrinsic (): wait until this warpgroup has `wanted` registers a thread, a multiple of 8 from 24 to 256."""
    return instruction(f"setmaxnreg_inc_{wanted}", f"setmaxnreg.inc.sync.aligned.u32 {wanted};", None, ())
