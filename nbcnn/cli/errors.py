"""This module defines the exit codes, and turns an exception into a message and an exit code.

Of the package only what the standard library suffices for is imported, so that `--help` never pays for it: an exception says its own code in
an `exit_code` attribute, and `nbcnn.gpu.faults` knows the driver's errors by their names.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from nbcnn.cli.process import ENDED, end_soon, unwritten
from nbcnn.cli.saying import to_stderr
from nbcnn.files import extras
from nbcnn.files.quote import words
from nbcnn.gpu import faults
from nbcnn.train.interrupt import Unwinding

OK, RUNTIME, USAGE, DATA, NO_GPU, MEMORY, DIVERGED = range(7)
SIGINT, SIGTERM = 130, 143

MEANINGS = {
    OK: "ok",
    RUNTIME: "runtime error (disk full, output folder cannot be written, …)",
    USAGE: "usage",
    DATA: "data or checkpoint missing or corrupt",
    NO_GPU: "no usable GPU",
    MEMORY: "out of memory",
    DIVERGED: "training diverged (NaN or Inf)",
    SIGINT: "interrupted (SIGINT); 143: terminated (SIGTERM); train.py has saved its state then",
}

MODE_CPU = "--mode cpu (or --mode auto without --device, which takes the CPU by itself)"
"""The advice where there is no GPU, for commands with a --mode."""


def exit_code(error: BaseException) -> int:
    """The exit code of `error`: its own, 5 for memory that ran out in spite of the plan, else 1."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if fault := faults.explained(error):
        return fault.exit_code
    return MEMORY if isinstance(error, MemoryError) else RUNTIME


def message(error: BaseException, without_gpu: str | Callable[[], str] = MODE_CPU) -> str:
    """What went wrong, where, and what to do; without a traceback."""
    if not hasattr(error, "exit_code"):
        error = faults.explained(error) or error
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").split(".")[0]) in extras.PACKAGES:
        error = extras.PackageMissing(extras.missing(package))
    code, text = exit_code(error), words(error) or type(error).__name__
    if code == NO_GPU or (isinstance(error, extras.PackageMissing) and extras.for_a_gpu(text)):
        return "\n".join(
            (
                " ".join(text.split()),
                f"  without a GPU:      {without_gpu if isinstance(without_gpu, str) else without_gpu()}",
                "  to try the kernels: NBCNN_SIMULATOR=1 runs them in the simulator, for small shapes (python -m nbcnn gradcheck, simulate)",
            )
        )
    expected = code != RUNTIME or isinstance(error, OSError) or hasattr(error, "exit_code")
    return text if expected else f"{type(error).__name__}: {text} (NBCNN_DEBUG=1 shows where)"


def guarded(command: Callable[[], int], without_gpu: str | Callable[[], str] = MODE_CPU) -> int:
    """Run `command`; print what it raises as "nbcnn: error: …" on stderr and return the exit code.

    SIGINT and SIGTERM unwind the command, print a line and give 130 and 143; at the second the process ends soon, whatever the command catches.
    `without_gpu` is what the command can do instead where there is no GPU, or a function that says it. NBCNN_DEBUG=1 prints the traceback first. A
    script's outputs never fail (`nbcnn.cli.process`), so a broken pipe is one between ranks.
    """
    received = Unwinding(lambda number: end_soon(128 + number))
    try:
        with received:
            code = command()
    except BaseException as error:
        received.restore()
        number = received.signal or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
        if number is not None:
            to_stderr(ENDED[signal.Signals(number)])
            end_soon(128 + number)
            return 128 + number
        if not isinstance(error, Exception):
            raise
        if os.environ.get("NBCNN_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        to_stderr(f"nbcnn: error: {message(error, without_gpu)}")
        if faults.explained(error):
            faults.freed_in_silence()
        return exit_code(error)
    if code in (SIGINT, SIGTERM):
        end_soon(code)  # a training that saved its state before it ended; before stdout is written, which may wait for a reader
    if lost := unwritten():
        to_stderr(f"nbcnn: error: stdout could not be written: {lost.strerror}; what the command has saved stands")
    return code or (RUNTIME if lost else OK)
