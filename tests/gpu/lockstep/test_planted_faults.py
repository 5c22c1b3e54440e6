"""The checking mode finds faults that were planted, and nothing in the same kernels without them."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.gpu import compiler
from nbcnn.gpu.language import cuda, f4, i4, jit, u4
from nbcnn.ops.kernel.reduce import THREADS, partials_kernel
from nbcnn.ops.kernel.tensor_maps import encode_tiled
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cluster import cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load_of_block
from nbcnn.ops.ptx.cp_async import cp_async_4, cp_async_commit, cp_async_wait
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.tma import commit_stores, load_tile_2d, store_tile_2d, wait_stores_read
from nbcnn.ops.ptx.vector import load4

if not compiler.LOCKSTEP:
    pytest.skip("needs NBCNN_SIMULATOR=1", allow_module_level=True)

from nbcnn.gpu.lockstep import names
from nbcnn.gpu.lockstep.check import checking

N = 64
"""Threads of a block: two warps."""


def found(kernel, *arrays, grid=1, block=N):
    with checking() as seen:
        kernel[grid, block](*arrays)
    assert all(str(each) for each in seen.faults)
    return seen


def floats(size):
    return np.arange(size, dtype=np.float32)


def planted(fault):
    """The kernel that turns its block's elements around by way of shared memory, with a fault or without one (None)."""
    MISSING, DIVERGENT, LATE, HALO = (fault == name for name in ("no barrier", "barrier in a branch", "overwritten", "halo"))
    REACH = 1 if fault == "past the end" else 0
    SLOT = 1 if fault == "one slot" else N

    @jit()
    def kernel(x, y):
        tile, tid = cuda.shared.array(N, f4), cuda.threadIdx.x
        if not HALO or tid > 0:
            tile[tid % SLOT] = x[cuda.blockIdx.x * N + tid]
        if DIVERGENT:
            if tid < 40:
                cuda.syncthreads()
        elif not MISSING:
            cuda.syncthreads()
        y[cuda.blockIdx.x * N + tid] = tile[N - 1 - tid + REACH] if SLOT == N else tile[0]
        if LATE:
            tile[tid] = 0.0

    return kernel


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no barrier", "race"),
        ("overwritten", "race"),
        ("one slot", "race"),
        ("barrier in a branch", "barrier"),
        ("halo", "uninitialised"),
        ("past the end", "out of bounds"),
    ],
)
def test_a_fault_within_a_block_is_found(fault, kind):
    seen = found(planted(fault), floats(2 * N), floats(2 * N), grid=2)
    assert kind in seen.kinds(), [str(each) for each in seen.faults]
    assert all(__file__ in each.line for each in seen.faults)


def test_the_same_kernel_without_a_fault_has_none_and_is_right():
    x, y = floats(2 * N), np.zeros(2 * N, np.float32)
    seen = found(planted(None), x, y, grid=2)
    assert seen.faults == []
    assert y.tolist() == x.reshape(2, N)[:, ::-1].reshape(-1).tolist()


def warp_reduction(synced):
    SYNCED = synced

    @jit()
    def kernel(x, y):
        sums, tid = cuda.shared.array(32, f4), cuda.threadIdx.x
        sums[tid] = x[tid]
        cuda.syncthreads()
        half = 16
        while half > 0:
            value = sums[tid] + sums[tid + half] if tid < half else sums[tid]
            if SYNCED:
                cuda.syncwarp()
            sums[tid] = value
            if SYNCED:
                cuda.syncwarp()
            half >>= 1
        y[tid] = sums[0]

    return kernel


def test_a_warp_that_counts_on_running_in_step_is_found():
    x, y = floats(32), np.zeros(32, np.float32)
    assert found(warp_reduction(False), x, y, block=32).kinds() == {"race"}
    assert found(warp_reduction(True), x, y, block=32).faults == []
    assert y.tolist() == [496.0] * 32


def sum_of_blocks(fence, atomic):
    """The last block adds up what all have written."""
    FENCE, ATOMIC = fence, atomic

    @jit()
    def kernel(x, partials, counter, total):
        tid, block = cuda.threadIdx.x, cuda.blockIdx.x
        if tid == 0:
            partials[block] = x[block]
            if FENCE:
                cuda.threadfence()
            last = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1 if ATOMIC else block == cuda.gridDim.x - 1
            if last:
                value = 0.0
                for i in range(cuda.gridDim.x):
                    value += partials[i]
                total[0] = value

    return kernel


