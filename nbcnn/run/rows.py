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

TENSOR_CORES = ENGINES["mma"]
"""The compute capability from which on mode tensorcore runs."""


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

    On a GPU without usable tensor cores, tensorcore becomes cudacore, the next best row, and the reason says so; `strict` refuses that.
    `engine` (auto, wgmma, mma) chooses among tensorcore's kernels, `dwconv` (auto or one of `nbcnn.modes.DWCONV`) the depthwise
    convolutions of a GPU mode. `capability` None asks the GPU.
    Raises UsageError for what does not exist or does not go together, GpuUnavailable if the row needs a GPU, or
    `nbcnn.use_device` chose one, and there is none.
    """
    check_mode(mode, precision)
    missing = None if mode == "cpu" else device.cpu_instead() if mode == "auto" else refused() or device.gpu_missing()
    if capability is None:
        capability = (0, 0) if missing or mode == "cpu" else capability_of_gpu()
    why = "as asked"
    if mode == "auto":
        fast = precision in (None, *(p for m, p in MODES if m == "tensorcore")) and capability >= TENSOR_CORES
        mode = "cpu" if missing else "tensorcore" if fast else "cudacore"
        why = "no usable GPU here" if missing else "the fastest mode on this GPU"
    elif mode == "tensorcore" and not missing and capability < TENSOR_CORES:
        why = f"the next best: tensorcore needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
        if strict:
            raise UsageError(f"--strict: mode tensorcore became cudacore, {why}")
        mode, precision = "cudacore", None
    precision = precision or DEFAULT_PRECISION[mode]
    if (mode, precision) not in MODES:
        raise UsageError(f"mode {mode} has no precision {quoted(precision)}; it has {', '.join(p for m, p in MODES if m == mode)}")
    row = MODES[mode, precision]
    if row.device == "gpu" and missing:
        raise device.unavailable(missing)
    if engine != "auto":
        if mode != "tensorcore":
            raise UsageError(f"--engine {engine} belongs to mode tensorcore, this is {mode}")
        if capability < ENGINES[engine] or (engine == "wgmma" and capability != ENGINES[engine]):
            needed, own = (".".join(map(str, one)) for one in (ENGINES[engine], capability))
            raise UsageError(f"--engine {engine} needs compute capability {needed}, this GPU has {own}")
        row = only_engine(row, engine)
    if dwconv != "auto":
        if row.device != "gpu":
            raise UsageError(f"--dwconv {dwconv} chooses among kernels for a GPU, this is mode {mode}")
        row = with_dwconv(row, dwconv)
    return Choice(row, why)
