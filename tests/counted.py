"""This module counts what a kernel asks memory for, load by load, with arrays of the simulator."""

from __future__ import annotations

import numpy as np

from nbcnn.gpu import compiler
from nbcnn.ops.kernel.traffic import Traffic


def counted(launch, patch, uncounted=()) -> Traffic:
    """Run `launch` in the simulator and count its loads from and stores to the arrays that it is given, but those of the ids `uncounted`.

    `patch` is a monkeypatch.
    """
    if compiler.LOCKSTEP:
        return counted_in_step(launch, uncounted)
    from numba.cuda.simulator.cudadrv.devicearray import FakeWithinKernelCUDAArray as Array

    seen: list[tuple[str, int, int]] = []  # lists may be appended to by several threads at a time
    given = {id(value) for value in launch.args if hasattr(value, "copy_to_host") and id(value) not in uncounted}
    get, put = Array.__getitem__, Array.__setitem__

    def note(way, array, index):
        item = array.__dict__["_item"]
        if id(item) in given:
            size = item._ary.itemsize
            seen.append((way, item._ary.__array_interface__["data"][0] + int(index) * size, size))

    def noted_get(array, index):
        note("read", array, index)
        return get(array, index)

    def noted_put(array, index, value):
        note("write", array, index)
        put(array, index, value)

    patch.setattr(Array, "__getitem__", noted_get)
    patch.setattr(Array, "__setitem__", noted_put)
    launch.run()
    read, write = ([(at, size) for way, at, size in seen if way == wanted] for wanted in ("read", "write"))
    assert len(set(write)) == len(write), f"{launch.name} stores a byte twice"
    return Traffic(sum(size for _, size in read), sum(size for _, size in write), sum(size for _, size in set(read)))


def counted_in_step(launch, uncounted=()) -> Traffic:
    """`counted` where threads run as lanes."""
    from nbcnn.gpu.lockstep import check, lanes
    from nbcnn.gpu.lockstep import launch as launching

    given = {value.__array_interface__["data"][0] for value in launch.args if hasattr(value, "copy_to_host") and id(value) not in uncounted}
    moved = {False: [], True: []}

    class Notes(check.Watch):
        def access(self, array, index, count, writes, values=()):
            if array.space == "global" and array.address in given:
                at = np.asarray(lanes.lane_array(index))[lanes.active()].astype(np.int64)
                size = array.dtype.itemsize
                moved[writes] += [(array.address + int(i + k) * size, size) for i in at for k in range(count)]

    launching.watchers.append(Notes(check.Found()))
    try:
        launch.run()
    finally:
        launching.watchers.pop()
    read, write = moved[False], moved[True]
    assert len(set(write)) == len(write), f"{launch.name} stores a byte twice"
    return Traffic(sum(size for _, size in read), sum(size for _, size in write), sum(size for _, size in set(read)))
