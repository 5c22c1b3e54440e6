"""Tests of the host's side of CUDA on a driver that plays a GPU: memory, streams, events, launches and captures, without a compiler."""

from __future__ import annotations

import gc
import threading

import numpy as np
import played_driver
import pytest

from nbcnn.gpu import device, driver, faults, launching
from nbcnn.gpu.capture import JOIN, MAIN, SIDE
from nbcnn.gpu.target import H200

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator has a host side of its own")
CUBIN = b"\x7fELF and more"


@pytest.fixture
def played(monkeypatch):
    """A `Gpu` on the played driver."""
    api = played_driver.module()
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    for kept in (driver._device, driver.arch):
        kept.cache_clear()
    played_driver.calls.clear()
    played_driver.launched.clear()
    yield device.Gpu()
    gc.collect()  # what was allocated goes before the driver does
    for kept in (driver._device, driver.arch):
        kept.cache_clear()


def test_a_gpu_is_described(played):
    assert device.gpu_missing() is None
    assert played.device_name == "NVIDIA Played (compute capability 9.0)"
    assert (played.target, played.multiprocessors, played.capability, driver.arch()) == (H200, 132, (9, 0), "90a")
    assert driver.device().uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.all_gpus() == [{"name": "NVIDIA Played", "compute_capability": "9.0", "memory_bytes": 2 * played_driver.MEMORY}]
    assert played.free_bytes() == played_driver.MEMORY


def test_memory_goes_up_and_down_and_is_given_back(played):
    array = played.empty(10, "float32")
    played.upload(array, np.arange(10))
    part = array[2:5]
    assert played.download(part).tolist() == [2, 3, 4]
    assert (part.nbytes, part.view("uint8").size, part.__cuda_array_interface__["data"][0] - array.address) == (12, 12, 8)
    assert np.asarray(array[:1]).tolist() == [0]
    before = len(played_driver._memory)
    del array
    assert len(played_driver._memory) == before  # the part is of the same allocation
    del part
    assert len(played_driver._memory) == before - 1


def test_page_locked_memory_is_given_back_when_its_last_part_is_gone(played):
    before = len(played_driver._memory)
    array = driver.pinned(6, np.float32)
    array[:] = np.arange(6)
    part = array[2:4]
    del array
    assert part.tolist() == [2, 3]
    assert len(played_driver._memory) == before + 1
    del part
    assert len(played_driver._memory) == before
    with pytest.raises(MemoryError, match="page-locked"):
        driver.pinned(played_driver.MEMORY, np.float32)


def test_an_array_refuses_what_does_not_fit(played):
    array = played.empty(3, "uint8")
    with pytest.raises(ValueError, match="whole number"):
        array.view("float32")
    with pytest.raises(ValueError, match="do not fit"):
        array.copy_to_device(np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="step 1"):
        array[::2]
    with pytest.raises(TypeError, match="not elements"):
        array[0]


def test_memory_that_runs_out_says_so_in_the_drivers_word(played):
    with pytest.raises(driver.DriverError, match="allocate 17,179,869,185 bytes of GPU memory: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.empty(played_driver.MEMORY + 1, "uint8")


def test_parameters_are_those_of_numbas_kernels(played):
    array = played.empty(6, "uint16")
    args = (array[1:5], np.int32(-3), np.float32(0.5), np.int64(1 << 40), np.bool_(True), 7)
    assert launching.signature(args) == ("uint16[]", "int32", "float32", "int64", "boolean", "int64")
    bound = launching.Kernel(CUBIN, "k").bind((2, 3), 64, args, 96)
    bound.run(played.stream)
    assert played_driver.launched[0][0] == (2, 3, 1, 64, 1, 1, 96)
    pointers = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint64 * 12).from_address(played_driver.launched[0][1]))
    words = [np.ctypeslib.ctypes.c_uint64.from_address(int(pointer)).value for pointer in pointers]
    assert words[:7] == [0, 0, 4, 2, array.address + 2, 4, 2]
    assert np.array(words[7:9], np.uint64).view(np.int32)[0] == -3
    assert np.array(words[8:9], np.uint64).view(np.float32)[0] == 0.5
    assert words[9:] == [1 << 40, 1, 7]


def test_a_launch_takes_no_host_arrays(played):
    with pytest.raises(TypeError, match="not ndarray"):
        launching.Kernel(CUBIN, "k").bind(1, 1, (np.zeros(3),))


