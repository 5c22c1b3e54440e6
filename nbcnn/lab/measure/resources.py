"""This module lists what a bound launch takes of a multiprocessor: registers, spilled bytes, shared memory, blocks per SM."""

from __future__ import annotations

from math import prod
from typing import Any

from nbcnn.gpu.capture import checked
from nbcnn.gpu.compiler import bindings, function_of, numba_cuda
from nbcnn.gpu.language import SIMULATOR, resolved
from nbcnn.lab.measure.occupancy import WARP, arch_of, occupancy
from nbcnn.ops.kernel.call import Launch


def resources(launch: Any) -> dict[str, Any] | None:
    """Kernel, grid, block; registers and local bytes (spilled, or an array indexed at run time) a thread; shared bytes a block;
    blocks and warps a multiprocessor, as the driver says; part of its threads; what allows no more (`occupancy`; None for a GPU that is not
    listed there). None for what is no kernel on a GPU.

    The launch must have run once: a kernel may ask for more shared memory then.
    """
    if SIMULATOR or not isinstance(launch, Launch):
        return None
    driver, compiled = bindings("driver"), function_of(resolved(launch.kernel), launch.args)
    threads = _product(launch.block)
    function = checked(driver.cuKernelGetFunction(compiled.handle), "look up a kernel")
    blocks = int(checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, launch.shared), "work out an occupancy"))
    arch, shared = arch_of(numba_cuda().get_current_device().compute_capability), compiled.attrs.shared + launch.shared
    return {
        "kernel": launch.name,
        "blocks": _product(launch.grid),
        "threads": threads,
        "registers": compiled.attrs.regs,
        "local_bytes": compiled.attrs.local,
        "shared_bytes": shared,
        "resident_blocks": blocks,
        "resident_warps": blocks * -(-threads // WARP),
        "occupancy": blocks * threads / numba_cuda().get_current_device().MAX_THREADS_PER_MULTIPROCESSOR,
        "limited_by": occupancy(arch, threads, compiled.attrs.regs, shared).limit if arch else None,
    }


def _product(size: Any) -> int:
    return int(prod(size)) if isinstance(size, tuple) else int(size)
