"""Tests of arrays of other libraries in GPU memory, on a driver that plays a GPU: where they lie, what they wait for, and what is refused."""

from __future__ import annotations

import gc

import numpy as np
import played_driver
import pytest

from nbcnn.files.errors import UsageError
from nbcnn.gpu import arrays, device, driver
from nbcnn.gpu.arrays import DeviceArray, as_device_array

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator has arrays of its own")
CACHES = (driver._device, driver.arch, arrays._import_stream)


@pytest.fixture
def played(monkeypatch):
    """A `Gpu` on the played driver, with the calls of streams and events in `order`."""
    api = played_driver.module()
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    for kept in CACHES:
        kept.cache_clear()
    made = device.Gpu()
    made.order = []
    for name, word in (("cuStreamWaitEvent", "waits"), ("cuEventRecordWithFlags", "records")):
        call = getattr(api, name)

        def noted(first, second, flags, call=call, word=word):
            stream, event = (first, second) if word == "waits" else (second, first)
            made.order.append((word, int(stream), int(event)))
            return call(first, second, flags)

        setattr(api, name, noted)
    yield made
    gc.collect()
    for kept in CACHES:
        kept.cache_clear()


class Interface:
    """An array of another library that has the CUDA array interface alone."""

    def __init__(self, array, stream=None, version=3, strides=None):
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.flat.address, False),
            "strides": strides,
            "version": version,
        } | ({} if version < 3 else {"stream": stream})


class Dlpack:
    """An array of another library that has DLPack, which passes on what is asked of it."""

    def __init__(self, array, number=0, kind=arrays.CUDA):
        self.array, self.device, self.asked = array, (kind, number), []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream)


def on(gpu, values):
    """`values` in the memory of the played GPU."""
    flat = gpu.empty(values.size, values.dtype.name)
    gpu.upload(flat, values)
    return DeviceArray(flat, values.shape, None, gpu.stream)


VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_an_array_of_the_interface_is_taken_where_it_lies_behind_its_stream(played):
    array = on(played, VALUES)
    found = as_device_array(Interface(array, stream=77))
    assert (found.flat.address, found.shape, found.dtype) == (array.flat.address, VALUES.shape, np.float32)
    recorded, waits, ready = played.order
    assert recorded[:2] == ("records", 77)
    assert waits == ("waits", int(found.stream.handle), recorded[2])
    assert ready[:2] == ("records", int(found.stream.handle))
    found.wait(played.stream)
    assert played.order[-1] == ("waits", int(played.stream.handle), ready[2])
    np.testing.assert_array_equal(np.asarray(found), VALUES)


def test_an_interface_without_a_stream_waits_for_nothing_and_an_older_one_for_everything(played):
    array, before = on(played, VALUES), played_driver.calls["cuCtxSynchronize"]
    as_device_array(Interface(array))
    assert played_driver.calls["cuCtxSynchronize"] == before
    as_device_array(Interface(array, version=2))
    assert played_driver.calls["cuCtxSynchronize"] == before + 1


def test_dlpack_asks_the_producer_to_have_our_stream_wait(played):
    array = on(played, VALUES)
    theirs = Dlpack(array)
    found = as_device_array(theirs)
    assert (found.flat.address, found.shape, found.dtype) == (array.flat.address, VALUES.shape, np.float32)
    assert theirs.asked == [int(found.stream.handle)]
    np.testing.assert_array_equal(np.asarray(found[1:]), VALUES[1:])


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float64", "float16", "bool"])
def test_dtypes_come_through_dlpack(played, dtype):
    values = np.arange(6).astype(dtype)
    np.testing.assert_array_equal(np.asarray(as_device_array(Dlpack(on(played, values)))), values)


def test_memory_lives_as_long_as_whoever_has_a_capsule(played):
    array = on(played, VALUES)
    before = len(played_driver._memory)
    capsule = array.__dlpack__(stream=1)
    del array
    gc.collect()
    assert len(played_driver._memory) == before
    assert arrays._given_away
    del capsule  # nobody has consumed it
    gc.collect()
    assert not arrays._given_away
    assert len(played_driver._memory) == before - 1


def test_an_imported_array_keeps_its_owner(played):
    array = on(played, VALUES)
    before = len(played_driver._memory)
    found = as_device_array(Dlpack(array))
    del array
    gc.collect()
    np.testing.assert_array_equal(np.asarray(found), VALUES)
    del found
    gc.collect()
    assert len(played_driver._memory) == before - 1


def test_a_result_names_our_stream_and_has_the_consumer_wait(played):
    event = driver.Event(timing=False)
    event.record(played.stream)
    result = DeviceArray(on(played, VALUES).flat, VALUES.shape, event, played.stream)
    interface = result.__cuda_array_interface__
    assert (interface["shape"], interface["strides"], interface["version"], interface["stream"]) == (VALUES.shape, None, 3, int(played.stream.handle))
    played.order.clear()
    result.__dlpack__(stream=77)
    result.__dlpack__(stream=arrays.NO_STREAM)
    assert [each[:2] for each in played.order] == [("waits", 77)]
    assert result.__dlpack_device__() == (2, 0)
    with pytest.raises(BufferError, match="without a copy"):
        result.__dlpack__(copy=True)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(result, copy=False)


def test_arrays_of_the_host_stay_what_they_are(played):
    for each in (VALUES, [1, 2], None, "text", Dlpack(None, kind=1)):
        assert as_device_array(each) is each


def test_what_cannot_be_read_where_it_lies_is_refused(played):
    array = on(played, VALUES)
    with pytest.raises(UsageError, match=r"x of shape \(2, 3, 4\) is not C-contiguous.*give x.contiguous\(\)"):
        as_device_array(Interface(array, strides=(4, 8, 24)), "x")
    with pytest.raises(UsageError, match="on GPU 1, and nbcnn uses the first"):
        as_device_array(Dlpack(array, number=1))
    as_device_array(Interface(on(played, VALUES[:1]), strides=(96, 16, 4)))  # of an axis of one the stride says nothing


def test_a_library_that_does_not_give_its_array_is_quoted(played):
    class Learning(Dlpack):
        def __dlpack__(self, *, stream=None):
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    with pytest.raises(UsageError, match=r"examples cannot be taken from .*use tensor.detach\(\)"):
        as_device_array(Learning(on(played, VALUES)), "examples")


def test_parts_and_shapes(played):
    array = on(played, VALUES)
    assert (len(array), array.ndim, array.size, array.nbytes, repr(array)) == (2, 3, 24, 96, "<DeviceArray float32 (2, 3, 4) on the GPU>")
    assert array.reshape(4, 6).shape == (4, 6)
    assert array[1:].flat.address == array.flat.address + 48
    assert array[2:].shape == (0, 3, 4)
    with pytest.raises(ValueError, match="has 24 elements"):
        array.reshape(5)
