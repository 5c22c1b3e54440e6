"""This module chooses the row of the op table on which a network runs: mode and precision, then the overlays for engine and series."""

from __future__ import annotations

from typing import NamedTuple

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.gpu import device
from nbcnn.gpu.device import capability_of_gpu
from nbcnn.gpu.select import refused
from nbcnn.modes import DEFAULT_PRECISION, ENGINES, MODES, only_engine, with_dwconv
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.names import TENSOR_CORES


def on_tensor_cores(capability: tuple[int, int]) -> list[str]:
    """The precisions in which mode tensorcore runs on GPUs of a compute capability, its default there first."""
    return [precision for precision, least in TENSOR_CORES.items() if capability >= least]


def fastest(capability: tuple[int, int]) -> tuple[str, str]:
    """The mode and the precision that "auto" takes on GPUs of a compute capability."""
    found = on_tensor_cores(capability)
    return ("tensorcore", found[0]) if found else ("cudacore", DEFAULT_PRECISION["cudacore"])


class Choice(NamedTuple):
    """A row, and in words why it is this one."""

    row: Row
    why: str


def check_mode(mode: str, precision: str | None) -> None:
    """Raise UsageError for a mode that does not exist, and for a precision that the mode has on no machine."""
    known = ["auto", *sorted({name for name, _ in MODES})]
    if mode not in known:
        close = "; auto takes the GPU where there is one" if mode in ("gpu", "cuda") else nearest(str(mode), known)
        raise UsageError(f"no mode {quoted(mode)} (there are {', '.join(known)}){close}")
    has = dict.fromkeys(each for name, each in MODES if mode in ("auto", name))
    if precision is not None and precision not in has:
        raise UsageError(f"mode {mode} has no precision {quoted(precision)}; it has {', '.join(has)}")


def choose_mode(
    mode: str,
    precision: str | None,
    engine: str = "auto",
    capability: tuple[int, int] | None = None,
    dwconv: str = "auto",
    strict: bool = False,
) -> Choice:
    """The row for `mode` and `precision`, and why. `auto` takes the fastest that this machine has.

    On a GPU whose tensor cores lack the precision, tensorcore becomes cudacore, the next best row, and the reason says so; `strict` refuses that.
    `engine` (auto, wgmma, mma) chooses among tensorcore's kernels, `dwconv` (auto or one of `nbcnn.modes.DWCONV`) the depthwise
    convolutions of a GPU mode. `capability` None asks the GPU.
    Raises UsageError for what does not exist or does not go together, GpuUnavailable if the row needs a GPU, or
    `nbcnn.use_device` chose one, and there is none.
    """
    check_mode(mode, precision)
    missing = None if mode == "cpu" else device.cpu_instead() if mode == "auto" else refused() or device.gpu_missing()
    simulated = False
    if capability is None:
        capability = (0, 0) if missing or mode == "cpu" else capability_of_gpu()
        # It has fp16, too, but plays the kernels of CUDA cores faster.
        simulated = device.SIMULATOR and capability < TENSOR_CORES["bf16"]
    why = "as asked"
    if mode == "auto":
        there = on_tensor_cores(capability)
        fast = precision in there or (precision is None and bool(there) and not simulated)
        mode = "cpu" if missing else "tensorcore" if fast else "cudacore"
        why = "no usable GPU here" if missing else "the fastest mode on this GPU"
    elif mode == "tensorcore" and not missing and capability < TENSOR_CORES[precision or "fp16"]:
        needed, own = (".".join(map(str, one)) for one in (TENSOR_CORES[precision or "fp16"], capability))
        named = f"tensorcore {precision}" if precision else "tensorcore"
        why = f"the next best: {named} needs compute capability {needed}, this GPU has {own}"
        if strict:
            raise UsageError(f"--strict: mode tensorcore became cudacore, {why}")
        mode, precision = "cudacore", None
    precision = precision or (fastest(capability)[1] if mode == "tensorcore" and not missing else DEFAULT_PRECISION[mode])
    if (mode, precision) not in MODES:
        raise UsageError(f"mode {mode} has no precision {quoted(precision)}; it has {', '.join(p for m, p in MODES if m == mode)}")
    row = MODES[mode, precision]
    if row.device == "gpu" and missing:
        raise device.unavailable(missing)
    if engine != "auto":
        if mode != "tensorcore":
            raise UsageError(f"--engine {engine} belongs to mode tensorcore, this is {mode}")
        least = max(ENGINES[engine], TENSOR_CORES[precision])
        if capability < least or (engine == "wgmma" and capability != ENGINES[engine]):
            needed, own = (".".join(map(str, one)) for one in (least, capability))
            raise UsageError(f"--engine {engine} needs compute capability {needed}, this GPU has {own}")
        row = only_engine(row, engine)
    if dwconv != "auto":
        if row.device != "gpu":
            raise UsageError(f"--dwconv {dwconv} chooses among kernels for a GPU, this is mode {mode}")
        row = with_dwconv(row, dwconv)
    return Choice(row, why)
