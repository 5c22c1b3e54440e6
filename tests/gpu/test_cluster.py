"""Tests of clusters of blocks: what the compiler writes into a kernel, by what it is known, and what the blocks read of each other."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from nbcnn.check.static import compile_launch, ptx_of_launch
from nbcnn.gpu import compiler, identity
from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.ptx.cluster import cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load_of_block

COMPILES = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
THREADS = 64


@cache
def neighbours_kernel(blocks: int):
    """y = x of the next block of the cluster, plus 1000 times the block's own rank."""

    @jit(launch_bounds=(THREADS, 1), cluster=blocks)
    def neighbours(x, y):
        memory = cuda.shared.array(THREADS, f4)
        tid, rank = cuda.threadIdx.x, cluster_rank()
        i = cuda.blockIdx.x * THREADS + tid
        memory[tid] = x[i]
        cuda.syncthreads()
        cluster_arrive()
        cluster_wait()
        value = load_of_block(memory, THREADS - 1 - tid, (rank + 1) % blocks)
        cluster_arrive_relaxed()
        y[i] = value + 1000.0 * rank
        cluster_wait()

    return neighbours


def launched(blocks, x, y):
    return Launch(neighbours_kernel(blocks), len(x) // THREADS, THREADS, (x, y))


@COMPILES
@pytest.mark.parametrize("blocks", [2, 8])
def test_ptx_and_cubin_have_the_size_of_a_cluster(blocks):
    launch = launched(blocks, *np.zeros((2, 16 * THREADS), np.float32))
    assert re.search(rf"^\.reqnctapercluster {blocks}, 1, 1$", ptx_of_launch(launch), re.M)
    report = compile_launch(launch)
    assert (report.cluster, report.frame_bytes) == (blocks, 0)


@COMPILES
def test_a_kernel_without_the_option_has_no_clusters():
    @jit(launch_bounds=(THREADS, 1))
    def alone(x, y):
        y[cuda.threadIdx.x] = x[cuda.threadIdx.x]

    launch = Launch(alone, 1, THREADS, tuple(np.zeros((2, THREADS), np.float32)))
    assert "percluster" not in ptx_of_launch(launch)
    assert compile_launch(launch).cluster == 0


def test_the_size_of_a_cluster_is_part_of_what_a_kernel_is():
    def made(**options):
        @jit(**options)
        def kernel(x):
            x[0] = 1.0

        return identity.digest(kernel)

    assert len({made(), made(cluster=4), made(cluster=8), made(launch_bounds=(32, 1), cluster=8)}) == 4


def test_a_block_reads_what_the_next_one_of_its_cluster_has(device):
    if compiler.NUMBA_SIMULATOR or (not SIMULATOR and device.capability != (9, 0)):
        pytest.skip("needs clusters")
    blocks, grid = 4, 12
    host = np.arange(grid * THREADS, dtype=np.float32)
    x, y = (device.empty(host.size, "float32") for _ in range(2))
    device.upload(x, host)
    launched(blocks, x, y).run(getattr(device, "stream", 0))
    parts = host.reshape(-1, blocks, THREADS)
    wanted = np.roll(parts, -1, 1)[:, :, ::-1] + 1000 * np.arange(blocks, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(device.download(y), wanted.reshape(-1))


@pytest.mark.skipif(not compiler.LOCKSTEP, reason="the driver says it on a GPU")
def test_a_grid_is_whole_clusters():
    x, y = np.zeros((2, 6 * THREADS), np.float32)
    with pytest.raises(ValueError, match="clusters of 4"):
        launched(4, x, y).run()
