"""This module shares the cores of a machine among the processes of pytest (`-n`), and the tests that take longest.

Each process would have as many threads of BLAS as there are cores, and as many compile workers, one process after another.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from nbcnn.gpu import compile_pool
from nbcnn.gpu import device as gpu_device

LONGEST = (
    "test_a_training_killed_on_the_gpu_ends_with_the_same_bits",
    "test_tuned_tiles_of_real_kernels_give_the_same_gradients",
    "test_a_kernel_that_writes_where_it_may_not",
    "test_conv_wgmma.py::test_parity",
    "test_parity.py::test_row_is_within_its_bounds",
    "test_conv_thin_mma_first.py::test_",
    "test_conv_mma.py::test_",
    "test_conv_mma_wgrad.py::test_",
    "test_every_tile_is_right",
    "test_tensor_cores",
    "test_conv_thin_mma_last_fprop.py::test_parity",
    "test_real_shapes_in_every_tile",
    "test_series_that_",
    "test_it_is_right_on_a_hopper",
    "test_training_on_kernels",
    "test_a_ready_made_graph_agrees",
    "test_gradients_of_a_graph_agree",
)
"""Parts of the names of GPU tests that compile a dozen kernels or more, or run several programs."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(config) -> None:
    """In the process that starts the others: how many threads BLAS has in each of them, and in the programs that tests start."""
    workers = getattr(config.option, "numprocesses", None)
    if workers and not hasattr(config, "workerinput"):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, _cores() // workers)))
    elif hasattr(config, "workerinput"):
        config.pluginmanager.register(Share(config.workerinput["workercount"]))


class Share:
    """A plugin of one of several processes that use a GPU."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        """Compile on this process's part of the cores, beside the others instead of behind them, and deal the tests of LONGEST out."""
        if gpu_device.SIMULATOR or gpu_device.gpu_missing():
            return
        part = max(1, _cores() // self.workers)
        compile_pool._cores, compile_pool.locked = lambda: part, nullcontext
        items[:] = dealt(items, self.workers)


def dealt(items, workers):
    """`items` in an order in which the run of the list that `worksteal` gives each process begins with its part of LONGEST."""
    places = [next((at for at, name in enumerate(LONGEST) if name in item.nodeid), None) for item in items]
    longest = [items[at] for at in sorted((at for at, place in enumerate(places) if place is not None), key=lambda at: places[at])]
    rest = [item for item, place in zip(items, places, strict=True) if place is None]
    made = []
    for worker in range(workers):
        mine = longest[worker::workers]
        count = max(0, (len(items) - len(made)) // (workers - worker) - len(mine))
        made += mine + rest[:count]
        del rest[:count]
    return made + rest
