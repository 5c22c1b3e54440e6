"""EvoNorm-B0 with a cluster of blocks a channel: which slabs there are, the kernel against the reference, compiled, what it asks memory for.

The simulator has no clusters: there a block holds all images of its channel.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from compiled import assert_lean
from counted import counted
from test_evonorm_held import ROWS, bare, bound

from nbcnn.check import gradcheck
from nbcnn.check.norm_cases import norm_cases
from nbcnn.check.one_op import Bound, Unsupported, run_op
from nbcnn.check.static import ptx_of_launch
from nbcnn.gpu import device
from nbcnn.modes import COMMON
from nbcnn.ops.evonorm.b0_cluster import enough, slabs_of
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.norms.held import MOST_FLOATS, Held

OP = "evonorm_b0_fprop"
ROW, IMPL = ROWS["NCHW"], COMMON[OP]
IMAGES = (64, 28, 28)


def case_of(*shape, values="normal"):
    return next(case for case in norm_cases(((shape, 1, values),)) if case.op == OP)


@pytest.mark.parametrize("shape", [(16, *IMAGES), (3, 8, 2, 2), (100, 12, 14, 14), (256, *IMAGES), (1, 8, 32, 32), (7, 64, 4, 7)])
def test_slabs_have_all_images_of_a_channel(shape):
    n, _, h, w = shape
    made = slabs_of(shape)
    assert made
    for held in made:
        assert held.images * held.cluster == n
        assert (held.threads % (32 * held.images), held.threads <= 1024) == (0, True)
        ranks = held.threads // held.images
        assert (held.slots - 1) * ranks < h * w // 4 <= held.slots * ranks
        assert 4 * held.slots <= MOST_FLOATS
        assert held.blocks * held.threads <= 2048


def test_what_no_cluster_holds():
    assert slabs_of((2, 6, 3, 5)) == []  # fifteen pixels are no quads
    assert slabs_of((1024, *IMAGES)) == []
    assert slabs_of((2, 8, 512, 512)) == []


def test_clusters_come_first_where_there_are_any(monkeypatch):
    def tiles(layout, op=OP, shape=(16, *IMAGES)):
        return COMMON[op].candidates(bare(op, shape, layout, 1), 132)

    monkeypatch.setattr(device, "has_tma", lambda: True)
    assert tiles("NCHW")[0].cluster > 1
    assert enough(tiles("NCHW")[0], 64, 132)
    assert not any(held.cluster for held in [*tiles("NHWC"), *tiles("NCHW", "evonorm_b0_grads"), *tiles("NCHW", "evonorm_b0_infer")])
    few = [bool(held.cluster) for held in tiles("NCHW", shape=(16, 4, 28, 28))]
    assert few[0] is device.SIMULATOR  # eight blocks for each of four channels leave most of the GPU idle
    assert any(few)
    monkeypatch.setattr(device, "has_tma", lambda: False)
    assert not any(held.cluster for held in tiles("NCHW"))


@pytest.mark.parametrize(
    ("shape", "threads"),
    [((2, 4, 3, 4), 64), ((5, 2, 2, 2), 160), ((1, 2, 16, 16), 64), ((2, 1, 12, 12), 128)],
    ids=["a warp a plane", "lanes without a plane", "two warps a plane", "and an idle lane"],
)
@pytest.mark.parametrize("values", ["normal", "offset 2000", "constant planes"])
def test_a_block_with_all_images_against_the_reference(shape, threads, values, place):
    case, n = case_of(*shape, values=values), shape[0]
    slots = -(-shape[2] * shape[3] // (4 * (threads // n)))
    error = gradcheck.parity(ROW, IMPL, case, place, Held(1, n, threads, slots, 1, 1, cluster=1))
    assert error <= gradcheck.bound(case), error


def test_a_tile_is_for_its_batch(place):
    with pytest.raises(Unsupported, match="4 blocks of 1 images are not 2"):
        gradcheck.parity(ROW, IMPL, case_of(2, 4, 3, 4), place, Held(1, 1, 32, 1, 1, 1, cluster=4))


@pytest.mark.parametrize(
    "shape", [*((batch, *IMAGES) for batch in (16, 32, 64, 128)), (2, 64, 28, 28), (3, 40, 14, 14), (6, 7, 20, 22), (24, 9, 8, 8)]
)
def test_clusters_on_a_gpu(shape, gpu):
    if gpu.capability < (9, 0):
        pytest.skip("this GPU has no clusters")
    case = case_of(*shape, values="offset 2000" if shape[0] == 16 else "normal")
    for held in slabs_of(shape):
        first, again = (run_op(IMPL, OP, case.ins, case.outs, attrs=case.attrs, place=gpu, layout="NCHW", tile=held) for _ in range(2))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)), held
        assert gradcheck.parity(ROW, IMPL, case, gpu, held) <= gradcheck.bound(case), held


def launch_of(held):
    call = bare(OP, (held.images * held.cluster, *IMAGES), "NCHW", 32)
    return bound(replace(call, tile=held))[0]


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("batch", [16, 64, 256])
def test_clusters_compile_without_spills(batch):
    for held in {held.cluster: held for held in reversed(slabs_of((batch, *IMAGES)))}.values():  # of every size the first
        assert_lean(launch_of(held), "90a", registers=64)


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("cluster", [1, 4])
def test_the_kernel_knows_its_cluster(cluster):
    text = ptx_of_launch(launch_of(Held(1, 16 // cluster, 512 // cluster, 7, 1, 1, cluster=cluster)))
    words = ("barrier.cluster.arrive", "barrier.cluster.wait", "st.async", ".reqnctapercluster 4")
    assert [word in text for word in words] == [cluster > 1] * len(words)


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator has no driver")
def test_a_cluster_that_the_driver_does_not_know_is_not_launched(monkeypatch):
    launch, asked = launch_of(Held(1, 8, 256, 7, 1, 1, cluster=2)), []
    ran = SimpleNamespace(_codelibrary=SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=3)))
    kernel = mock.MagicMock(py_func=launch.kernel.py_func, _compile_for_args=lambda *args: ran)
    monkeypatch.setattr(device.cuda, "get_current_device", lambda: SimpleNamespace(id=0))
    for width in (2, 0):
        monkeypatch.setattr("cuda.bindings.driver.cuKernelGetAttribute", lambda *args, width=width: asked.append(args[0].name) or (0, width))
        made = Launch(kernel, launch.grid, launch.block, launch.args, cluster=2)
        if width:
            made.run()
            kernel.__getitem__.assert_called_once_with(((2, 64), 256, 0, 0))
        else:
            with pytest.raises(RuntimeError, match="its blocks need clusters of 2, and the driver would launch clusters of 1"):
                made.run()
    kernel.__getitem__.assert_called_once()
    assert asked == ["CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH"] * 2


@pytest.mark.skipif(not device.SIMULATOR, reason="a GPU does not say what its threads load; NUMBA_ENABLE_CUDASIM=1 does")
def test_counts_are_those_of_the_kernel(place, monkeypatch):
    case = case_of(2, 4, 3, 4)
    made = Bound(IMPL, OP, case.ins, case.outs, place=place, attrs=case.attrs, layout="NCHW", tile=Held(1, 2, 64, 1, 1, 1, cluster=1))
    (launch,), (count,) = made.launches, b0_counts(made.call)
    channels = {id(array) for array, shape in zip(made.call.ins, made.call.in_shapes, strict=True) if len(shape) == 1}
    with monkeypatch.context() as patch:
        found = counted(launch, patch, channels)
    assert found.write <= count.write <= found.write + 4 * 4  # the running variance is an input too
    assert count.read <= found.read <= count.read + int(np.prod(launch.grid)) * launch.block * (16 + 8)
    assert found.distinct == count.distinct


def b0_counts(call):
    return IMPL.traffic(replace(call, ins=(), outs=(), packed=None, scratch=None))