def test_a_refused_launch_names_the_kernel(played):
    with pytest.raises(driver.DriverError, match="launch k: CUDA_ERROR_INVALID_VALUE"):
        launching.Kernel(CUBIN, "k").bind(1, 2048, ()).run(played.stream)
    with pytest.raises(driver.DriverError, match="load the kernel k: CUDA_ERROR_INVALID_IMAGE"):
        launching.Kernel(b"no cubin", "k")


def test_shared_memory_above_48_kib_is_asked_for_once(played):
    kernel = launching.Kernel(CUBIN, "k")
    for shared in (48 << 10, 64 << 10, 64 << 10, 50 << 10, 96 << 10):
        kernel.bind(1, 32, (), shared)
    assert played_driver.calls["cuFuncSetAttribute"] == 2


def test_blocks_that_wait_for_each_other_must_fit(played):
    kernel = launching.Kernel(CUBIN, "k")
    kernel.check_together((132, 8), 256)
    with pytest.raises(RuntimeError, match=r"k: its 1057 blocks wait for each other, and the GPU holds 1056"):
        kernel.check_together(1057, 256)


def test_a_capture_has_branches_and_frees_nothing_meanwhile(played):
    """An array that dies during a capture keeps its memory until the end: the driver would refuse to free it, and the capture would fail."""
    kept = [played.empty(4, "uint8")]
    allocated = len(played_driver._memory)

    class Dropping:
        def __init__(self):
            self.runs = 0

        def run(self, stream):
            self.runs += 1
            if self.runs == 2:  # the first is before the capture
                kept.clear()
                assert len(played_driver._memory) == allocated

    graph = played.replayable([Dropping(), driver.Event(), Dropping()], [MAIN, SIDE, JOIN])
    assert len(played_driver._memory) == allocated - 1
    assert played_driver.calls["cuStreamWaitEvent"] == 2
    graph()
    graph.close()
    assert (played_driver.calls["cuGraphLaunch"], played_driver.calls["cuGraphExecDestroy"]) == (1, 1)


def test_events_are_timed(played):
    before, behind = device.event(), device.event()
    before.record(played.stream)
    behind.record(played.stream)
    behind.synchronize()
    assert behind.query()
    assert device.elapsed_ms(before, behind) == 1.5
    before.close()
    before.close()
    assert played_driver.calls["cuEventDestroy"] == 1


def test_streams_are_destroyed_with_what_used_them(played):
    """Fifty models after another kept a hundred streams and 50 MiB of GPU memory."""
    gc.collect()
    before = played_driver.calls["cuStreamDestroy"]
    other = device.Gpu()
    graph = other.replayable([driver.Event()])
    del other
    gc.collect()
    assert played_driver.calls["cuStreamDestroy"] == before  # the graph runs on them
    graph.close()
    del graph
    gc.collect()
    assert played_driver.calls["cuStreamDestroy"] == before + 2


def test_another_thread_enters_the_same_context(played):
    found = []
    thread = threading.Thread(target=lambda: found.append(played.download(played.empty(2, "uint8")).size))
    thread.start()
    thread.join()
    assert found == [2]
    assert played_driver.calls["cuCtxSetCurrent"] == 2
    assert played_driver.calls["cuDevicePrimaryCtxRetain"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda api: setattr(api, "cuInit", lambda flags: (played_driver.CUresult.CUDA_ERROR_INVALID_VALUE,)), "no usable CUDA driver"),
        (lambda api: setattr(api, "cuDeviceGetCount", lambda: (played_driver.OK, 0)), "no CUDA GPU visible"),
        (
            lambda api: setattr(api, "cuDevicePrimaryCtxRetain", lambda device: (played_driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)),
            r"the CUDA device cannot be opened \(could not open the GPU: CUDA_ERROR_INVALID_VALUE\)",
        ),
    ],
    ids=["no driver", "no GPU", "not opened"],
)
def test_what_is_missing_is_said(monkeypatch, change, reason):
    api = played_driver.module()
    change(api)
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    driver._device.cache_clear()
    with pytest.raises(driver.DriverMissing, match=reason):
        driver.device()
    with pytest.raises(device.GpuUnavailable, match=reason):
        device.Gpu()
    driver._device.cache_clear()


def test_memory_that_others_hold_is_a_fault_not_a_missing_gpu(monkeypatch):
    api = played_driver.module()
    api.cuDevicePrimaryCtxRetain = lambda device: (played_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    driver._device.cache_clear()
    with pytest.raises(faults.GpuFault, match="no memory left") as raised:
        device.gpu_missing()
    assert raised.value.exit_code == 5
    driver._device.cache_clear()
