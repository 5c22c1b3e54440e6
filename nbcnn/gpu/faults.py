"""This module explains errors of the CUDA driver: what happened, what can be done, and the exit code.

A driver's error arrives as a `driver.DriverError`, whose text has the driver's name for it. Only these names are read here, so this module
imports nothing of CUDA.
"""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Any, NamedTuple

from nbcnn.files.errors import Whole


class GpuFault(Whole, RuntimeError):
    """The GPU, or its driver, refused to go on; the message says why and what to do. Commands exit with `exit_code`.

    5: no memory is left. 4: this process cannot use the GPU (any more). 1: a kernel failed, which costs the process the GPU but not the next one.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


NO_MEMORY = 5
"""The exit code of a fault for want of memory."""


class _Meaning(NamedTuple):
    exit_code: int
    names: str  # of the driver and of the runtime, without CUDA_ERROR_ and cudaError, underscores and case
    sentence: str

    def fault(self, name: str) -> GpuFault:
        """The fault that the driver calls `name`."""
        return GpuFault(self.sentence.format(name=name), self.exit_code)


_FORKED = _Meaning(
    4,
    "notinitialized initializationerror",
    "CUDA cannot be used in a process that was forked from one which uses it ({name}): start processes with multiprocessing's method spawn",
)

_MEANINGS = (
    _Meaning(
        NO_MEMORY,
        "outofmemory memoryallocation",
        "the GPU has no memory left ({name}): what other processes hold cannot be planned for; nvidia-smi lists them, a smaller --batch needs less",
    ),
    _FORKED,
    _Meaning(
        1,
        "illegaladdress misalignedaddress illegalinstruction invalidpc invalidaddressspace hardwarestackerror assert launchfailed launchfailure"
        " launchtimeout launchtimeoutexception",
        "a kernel failed on the GPU ({name}), and this process cannot use the GPU any more: start it again; if it happens again,"
        " NBCNN_DEBUG=1 and compute-sanitizer show where",
    ),
    _Meaning(
        4,
        "eccuncorrectable nvlinkuncorrectable deviceunavailable devicesunavailable nodevice invaliddevice systemnotready contextisdestroyed"
        " mpsserverlost unknown externaldevice contained",
        "the GPU was lost ({name}): nvidia-smi and the system's log say whether it must be reset; start again when it is back",
    ),
)

_NAME = re.compile(r"CUDA_ERROR_[A-Z_]+|cudaError[A-Z][A-Za-z]+")


def explained(error: BaseException) -> GpuFault | None:
    """The fault that `error` is, or was caused by; None for everything else.

    >>> explained(RuntimeError("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")).exit_code
    5
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GpuFault):
            return seen
        if match := _NAME.search(str(seen)):
            word = match[0].removeprefix("CUDA_ERROR_").removeprefix("cudaError").replace("_", "").lower()
            for meaning in _MEANINGS:
                if word in meaning.names.split():
                    return meaning.fault(match[0])
        seen = seen.__cause__
    return None


def forked() -> GpuFault:
    """The fault of a process that was forked from one which uses the GPU."""
    return _FORKED.fault("CUDA_ERROR_NOT_INITIALIZED")


def freed_in_silence() -> None:
    """From here on nothing is printed about what cannot be freed at the end of this process: after a fault the driver refuses that, too."""
    before, unraisable = sys.excepthook, sys.unraisablehook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if explained(error) is None:
            before(kind, error, trace)

    def in_a_destructor(what: Any) -> None:
        if what.exc_value is None or explained(what.exc_value) is None:
            unraisable(what)

    sys.excepthook, sys.unraisablehook = hook, in_a_destructor
