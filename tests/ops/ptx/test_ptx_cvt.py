"""Tests that conversions and vector accesses of bfloat16, float16 and tf32 round as `nbcnn.plan.storage` does: in the simulator, on a GPU; they
compile for the least architecture that has them."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.language import cuda, i4, jit
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.ptx.cvt import bf16, bf16_float, bf16_high, bf16_low, bf16x2, f16, f16_float, f16_high, f16_low, f16x2, tf32
from nbcnn.ops.ptx.vector import load_halves4, load_halves4_if, load_halves8, load_halves8_if, store_halves4, store_halves8
from nbcnn.plan.storage import decode, encode

EDGES = [0.0, -0.0, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, -1 - 3 * 2.0**-11, 3.4e38, -3.4e38, 1e-40, np.inf, -np.inf, np.nan]


@jit()
def round_kernel(x, halves, tens, back, count):
    i = i4(cuda.grid(1))
    if i < count:
        halves[i] = bf16(x[i])
        tens[i] = tf32(x[i])
        back[i] = bf16_float(halves[i])


@jit()
def round_half_kernel(x, halves, pairs, back, count):
    """Pair i is (x[i], −x[i]); back has both halves of every pair, then the single ones."""
    i = i4(cuda.grid(1))
    if i < count:
        halves[i] = f16(x[i])
        pairs[i] = f16x2(x[i], -x[i])
        back[i], back[count + i], back[2 * count + i] = f16_low(pairs[i]), f16_high(pairs[i]), f16_float(halves[i])


@jit()
def vector_kernel(x, y, z):
    """y = x swapped within pairs; z = the first eight of x, moved by predicated loads (the last four are not wanted)."""
    i = i4(cuda.threadIdx.x)
    a, b, c, d = load_halves8(x, i * i4(8))
    store_halves8(
        y,
        i * i4(8),
        bf16x2(bf16_high(a), bf16_low(a)),
        bf16x2(bf16_high(b), bf16_low(b)),
        bf16x2(bf16_high(c), bf16_low(c)),
        bf16x2(bf16_high(d), bf16_low(d)),
    )
    if i == i4(0):
        e, f, g, h = load_halves8_if(x, i4(0), True)
        store_halves8(z, i4(0), e, f, g, h)
        e, f = load_halves4(x, i4(8))
        store_halves4(z, i4(8), e, f)
        e, f = load_halves4_if(x, i4(12), False)
        store_halves4(z, i4(12), e, f)


def test_rounding_is_that_of_storage(device, rng):
    x = np.concatenate([np.array(EDGES), rng.standard_normal(51)]).astype(np.float32)
    sent = [device.empty(x.size, kind) for kind in ("float32", "bfloat16", "float32", "float32")]
    device.upload(sent[0], x)
    Launch(round_kernel, 1, 64, (*sent, np.int32(x.size))).run(device.stream)
    halves, tens, back = (device.download(a) for a in sent[1:])
    np.testing.assert_array_equal(decode(halves, "bfloat16"), decode(encode(x, "bfloat16"), "bfloat16"))
    np.testing.assert_array_equal(tens, encode(x, "tfloat32"))
    np.testing.assert_array_equal(back, decode(halves, "bfloat16"))


def test_float16_rounds_as_storage_and_numpy_do(device, rng):
    edges = [65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    x = np.concatenate([np.array(EDGES + edges), rng.standard_normal(42)]).astype(np.float32)
    n, sent = x.size, [device.empty(size * x.size, kind) for size, kind in ((1, "float32"), (1, "float16"), (1, "uint32"), (3, "float32"))]
    device.upload(sent[0], x)
    Launch(round_half_kernel, 1, 64, (*sent, np.int32(n))).run(device.stream)
    halves, back = device.download(sent[1]), device.download(sent[3])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decode(encode(x, "float16"), "float16"), wanted)
    np.testing.assert_array_equal(decode(halves, "float16"), wanted)
    np.testing.assert_array_equal(back.reshape(3, n), np.stack([wanted, -wanted, wanted]))


def test_vectors_keep_their_order(device, rng):
    x = encode(rng.standard_normal(16).astype(np.float32), "bfloat16")
    sent = [device.empty(16, "bfloat16") for _ in range(3)]
    device.upload(sent[0], x)
    Launch(vector_kernel, 1, 2, tuple(sent)).run(device.stream)
    y, z = device.download(sent[1]), device.download(sent[2])
    np.testing.assert_array_equal(y, x.reshape(-1, 2)[:, ::-1].reshape(-1))
    np.testing.assert_array_equal(z, np.where(np.arange(16) < 12, x, 0))


@pytest.mark.sampled
@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_conversions_compile(arch):
    halves, floats = np.empty(64, np.uint16), np.empty(64, np.float32)
    for launch in (Launch(round_kernel, 1, 64, (floats, halves, floats, floats, np.int32(64))), Launch(vector_kernel, 1, 2, (halves,) * 3)):
        assert compile_launch(launch, arch).frame_bytes == 0


@pytest.mark.sampled
@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("arch", ["75", "90a"])
def test_conversions_of_float16_compile(arch):
    floats, words = np.empty(64, np.float32), np.empty(64, np.uint32)
    assert compile_launch(Launch(round_half_kernel, 1, 64, (floats, words.view(np.uint16), words, floats, np.int32(16))), arch).frame_bytes == 0
