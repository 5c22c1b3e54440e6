"""What kernels are written in: `jit`, `cuda`, and the types."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from nbcnn.gpu import kernel_cache

_CACHE = kernel_cache.folder()
if _CACHE is not None:
    os.environ["NUMBA_CACHE_DIR"] = str(_CACHE)  # read when numba is imported, below

from numba import cuda as _cuda  # noqa: E402
from numba import types as _types  # noqa: E402
from numba.core import config  # noqa: E402
from numba.cuda.core.errors import NumbaPerformanceWarning  # noqa: E402

# One block of a small test shape is no performance problem, and users cannot act on the message.
warnings.simplefilter("ignore", NumbaPerformanceWarning)

cuda: Any = _cuda
types: Any = _types

SIMULATOR = bool(config.ENABLE_CUDASIM)
"""True when NUMBA_ENABLE_CUDASIM=1: kernels run as Python threads, without a GPU."""

f4: Any
i4: Any
u4: Any
i8: Any
f4, i4, u4, i8 = types.float32, types.int32, types.uint32, types.int64

_NOT_IN_SIMULATOR = ("launch_bounds", "max_registers", "lto", "cache")


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`cuda.jit(**options)`, less the options that the simulator does not know.

    Use `jit(device=True)` for device functions and `jit(launch_bounds=(threads, blocks))` for kernels. Compiled kernels
    are kept on disk (`nbcnn.gpu.kernel_cache`).
    """
    if not options.get("device"):
        options.setdefault("cache", _CACHE is not None)
    if SIMULATOR:
        for name in _NOT_IN_SIMULATOR:
            options.pop(name, None)
    return cuda.jit(**options)