@pytest.mark.parametrize(("fence", "atomic", "right"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_block_may_read_what_others_write_behind_a_fence_and_an_atomic_update(fence, atomic, right):
    total = np.zeros(1, np.float32)
    seen = found(sum_of_blocks(fence, atomic), floats(5), floats(5), np.zeros(1, np.int32), total, grid=5, block=32)
    assert seen.kinds() == (set() if right else {"race between blocks"})
    assert total[0] == 10


def test_blocks_that_write_the_same_element_are_found():
    @jit()
    def kernel(y):
        y[cuda.threadIdx.x] = cuda.blockIdx.x

    assert found(kernel, np.zeros(N, np.float32), grid=3).kinds() == {"race between blocks"}
    assert found(kernel, np.zeros(N, np.float32), grid=1).faults == []


@pytest.mark.parametrize(("running", "kinds"), [(0, set()), (1, {"copy"})])
def test_shared_memory_is_not_touched_while_a_copy_to_it_is_on_its_way(running, kinds):
    """Also where the copy would bring what is there already."""
    wait = cp_async_wait(running)

    @jit()
    def kernel(x, y):
        tile, tid = cuda.shared.array(N, f4), cuda.threadIdx.x
        tile[tid] = x[tid]
        cp_async_4(byte_address_shared(tile) + 4 * tid, byte_address_global(x) + 4 * tid, 4)
        cp_async_commit()
        wait()
        y[tid] = tile[tid]

    assert found(kernel, floats(N), np.zeros(N, np.float32)).kinds() == kinds


def boxes_in_a_ring(fault):
    """The kernel that copies rows of 32 elements through a ring of two boxes that TMA fills and empties, with a fault or without one (None)."""
    PARITY, WAITS, LAST = int(fault != "the same phase again"), fault != "no wait", int(fault == "no wait for the last")
    BYTES = 132 if fault == "bytes that nobody sends" else 128
    RELEASES, AT = fault != "filled while it is stored", 64 if fault == "within a unit" else 0

    @jit()
    def kernel(maps, rows):
        tile, barriers, tid = cuda.shared.array(64, f4), cuda.shared.array(4, f4), cuda.threadIdx.x
        source, target = byte_address_global(maps), byte_address_global(maps) + 128
        to, full = byte_address_shared(tile), byte_address_shared(barriers)
        if tid == 0:
            mbarrier_init(full, 1)
            mbarrier_init(full + 8, 1)
            mbarrier_arrive_expect_tx(full, BYTES)
            load_tile_2d(to + AT, source, 0, 0, full)
        cuda.syncthreads()
        for row in range(rows - LAST):
            stage = row & 1
            if WAITS:
                mbarrier_wait(full + 8 * stage, row >> 1 & PARITY)
            tile[32 * stage + tid] *= 2.0
            cuda.syncwarp()
            if tid == 0:
                store_tile_2d(target, 0, row, to + 128 * stage)
                commit_stores()
                if RELEASES:
                    wait_stores_read()
                if row + 1 < rows:
                    mbarrier_arrive_expect_tx(full + 8 * (1 - stage), BYTES)
                    load_tile_2d(to + 128 * (1 - stage), source, 0, row + 1, full + 8 * (1 - stage))
        wait_stores_read()

    return kernel


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("the same phase again", "copy"),
        ("no wait", "copy"),
        ("no wait for the last", "stuck"),
        ("bytes that nobody sends", "stuck"),
        ("within a unit", "misaligned"),
        ("filled while it is stored", None),
        (None, None),
    ],
)
def test_a_box_arrives_when_its_phase_is_waited_for(fault, kind):
    x, y = floats(32 * 5).reshape(5, 32), np.zeros((5, 32), np.float32)
    maps = np.concatenate([encode_tiled(array, (32, 5), (32, 1), plain=True) for array in (x, y)])
    seen = found(boxes_in_a_ring(fault), maps, np.int32(5), block=32)
    assert (kind in seen.kinds()) if kind else not seen.faults, [str(each) for each in seen.faults]
    assert (y.tolist() == (2 * x).tolist()) == (fault is None)


@pytest.mark.parametrize("fault", [None, "no wait before reading", "no release", "no wait at the end"])
def test_blocks_of_a_cluster_that_do_not_meet_are_found(fault):
    arrive = cluster_arrive_relaxed if fault == "no release" else cluster_arrive
    FIRST, LAST = fault != "no wait before reading", fault != "no wait at the end"

    @jit(cluster=2)
    def kernel(x, y):
        memory, tid = cuda.shared.array(N, f4), cuda.threadIdx.x
        i = cuda.blockIdx.x * N + tid
        memory[tid] = x[i]
        if FIRST:
            arrive()
            cluster_wait()
        y[i] = load_of_block(memory, tid, 1 - cluster_rank())
        cluster_arrive_relaxed()
        if LAST:
            cluster_wait()

    assert found(kernel, floats(4 * N), np.zeros(4 * N, np.float32), grid=4).kinds() == ({"race of a cluster"} if fault else set())


