"""Exit codes, and the one place where an exception becomes a message and an exit code.

Nothing is imported from the package: an exception says its own code in an `exit_code` attribute, or its name stands in
the table below, so `--help` never pays for numba.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

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
    SIGINT: "interrupted (SIGINT); 143: terminated (SIGTERM); the state is saved",
}

CODES = {
    "nbcnn.net.UsageError": USAGE,
    "nbcnn.graph.ShapeError": USAGE,
    "nbcnn.cuda.GpuUnavailable": NO_GPU,
    "nbcnn.net.MemoryPlanError": MEMORY,
    "builtins.MemoryError": MEMORY,
}
"""Exit codes of exceptions without an `exit_code` of their own, by module and name; a base class counts for its children."""


class UsageError(ValueError):
    """The command line asks for something that cannot be."""

    exit_code = USAGE


def exit_code(error: BaseException) -> int:
    """The exit code of `error`: its own, else the table's, else 1."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if "CUDA_ERROR_OUT_OF_MEMORY" in str(error):
        return MEMORY
    for ancestor in type(error).__mro__:
        code = CODES.get(f"{ancestor.__module__}.{ancestor.__name__}")
        if code is not None:
            return code
    return RUNTIME


def message(error: BaseException) -> str:
    """What went wrong, where, and what to do; without a traceback."""
    code, text = exit_code(error), str(error) or type(error).__name__
    if code == NO_GPU:
        missing = " ".join(text.split())
        return "\n".join(
            (
                f"{missing}",
                "  without a GPU:      --mode cpu (or --mode auto, which takes the CPU by itself)",
                "  to try the kernels: NUMBA_ENABLE_CUDASIM=1 runs them in Numba's simulator, for tiny shapes (python -m nbcnn gradcheck)",
            )
        )
    expected = code != RUNTIME or isinstance(error, OSError) or hasattr(error, "exit_code")
    if isinstance(error, OSError) and error.strerror and not hasattr(error, "exit_code"):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text if expected else f"{type(error).__name__}: {text} (NBCNN_DEBUG=1 shows where)"


def guarded(command: Callable[[], int]) -> int:
    """Run `command`; print what it raises as "nbcnn: error: …" on stderr and return the exit code.

    NBCNN_DEBUG=1 prints the traceback first.
    """
    try:
        return command()
    except KeyboardInterrupt:
        print("nbcnn: interrupted", file=sys.stderr)
        return SIGINT
    except BrokenPipeError:
        # The reader of a pipe has gone (`… | head`); keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if os.environ.get("NBCNN_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"nbcnn: error: {message(error)}", file=sys.stderr)
        return exit_code(error)
