"""This module measures the ceilings of a roofline: the rates that this GPU reaches in kernels that do nothing else.

The peaks of `nbcnn.run.peaks` assume the highest clock; under full load power may not allow it. These are the rates that the best
possible kernel of each kind gets here and now.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR
from nbcnn.lab.measure import ceiling_kernels as kernels
from nbcnn.lab.measure.caches import Calls, cache_bytes
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.sampling import Samples, sample
from nbcnn.lab.measure.steady import warm_up
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.row import Row
from nbcnn.run import peak_kernels, peaks
from nbcnn.run.rows import on_tensor_cores

COPY_GROUPS = 1
"""Groups of four that a thread copies. Among 1, 2, 4, 8 groups and 256, 512, 1,024 threads, one group and 256 threads copy fastest on an H200:
as fast as the driver's own copy."""
FMA_TURNS, MMA_TURNS, WGMMA_TURNS = (2, 2, 2) if SIMULATOR else (16_384, 32_768, 4_096)
"""Iterations of the kernels' loops, which take two to three milliseconds on an H200."""

REPETITION_MS = 5.0
"""Shortest time between two events, in milliseconds."""


@dataclass(frozen=True)
class Probe:
    """One measuring kernel: its launch, and the flops or bytes of one run. `watch` receives [cycles, ns] where the kernel tells them."""

    launch: Launch
    work: int
    watch: Any = None


def fma(device: Any) -> Probe:
    """Multiply-adds on CUDA cores."""
    blocks = 8 * device.multiprocessors
    x, watch = _floats(device, blocks * kernels.FMA_THREADS), device.empty(2, "int64")
    args = (x, watch, np.float32(0.999), np.float32(0.001), np.int32(FMA_TURNS))
    return Probe(Launch(kernels.fma_kernel(), blocks, kernels.FMA_THREADS, args), 2 * blocks * kernels.FMA_THREADS * kernels.FMAS * FMA_TURNS, watch)


def tensor(device: Any, precision: str, row: Row | None = None) -> Probe:
    """Products on the tensor cores of all multiprocessors, by the fastest instruction that `row` launches (None: any row)."""
    engine = peaks.engine_of(device.capability, row)
    blocks, turns = (device.multiprocessors, WGMMA_TURNS) if engine == "wgmma" else (4 * device.multiprocessors, MMA_TURNS)
    launch, flops, _ = peaks.tensor(device, engine, precision, blocks, turns)
    return Probe(launch, flops)


def copying(device: Any) -> Probe:
    """One large array to another, at least eight times the cache together, 2 GiB where they fit."""
    block = 4 * peak_kernels.COPY_THREADS * COPY_GROUPS
    wanted = 4 * block if SIMULATOR else int(min(max(4 * cache_bytes(device), 2**30), device.free_bytes() // 4))
    count = max(1, wanted // (4 * block)) * block
    args = (_floats(device, count), _floats(device, count))
    return Probe(Launch(peak_kernels.copy_kernel(COPY_GROUPS), count // block, peak_kernels.COPY_THREADS, args), 8 * count)


def _floats(device: Any, count: int) -> Any:
    array = device.empty(count, "float32")
    device.upload(array, np.resize(np.random.default_rng(0).random(min(count, 1 << 20), np.float32), count))
    return array


KINDS = ("fp32", "tf32", "bf16", "fp16", "copy")


def probes(device: Any, kinds: tuple[str, ...] = KINDS, row: Row | None = None) -> dict[str, Probe]:
    """The probes of `kinds`: fp32 and copy; tf32 and bf16, or else fp16, which has the rate of bf16, where tensor cores have them."""
    products = on_tensor_cores(device.capability)
    tensor_cores = {"fp16"} if products == ["fp16"] else {"tf32", "bf16"} & set(products)
    there = [kind for kind in KINDS if kind in kinds and kind in {"fp32", "copy"} | tensor_cores]
    return {kind: fma(device) if kind == "fp32" else copying(device) if kind == "copy" else tensor(device, kind, row) for kind in there}


def timed(probe: Probe, device: Any, watch: Any, seconds: float = 0.5, bounds: tuple[float, float] | None = None) -> Samples:
    """Samples of one probe, warm (`bounds`: as `warm_up` takes them): so many runs between two events that launching the first one does not count.

    Alone between its events a run begins only when the host has launched it, 10 to 50 µs late: of the copy's 500 µs up to a tenth.
    """
    work = Calls(probe.launch.name, device, [[probe.launch]])
    warm = warm_up([work], watch, bounds=bounds)
    return sample([work], max(1, ceil(REPETITION_MS / warm.ms)), warm, watch, seconds)


def measure(device: Any, kinds: tuple[str, ...] = KINDS, row: Row | None = None) -> dict[str, float]:
    """flop/s of "fp32" (CUDA cores), "tf32" and "bf16" or else "fp16" (tensor cores, where there are some, by the engine of `row`), byte/s of
    "copy" (read and written): of `kinds`."""
    with Watch(device) as watch:
        made = probes(device, kinds, row).items()
        return {name: probe.work / (float(np.median(timed(probe, device, watch).ms)) / 1e3) for name, probe in made}
