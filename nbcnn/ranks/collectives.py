"""This module has the collectives of data-parallel training, in two forms: NCCL between GPUs, sockets between processes without.

Both have the same four methods. `all_reduce` gives work to run, like a kernel's launch, so that it can stand in a plan and be captured in
its CUDA graph; the array becomes Σ_r weight_r · array_r on every rank, the same bits everywhere.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from nbcnn.files import extras
from nbcnn.ranks.sockets import Star, broadcast, gather


class Collective(Protocol):
    """The collectives that data-parallel training needs. Every rank must call the same ones in the same order."""

    def all_reduce(self, array: Any, weight: float) -> Any:
        """Work with `run(stream)` and a `name`: the flat float32 `array` ← Σ over ranks of weight · array."""

    def broadcast(self, array: Any, stream: Any = 0) -> None:
        """The flat float32 `array` ← rank 0's."""

    def barrier(self, stream: Any = 0) -> None:
        """Return when every rank has come here."""

    def destroy(self) -> None:
        """Give the connection back. For NCCL, graphs that hold its all-reduce must be gone."""


class Sockets:
    """The collectives over TCP, through rank 0, which adds in rank order: without GPUs, and in the simulator.

    `device` is where the arrays are (`nbcnn.gpu.device`).
    """

    def __init__(self, star: Star, device: Any) -> None:
        self._star, self._device = star, device

    def all_reduce(self, array: Any, weight: float) -> Any:
        return _SocketSum(self._star, self._device, array, np.float32(weight))

    def broadcast(self, array: Any, stream: Any = 0) -> None:
        self._device.upload(array, np.frombuffer(broadcast(self._star, self._device.download(array).tobytes()), np.float32))

    def barrier(self, stream: Any = 0) -> None:
        gather(self._star, b"")
        broadcast(self._star, b"")

    def destroy(self) -> None:
        """Do nothing: the team owns the connections."""


class _SocketSum:
    name = "all_reduce"

    def __init__(self, star: Star, device: Any, array: Any, weight: np.float32) -> None:
        self._star, self._device, self._array, self._weight = star, device, array, weight

    def run(self, stream: Any = 0) -> None:
        mine = self._weight * self._device.download(self._array)
        parts = gather(self._star, mine.tobytes())
        for part in parts[1:]:
            mine += np.frombuffer(part, np.float32)
        self._device.upload(self._array, np.frombuffer(broadcast(self._star, mine.tobytes()), np.float32))


class Nccl:
    """NCCL on this process's one visible GPU. `star` carries the 128 bytes by which the ranks find each other.

    Raises PackageMissing without nccl4py. NVLink multicast (NVLS) stays off: on some shared machines it puts other users' GPUs out of service.
    """

    def __init__(self, star: Star) -> None:
        extras.need("nccl", "training on more than one GPU needs")
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        from nccl.core import SUM, Communicator, UniqueId, get_unique_id

        me = star.rank
        identity = broadcast(star, bytes(get_unique_id()) if me.rank == 0 else b"")
        self._sum = SUM
        self._communicator: Any = Communicator.init(me.size, me.rank, UniqueId.from_bytes(identity))
        self._weighted: dict[float, Any] = {}

    def all_reduce(self, array: Any, weight: float) -> Any:
        # NCCL multiplies each rank's part as it reads it, which spares a pass over the array.
        if weight not in self._weighted:
            self._weighted[weight] = self._communicator.create_pre_mul_sum(np.array([weight], np.float32))
        return _NcclSum(self._communicator, array, self._weighted[weight])

    def broadcast(self, array: Any, stream: Any = 0) -> None:
        self._communicator.broadcast(array, array, 0, stream=_handle(stream))

    def barrier(self, stream: Any = 0) -> None:
        from nbcnn.gpu import driver

        token = driver.upload(np.zeros(1, np.float32))
        self._communicator.allreduce(token, token, self._sum, stream=_handle(stream))
        token.copy_to_host(stream=stream)  # which waits

    def destroy(self) -> None:
        self._communicator.destroy()


class _NcclSum:
    name = "all_reduce"

    def __init__(self, communicator: Any, array: Any, operation: Any) -> None:
        self._communicator, self._array, self._operation = communicator, array, operation

    def run(self, stream: Any = 0) -> None:
        self._communicator.allreduce(self._array, self._array, self._operation, stream=_handle(stream))


def _handle(stream: Any) -> int:
    """The driver's number of a stream."""
    handle = getattr(stream, "handle", stream)
    return int(getattr(handle, "value", handle) or 0)
