"""Tests of the simulator's blocks: threads take turns, barriers hold for who has not ended, waiting ends, failures are raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nbcnn.gpu.compiler import numba_cuda
from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, i4, jit
from nbcnn.gpu.simulator import let_others_go_first

pytestmark = pytest.mark.skipif(not NUMBA_SIMULATOR, reason="needs Numba's simulator")


def run(kernel, threads, size):
    """What a block of `kernel` makes of zeros."""
    out = numba_cuda().to_device(np.zeros(size, np.int32))
    kernel[1, threads](out)
    return out.copy_to_host().tolist()


def test_a_barrier_holds_for_all_that_have_not_ended():
    @jit()
    def kernel(out):
        ones, tid = cuda.shared.array(8, i4), cuda.threadIdx.x
        ones[tid] = 1
        if tid % 3 == 0:
            return
        cuda.syncthreads()
        out[tid] = sum(ones[i] for i in range(8))
        cuda.syncthreads()
        ones[tid] = 10
        cuda.syncthreads()
        out[tid] += sum(ones[i] for i in range(8))

    # 1, 2, 4, 5 and 7 of the eight write 10 in place of 1.
    assert run(kernel, 8, 8) == [0, 8 + 53, 8 + 53, 0, 8 + 53, 8 + 53, 0, 8 + 53]


def test_a_thread_may_wait_for_what_a_later_one_writes():
    @jit()
    def kernel(out):
        tid = cuda.threadIdx.x
        while tid < 3 and out[tid + 1] == 0:
            let_others_go_first()
        out[tid] = tid + 1
        cuda.syncthreads()  # where the last waits while the others still look
        last = out[3]
        cuda.syncthreads()
        out[tid] += last

    assert run(kernel, 4, 4) == [5, 6, 7, 8]


def test_a_failure_is_raised_and_ends_the_others():
    before = threading.active_count()

    @jit()
    def kernel(out):
        if cuda.threadIdx.x == 2:
            raise ValueError("no such weight")
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    with pytest.raises(ValueError, match=r"tid=\[2, 0, 0\].*no such weight"):
        run(kernel, 4, 4)
    assert threading.active_count() == before


@jit(device=True)
def thread_of():
    return cuda.threadIdx.x


def test_a_module_has_its_own_cuda_back_after_a_launch():
    @jit()
    def kernel(out):
        out[cuda.threadIdx.x] = thread_of()

    real = cuda
    assert run(kernel, 3, 3) == [0, 1, 2]
    assert cuda is real
