"""This module captures launches into one CUDA graph, with or without a side branch, and with moments in it whose times can be read.

A captured graph replays every kernel with one host call, about a microsecond each. Small kernels leave most of the GPU
idle: what does not depend on each other may then run at the same time, as two branches of the graph.

Several threads may each have a model. While one captures, no other may use the legacy default stream, which waits for every other stream: the
driver would end the capture. And numba-cuda fails if two threads load the same kernel at the same time. `ALONE` is held by whoever does one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nbcnn.gpu.compiler import bindings

ALONE = threading.RLock()
"""Held while a thread loads kernels, captures, or uses the legacy default stream."""

MAIN, SIDE, JOIN = "main", "side", "join"
"""Where a launch runs: on the main branch; on the side branch, after everything before it on the main one; on the main
branch, after everything before it on both."""


class CapturedGraph:
    """A captured CUDA graph. `streams` are the main and the side stream; `branches` says for every launch where it runs.

    Raises RuntimeError if the driver refuses.
    """

    def __init__(self, streams: tuple[Any, Any], launches: Sequence[Any], branches: Sequence[str]) -> None:
        self._runtime = runtime = bindings("runtime")
        self._main, self._side = (int(getattr(stream.handle, "value", stream.handle)) for stream in streams)
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        streams[0].synchronize()
        with ALONE:
            checked(runtime.cudaStreamBeginCapture(self._main, mode), "begin a graph capture")
            try:
                self._record(streams, launches, branches)
            finally:
                ended = runtime.cudaStreamEndCapture(self._main)
        self._graph = checked(ended, "end a graph capture")
        self._executable = checked(runtime.cudaGraphInstantiate(self._graph, 0), "instantiate a CUDA graph")

    def _record(self, streams: tuple[Any, Any], launches: Sequence[Any], branches: Sequence[str]) -> None:
        behind = True  # the side branch has not seen the newest launch of the main one
        forked = False
        for launch, branch in zip(launches, branches, strict=True):
            if branch == SIDE:
                if behind:
                    self._wait(self._side, self._main)
                launch.run(streams[1])
                behind, forked = False, True
                continue
            if branch == JOIN and forked:
                self._wait(self._main, self._side)
                forked = False
            launch.run(streams[0])
            behind = True
        if forked:
            self._wait(self._main, self._side)

    def _wait(self, waiting: int, awaited: int) -> None:
        """Let the stream `waiting` go on only when what is now on `awaited` is done."""
        event = checked(self._runtime.cudaEventCreateWithFlags(self._runtime.cudaEventDisableTiming), "create an event")
        checked(self._runtime.cudaEventRecord(event, awaited), "record an event")
        checked(self._runtime.cudaStreamWaitEvent(waiting, event, 0), "wait for an event")

    def close(self) -> None:
        """Destroy the graph; it must not be running."""
        checked(self._runtime.cudaGraphExecDestroy(self._executable), "destroy an executable CUDA graph")
        checked(self._runtime.cudaGraphDestroy(self._graph), "destroy a CUDA graph")

    def __call__(self) -> None:
        """Run the graph once, asynchronously, on the main stream."""
        checked(self._runtime.cudaGraphLaunch(self._executable, self._main), "launch a CUDA graph")


class Moment:
    """A point between launches, to be run and captured like one. Every replay of the graph says anew when it came there."""

    def __init__(self) -> None:
        self._runtime = bindings("runtime")
        self._event = checked(self._runtime.cudaEventCreate(), "create an event")

    def run(self, stream: Any) -> None:
        """Record the event on `stream`; in a capture, make it a node of the graph. Raises RuntimeError if the driver refuses."""
        handle = int(getattr(stream.handle, "value", stream.handle))
        status = checked(self._runtime.cudaStreamIsCapturing(handle), "ask for a stream's capture")
        idle = self._runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone
        flags = self._runtime.cudaEventRecordDefault if status == idle else self._runtime.cudaEventRecordExternal
        checked(self._runtime.cudaEventRecordWithFlags(self._event, handle, flags), "record an event")

    def until(self, later: Moment) -> float:
        """Milliseconds from this moment to a later one, both past."""
        return float(checked(self._runtime.cudaEventElapsedTime(self._event, later._event), "read the time between two events"))

    def close(self) -> None:
        """Let the event go, when no graph holds it any more."""
        checked(self._runtime.cudaEventDestroy(self._event), "destroy an event")


def checked(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a CUDA call, or RuntimeError with the driver's word for what failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"could not {doing}: {getattr(result[0], 'name', result[0])}")
    return result[1] if len(result) > 1 else None
