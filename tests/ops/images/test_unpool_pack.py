"""Tests of un-pooling and packing in every storage dtype: exact against their references, in the simulator and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean

from nbcnn.check.one_op import Bound, Unsupported, pack_array, run_op
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.conv.fused import REFERENCES, pack_index
from nbcnn.ops.images import unpool
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.update import pack_weights
from nbcnn.plan.op import Op
from nbcnn.plan.storage import FLOATING, decode, encode

# Channels in eights, in fours, and neither; one window and several.
SHAPES = [(2, 16, 2, 3), (1, 12, 3, 2), (2, 7, 2, 2), (1, 3, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("store", FLOATING)
def test_unpool_is_exact(store, shape, device, rng):
    n, k, p, q = shape
    dy = decode(encode(rng.standard_normal(shape).astype(np.float32), store), store)
    index = pack_index(rng.integers(0, 4, shape))
    outs = [((n, k, 2 * p, 2 * q), "float32")]
    (dx,) = run_op(unpool.IMPL, "unpool", [dy, index], outs, device=device, layout="NHWC", store=store)
    wanted = np.empty_like(dx)
    REFERENCES[named("unpool")](dy, index, wanted)
    np.testing.assert_array_equal(dx, wanted)


def test_unpool_wants_channels_last():
    with pytest.raises(Unsupported, match="NHWC"):
        run_op(
            unpool.IMPL, "unpool", [np.zeros((1, 4, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.uint8)], [((1, 4, 2, 2), "float32")], device=Host()
        )


# One row given flat or as (1, n); more terms than are in flight at once; several blocks, the last of them not full.
@pytest.mark.parametrize("shape", [(37,), (1, 36), (4, 40), (6, 32), (2, 1500)])
@pytest.mark.parametrize("kind", FLOATING)
def test_packed_weights_are_summed_and_rounded_once(kind, shape, device, rng):
    params = rng.standard_normal(50).astype(np.float32)
    index = rng.integers(-1, params.size, shape).astype(np.int32)
    count = shape[-1]
    arrays = device.empty(params.size, "float32"), device.empty(index.size, "int32"), device.empty(count, kind)
    device.upload(arrays[0], params)
    device.upload(arrays[1], index)
    dtypes = {"in_dtypes": ("float32", "int32"), "out_dtypes": (kind,)}
    call = Call(Op("pack_weights"), arrays[:2], arrays[2:], ((params.size,), shape), ((count,),), **dtypes)
    for launch in pack_weights.bind(call):
        launch.run(device.stream)
    # The reference adds in the same order, in float32.
    wanted = np.empty(count, np.float32)
    pack_weights.pack_weights(params, index, wanted)
    assert np.abs(wanted - pack_array(params.astype(np.float64), index)).max() <= 6 * np.finfo(np.float32).eps * np.abs(params).max()
    np.testing.assert_array_equal(decode(device.download(arrays[2]), kind), decode(encode(wanted, kind), kind))


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
def test_kernels_compile_without_spills():
    def unpooled(channels, store):
        dy, index = np.zeros((1, channels, 1, 1), np.float32), np.zeros((1, -(-channels // 4), 1, 1), np.uint8)
        outs = [((1, channels, 2, 2), "float32")]
        return Bound(unpool.IMPL, "unpool", [dy, index], outs, device=Host(), layout="NHWC", store=store).launches

    index, packed = np.zeros((4, 8), np.int32), np.zeros(8, np.uint16)
    call = Call(Op("pack_weights"), (np.zeros(9, np.float32), index.reshape(-1)), (packed,), ((9,), (4, 8)), ((8,),), out_dtypes=("bfloat16",))
    for launch in (*unpooled(8, "bfloat16"), *unpooled(4, "float32"), *unpooled(3, "float32"), *pack_weights.bind(call)):
        assert_lean(launch, "80")
