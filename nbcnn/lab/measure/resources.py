"""This module lists what a bound launch takes of a multiprocessor: registers, spilled bytes, shared memory, blocks per SM."""

from __future__ import annotations

from math import prod
from typing import Any

from nbcnn.gpu.driver import device
from nbcnn.gpu.language import SIMULATOR
from nbcnn.lab.measure.occupancy import WARP, arch_of, occupancy
from nbcnn.ops.kernel.call import Launch


def resources(launch: Any) -> dict[str, Any] | None:
    """Kernel, grid, block; registers and local bytes (spilled, or an array indexed at run time) per thread; shared bytes per block;
    blocks and warps per multiprocessor, as the driver says; part of its threads; what allows no more (`occupancy`; None for a GPU that is not
    listed there). None for what is no kernel on a GPU.

    The launch must have run once: a kernel may ask for more shared memory then.
    """
    if SIMULATOR or not isinstance(launch, Launch):
        return None
    kernel, threads = launch.load(), _product(launch.block)
    blocks = kernel.blocks_per_multiprocessor(threads, launch.shared)
    registers, shared = kernel.attribute("NUM_REGS"), kernel.attribute("SHARED_SIZE_BYTES") + launch.shared
    listed = arch_of(device().capability)
    return {
        "kernel": launch.name,
        "blocks": _product(launch.grid),
        "threads": threads,
        "registers": registers,
        "local_bytes": kernel.attribute("LOCAL_SIZE_BYTES"),
        "shared_bytes": shared,
        "resident_blocks": blocks,
        "resident_warps": blocks * -(-threads // WARP),
        "occupancy": blocks * threads / device().attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        "limited_by": occupancy(listed, threads, registers, shared).limit if listed else None,
    }


def _product(size: Any) -> int:
    return int(prod(size)) if isinstance(size, tuple) else int(size)
