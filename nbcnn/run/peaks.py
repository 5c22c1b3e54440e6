"""This module says what a GPU can do at most: flop/s by precision, and bytes/s of its memory. The floors of `explain` follow from it.

The rate of tensor cores is measured, because the compute capability does not tell it: of GPUs of one capability some add products in float32 at
half the rate of others (7.5: an RTX 20 beside a T4; 8.6: a 3090 beside an A10, A40 or A6000; 8.9: a 4090 beside an L4 or L40S). One block multiplies
on one multiprocessor for about 0.1 ms and counts its own cycles, so neither clocks nor power nor other multiprocessors are in the figure. tf32 has
half of bf16's rate and fp16 has the same (NVIDIA's architecture whitepapers, from 8.0 on). Compute capability 7.5 has fp16 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu import driver
from nbcnn.gpu.device import elapsed_ms, event
from nbcnn.gpu.language import SIMULATOR
from nbcnn.modes import ENGINES
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.row import Row
from nbcnn.run import peak_kernels as kernels
from nbcnn.run.rows import on_tensor_cores

TURNS = {"mma": 1024, "wgmma": 256}
"""Iterations of the loops that are counted, 66,000 to 520,000 cycles: the hundred of their ends are nothing beside them."""
RUNS = 3
COPIED = 1 << 28
"""Bytes that a copy reads at least, of eight times the cache."""


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do at most: flop/s by precision at its highest clock, bytes/s of its memory, and the instruction of the tensor cores' rate.

    "fp32" is the CUDA cores', "fp32 split" that of six bf16 products for each fp32-grade one. engine  "wgmma", "mma", or "" without tensor cores.
    """

    flops: Mapping[str, float]
    bandwidth: float
    engine: str = ""


def lanes(capability: tuple[int, int]) -> int:
    """float32 multiply-adds of a multiprocessor in a clock (CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""
    return 64 if capability[0] == 7 or capability in ((6, 0), (8, 0)) else 128


def engine_of(capability: tuple[int, int], row: Row | None = None) -> str:
    """The fastest instruction for tensor cores that `row` launches on such a GPU (None: any row); "" where it has none that is used."""
    if not on_tensor_cores(capability):
        return ""
    left_out = row is not None and row.mode == "tensorcore" and "wgmma" not in dict(row.fallbacks)
    return "wgmma" if capability == ENGINES["wgmma"] and not left_out else "mma"


def peaks_of(device: Any, row: Row | None = None) -> Ceilings | None:
    """The peaks of a GPU for the engine of `row`; None for a host, in the simulator, and where a driver answers what cannot be.

    The first call of a process compiles and runs a kernel, of a GPU that shares its memory with the host a second one. Raises PackageMissing.
    """
    if device.name == "host" or SIMULATOR:
        return None
    ask, engine = driver.device().attribute, engine_of(device.capability, row)
    cycles = device.multiprocessors * ask("CLOCK_RATE") * 1e3
    there = on_tensor_cores(device.capability)
    fp32, tensor = 2 * lanes(device.capability) * cycles, flops_per_cycle(device, engine, there[0]) * cycles if there else 0.0
    bandwidth = _bandwidth(device)
    if not (fp32 and bandwidth and (tensor or not engine)):
        return None
    parts = {"tf32": ("tf32", 2), "bf16": ("bf16", 1), "fp16": ("fp16", 1), "fp32 split": ("fp32", 6)}
    flops = {name: tensor / part if precision in there else fp32 for name, (precision, part) in parts.items()}
    return Ceilings({"fp32": fp32} | flops, bandwidth, engine)


_known: dict[tuple[str, str], float] = {}
"""What has been measured in this process, by the GPU and what it did."""


def flops_per_cycle(device: Any, engine: str, precision: str = "bf16") -> float:
    """Dense flops of one multiprocessor's tensor cores in a cycle, adding in float32; 0 from a driver that runs nothing."""
    key = device.device_name, f"{engine} {precision}"
    if key not in _known:
        launch, flops, watch = tensor(device, engine, precision, 1, TURNS[engine])
        counted = []
        for _ in range(RUNS):
            launch.run(device.stream)
            counted.append(int(device.download(watch)[0]))
        _known[key] = flops / min(counted) if min(counted) > 0 else 0.0
    return _known[key]


def tensor(device: Any, engine: str, precision: str, blocks: int, turns: int) -> tuple[Launch, int, Any]:
    """The launch of `blocks` blocks that multiply on tensor cores, its flops, and the array in which it counts its cycles."""
    k = 8 if precision == "tf32" else 16
    if engine == "wgmma":
        kernel, threads = kernels.wgmma_kernel(precision), kernels.WGMMA_THREADS
        flops = threads // 128 * kernels.WGMMA_STEPS * 2 * 64 * kernels.WGMMA_N * k
    else:
        kernel, threads = kernels.mma_kernel(precision), kernels.MMA_THREADS
        flops = threads // 32 * kernels.MMA_TILES * 2 * 16 * 8 * k
    x, watch = device.empty(blocks * threads, "float32"), device.empty(1, "int64")
    return Launch(kernel, blocks, threads, (x, watch, np.int32(turns))), blocks * flops * turns, watch


def _bandwidth(device: Any) -> float:
    """Bytes/s of the memory by its clock and width; of memory that is the host's, too, what a copy reaches: drivers tell other clocks there."""
    ask = driver.device().attribute
    if ask("INTEGRATED"):
        return copied(device)
    return 2e3 * ask("MEMORY_CLOCK_RATE") * ask("GLOBAL_MEMORY_BUS_WIDTH") / 8


def copied(device: Any) -> float:
    """Bytes/s, read and written, of the fastest of some copies that no cache holds."""
    key = device.device_name, "copy"
    if key not in _known:
        block = 4 * kernels.COPY_THREADS
        nbytes = min(max(4 * driver.device().attribute("L2_CACHE_SIZE"), COPIED), device.free_bytes() // 4)
        blocks = max(1, nbytes // (4 * block))
        launch = Launch(kernels.copy_kernel(1), blocks, kernels.COPY_THREADS, [device.empty(blocks * block, "float32") for _ in range(2)])
        taken = []
        for _ in range(1 + RUNS):
            before, after = event(), event()
            before.record(device.stream)
            launch.run(device.stream)
            after.record(device.stream)
            device.synchronize()
            taken.append(elapsed_ms(before, after))
        _known[key] = 8e3 * blocks * block / min(taken[1:]) if min(taken[1:]) > 0 else 0.0
    return _known[key]