@pytest.mark.parametrize("guarded", [False, True])
def test_a_grid_larger_than_its_array_is_found(guarded):
    GUARDED = guarded

    @jit()
    def kernel(y, n):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if not GUARDED or i < n:
            y[i] = 1.0

    seen = found(kernel, np.zeros(100, np.float32), np.int32(100), grid=2)
    assert seen.kinds() == (set() if guarded else {"out of bounds"})
    if not guarded:
        assert "index 100 of a global array y of 100 elements: thread (36, 0, 0) of block (1, 0, 0)" in str(seen.faults[0])


@pytest.mark.parametrize("offset", [0, 1])
def test_a_misaligned_vector_load_is_found(offset):
    OFFSET = offset

    @jit()
    def kernel(x, y):
        tid = cuda.threadIdx.x
        a, b, c, d = load4(x, 4 * tid + OFFSET)
        y[tid] = a + b + c + d

    seen = found(kernel, floats(4 * N + 4), np.zeros(N, np.float32))
    assert seen.kinds() == ({"misaligned"} if offset else set())


@pytest.mark.parametrize("lanes", [16, 32])
def test_a_shuffle_from_a_lane_that_takes_no_part_is_found(lanes):
    LANES = lanes

    @jit()
    def kernel(y):
        tid = cuda.threadIdx.x
        if tid < LANES:
            y[tid] = cuda.shfl_xor_sync(0xFFFFFFFF, tid, 16)

    assert found(kernel, np.zeros(N, np.float32), block=N).kinds() == ({"shuffle"} if lanes == 16 else set())


@pytest.mark.parametrize("cleared", [False, True])
def test_a_local_array_that_is_read_before_it_is_written_is_found(cleared):
    CLEARED = cleared

    @jit()
    def kernel(y):
        sums = cuda.local.array(2, f4)
        if CLEARED:
            sums[1] = 0.0
        sums[1] += 1.0
        y[cuda.threadIdx.x] = sums[1]

    assert found(kernel, np.zeros(N, np.float32)).kinds() == (set() if cleared else {"uninitialised local"})


def test_requests_sectors_and_bank_conflicts_are_counted():
    @jit()
    def kernel(x, y, z):
        tile, tid = cuda.shared.array((32, 32), f4), cuda.threadIdx.x
        for row in range(32):
            tile[row, tid] = x[row * 32 + tid]
        cuda.syncthreads()
        for row in range(32):
            y[row * 32 + tid] = tile[tid, row]  # 32 rows, one bank
        z[tid * 32] = 1.0  # a sector a thread

    seen = found(kernel, floats(1024), floats(1024), floats(1024), block=32)
    assert seen.faults == []
    [launch] = seen.launches
    lines = {(each.what, each.requests): (each.passes, each.least, each.bytes) for each in launch.lines}
    assert lines == {
        ("global load", 32): (32 * 4, 32 * 4, 4096),
        ("shared store", 32): (32, 32, 4096),
        ("shared load", 32): (32 * 32, 32, 4096),
        ("global store", 32): (32 * 4, 32 * 4, 4096),
        ("global store", 1): (32, 4, 128),
    }
    assert (launch.barriers, launch.shared, launch.grid, launch.block) == (1, 4096, (1, 1, 1), (32, 1, 1))


def test_integers_of_a_kernel_are_of_32_bits():
    @jit()
    def kernel(y, h):
        tid = cuda.threadIdx.x
        word = u4(tid) * 0x9E3779B9
        y[tid] = i4(word >> 16) ^ i4(word)
        h[tid] = tid / 3 + 1

    y, h = np.zeros(N, np.int32), np.zeros(N, np.float32)
    kernel[1, N](y, h)
    word = np.arange(N, dtype=np.uint32) * np.uint32(0x9E3779B9)
    assert y.tolist() == ((word >> np.uint32(16)).astype(np.int32) ^ word.astype(np.int32)).tolist()
    assert h.tolist() == (np.arange(N, dtype=np.float32) / np.float32(3) + np.float32(1)).tolist()


def test_the_barriers_of_a_kernel_of_ours_are_needed(monkeypatch):
    partials, total = np.arange(300, dtype=np.float64), np.zeros(1)
    arguments = partials, np.int32(300), np.float64(2), total
    assert found(partials_kernel(False), *arguments, block=THREADS).faults == []
    assert total[0] == 2 * partials.sum()
    monkeypatch.setattr(names.cuda, "syncthreads", lambda: None)
    assert found(partials_kernel(False), *arguments, block=THREADS).kinds() == {"race"}
