"""Threads that run in step part and meet again as Python says: every kernel here against the same function run thread by thread in Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.gpu import compiler
from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_4, cp_async_16, cp_async_commit, cp_async_wait

if not compiler.LOCKSTEP:
    pytest.skip("needs NBCNN_SIMULATOR=1", allow_module_level=True)

from nbcnn.gpu.lockstep import numbers
from nbcnn.gpu.lockstep.rewrite import Refused

N = 48


def ladder(i, x):
    if i % 5 == 0:
        return -1
    if i % 3 == 0 and x[i] > 0:
        return x[i] + i
    if i % 3 == 1 or x[i] == 2:
        y = 7
    elif i > 30:
        return i
    else:
        y = x[i] * (2 if i > 11 else 3)
    return y + 1


def collatz(i, x):
    steps, n = 0, i + 1
    while n != 1:
        if steps == x[i] + 5:
            break
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps * 100 + n


def skips(i, x):
    total = 0
    for k in range(i % 7, i):
        if k % 3 == x[i] % 3:
            continue
        if total > 60:
            break
        total += k
    for k in range(10):
        if k == i:
            return total
        if k % 2:
            continue
        total += 1
    return -total


def nested(i, x):
    found = -1
    for a in range(4):
        b = 0
        while b < i % 4:
            if a * b == x[i]:
                found = a * 10 + b
                break
            b += 1
        if found >= 0 and a > 1:
            break
    return found


def down(i, x):
    total = 0
    for k in range(i, -1, -3):
        total += k if 3 < k < 20 else -1
    return total if not (total == 12 or i == 4) else 0


FUNCTIONS = [ladder, collatz, skips, nested, down]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_control_flow_is_pythons(function):
    inner = jit(device=True)(function)

    @jit()
    def kernel(x, y, n):
        i = cuda.grid(1)
        if i >= n:
            return
        y[i] = inner(i, x)

    x = np.random.default_rng(3).integers(-2, 9, N).astype(np.int32)
    y = np.full(N + 20, 99, np.int32)
    kernel[3, 32](x, y, np.int32(N))
    assert y.tolist() == [function(i, x.tolist()) for i in range(N)] + [99] * 20


def test_a_variable_keeps_its_value_where_a_branch_is_not_taken():
    @jit()
    def kernel(y):
        i = cuda.threadIdx.x
        a, b = 0, 1.5
        if i > 3:
            a = i
            if i > 6:
                b, a = a * 0.5, 2
        else:
            b = 4
        y[i] = a + b

    y = np.zeros(10, np.float32)
    kernel[1, 10](y)
    assert y.tolist() == [4, 4, 4, 4, 5.5, 6.5, 7.5, 5.5, 6.0, 6.5]


def test_local_arrays_are_a_threads_own():
    @jit()
    def kernel(y):
        i = cuda.threadIdx.x
        values = cuda.local.array(4, f4)
        for k in range(4):
            values[k] = k
        values[i % 4] = 10.0
        if i < 4:
            values[0] = -1.0
        y[i] = values[0] + values[1] + values[2] + values[3] + values[i % 3]

    def wanted(i):
        values = [0.0, 1.0, 2.0, 3.0]
        values[i % 4] = 10.0
        if i < 4:
            values[0] = -1.0
        return sum(values) + values[i % 3]

    y = np.zeros(8, np.float32)
    kernel[1, 8](y)
    assert y.tolist() == [wanted(i) for i in range(8)]


def test_blocks_have_shared_memory_of_their_own():
    @jit()
    def kernel(y):
        tile, tid, block = cuda.shared.array(8, i4), cuda.threadIdx.x, cuda.blockIdx.x
        tile[tid] = 10 * block + tid
        cuda.syncthreads()
        y[block * 8 + tid] = tile[7 - tid] + tile[0]

    y = np.zeros(24, np.int32)
    kernel[3, 8](y)
    assert y.tolist() == [10 * b + 7 - t + 10 * b for b in range(3) for t in range(8)]


def test_warps_shuffle_and_vote():
    @jit()
    def kernel(y, votes):
        tid = cuda.threadIdx.x
        value = tid * 1.0
        for half in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, half)
        y[tid] = value
        word = cuda.ballot_sync(0xFFFFFFFF, tid % 32 > 29)
        votes[tid] = cuda.popc(word) * 100 + cuda.ffs(word)

    y, votes = np.zeros(64, np.float32), np.zeros(64, np.int32)
    kernel[1, 64](y, votes)
    assert y.tolist() == [496.0] * 32 + [1520.0] * 32
    assert votes.tolist() == [231] * 64


def test_functions_of_math_are_of_float32():
    @jit()
    def kernel(x, y):
        i = cuda.threadIdx.x
        y[i] = math.exp(-abs(x[i])) + max(x[i], 0.0) + math.sqrt(min(i, 4))

    x = np.linspace(-3, 3, 16).astype(np.float32)
    y = np.zeros(16, np.float32)
    kernel[1, 16](x, y)
    wanted = np.exp(-np.abs(x)) + np.maximum(x, 0) + np.sqrt(np.minimum(np.arange(16), 4)).astype(np.float32)
    # Three functions right to 1 ulp of at most 1, 3 and 2, two sums of at most 6: 8 roundings of 2^-24 · 6.
    np.testing.assert_allclose(y, wanted, rtol=0, atol=8 * 2**-24 * 6)


def test_a_failure_names_the_thread_and_the_line():
    @jit()
    def kernel(y):
        i = cuda.blockIdx.x * 4 + cuda.threadIdx.x
        if i != 3:
            y[i] = 1.0

    with pytest.raises(IndexError, match=r"index 5 of a global array y of 5 elements: thread \(1, 0, 0\) of block \(1, 0, 0\)") as failed:
        kernel[2, 4](np.zeros(5, np.float32))
    assert any(each.path.name == "test_in_step.py" and each.lineno == kernel.py_func.__code__.co_firstlineno + 3 for each in failed.traceback)


def test_what_no_kernel_has_is_refused_with_its_line():
    @jit()
    def kernel(y):
        y[0] = [1, 2][0]

    with pytest.raises(Refused, match=r"test_in_step.py:\d+: kernels have no List"):
        kernel[1, 1](np.zeros(1, np.float32))


def test_floats_become_integers_as_ptx_converts_them():
    """What is beyond the integers becomes the nearest; NaN is 0 from 32 bits to 32, and else the highest bit alone."""
    given = [np.nan, np.inf, -np.inf, -1.5, -0.5, 2.5, 3e9, 5e9, -3e9]
    top = 2**31 - 1
    wanted = {
        ("float32", "int32"): [0, top, -(2**31), -1, 0, 2, top, top, -(2**31)],
        ("float32", "uint32"): [0, 2**32 - 1, 0, 0, 0, 2, 3_000_000_000, 2**32 - 1, 0],
        ("float64", "int32"): [-(2**31), top, -(2**31), -1, 0, 2, top, top, -(2**31)],
        ("float64", "uint32"): [2**31, 2**32 - 1, 0, 0, 0, 2, 3_000_000_000, 2**32 - 1, 0],
        ("float32", "int64"): [-(2**63), 2**63 - 1, -(2**63), -1, 0, 2, 3_000_000_000, 5_000_000_000, -3_000_000_000],
        ("float64", "uint64"): [2**63, 2**64 - 1, 0, 0, 0, 2, 3_000_000_000, 5_000_000_000, 0],
    }
    for (source, target), expected in wanted.items():
        made = numbers.cast(np.array(given, source), np.dtype(target))
        assert made.tolist() == expected, (source, target)
        assert [int(numbers.cast(np.dtype(source).type(each), np.dtype(target))) for each in given] == expected
    assert int(numbers.cast(-1.5, np.dtype("uint32"))) == 0


def test_addresses_are_compared_by_where_they_are():
    """A ring of three slots, from whose end a thread goes back to the start by comparing addresses."""
    all_there = cp_async_wait(0)

    @jit()
    def kernel(x, y):
        ring, tid = cuda.shared.array(3 * 32, f4), cuda.threadIdx.x
        first = byte_address_shared(ring) + 4 * tid
        end, at = first + 4 * 96, first
        total = 0.0
        for k in range(7):
            cp_async_4(at, byte_address_global(x) + 4 * (32 * k + tid), 4)
            cp_async_commit()
            all_there()
            total += ring[32 * (k % 3) + tid]
            at += 4 * 32
            if at == end:
                at = first
        if at != first and at > first and not at < first:
            y[tid] = total

    x, y = np.arange(7 * 32, dtype=np.float32), np.zeros(32, np.float32)
    kernel[1, 32](x, y)
    np.testing.assert_array_equal(y, x.reshape(7, 32).sum(0))


@pytest.mark.parametrize(("stages", "running", "right"), [(2, 0, True), (3, 1, True), (3, 2, False), (2, 1, False)])
def test_copies_arrive_when_their_group_is_waited_for(stages, running, right):
    """A ring of `stages` slots, of which stages − 1 are on their way: one of them too many leaves the slot as it was before."""
    wait, slots, ahead, most = cp_async_wait(running), 128 * stages, stages - 1, stages

    @jit()
    def kernel(x, y, trips):
        ring, tid = cuda.shared.array(slots, f4), cuda.threadIdx.x
        to, source = byte_address_shared(ring), byte_address_global(x)
        for k in range(ahead):
            cp_async_16(to + 16 * (32 * k + tid), source + 16 * (32 * k + tid), 16 if k < trips else 0)
            cp_async_commit()
        total = 0.0
        for k in range(trips):
            wait()
            cuda.syncthreads()
            total += ring[128 * (k % most) + 4 * tid]
            cuda.syncthreads()
            nxt = k + ahead
            cp_async_16(to + 16 * (32 * (nxt % most) + tid), source + 16 * (32 * min(nxt, trips - 1) + tid), 16 if nxt < trips else 0)
            cp_async_commit()
        y[tid] = total

    trips = 6
    x, y = np.random.default_rng(1).random(128 * trips).astype(np.float32), np.zeros(32, np.float32)
    kernel[1, 32](x, y, trips)
    wanted = x.reshape(trips, 32, 4)[:, :, 0].sum(0)
    assert np.allclose(y, wanted, rtol=1e-6) == right
