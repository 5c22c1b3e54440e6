"""This module captures launches into one CUDA graph, with or without a side branch.

A captured graph replays every kernel with one host call, about a microsecond each. Small kernels leave most of the GPU
idle: what does not depend on each other may then run at the same time, as two branches of the graph. A `driver.Event` among the launches
becomes a node of the graph, so that the time between two kernels can be read.

Several threads may each have a model. While one captures, no other may use the legacy default stream, which waits for every other stream: the
driver would end the capture. `ALONE` is held by whoever does one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nbcnn.gpu.driver import Event, checked, device, nothing_freed

ALONE = threading.RLock()
"""Held while a thread loads kernels, captures, or uses the legacy default stream."""

MAIN, SIDE, JOIN = "main", "side", "join"
"""Where a launch runs: on the main branch; on the side branch, after everything before it on the main one; on the main
branch, after everything before it on both."""


class CapturedGraph:
    """A captured CUDA graph. `streams` (`driver.Stream`) are the main and the side stream; `branches` says for every launch where it runs.

    Raises DriverError if the driver refuses.
    """

    def __init__(self, streams: tuple[Any, Any], launches: Sequence[Any], branches: Sequence[str]) -> None:
        self._api = api = device().api
        self._streams, self._main = streams, streams[0].handle
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        streams[0].synchronize()
        self._events: list[Event] = []
        with ALONE, nothing_freed():
            checked(api.cuStreamBeginCapture(self._main, mode), "begin a graph capture")
            try:
                self._record(streams, launches, branches)
            finally:
                ended = api.cuStreamEndCapture(self._main)
        self._graph = checked(ended, "end a graph capture")
        self._executable = checked(api.cuGraphInstantiate(self._graph, 0), "instantiate a CUDA graph")

    def _record(self, streams: tuple[Any, Any], launches: Sequence[Any], branches: Sequence[str]) -> None:
        main, side = streams
        behind = True  # the side branch has not seen the newest launch of the main one
        forked = False
        for launch, branch in zip(launches, branches, strict=True):
            if branch == SIDE:
                if behind:
                    self._wait(side, main)
                launch.run(side)
                behind, forked = False, True
                continue
            if branch == JOIN and forked:
                self._wait(main, side)
                forked = False
            launch.run(main)
            behind = True
        if forked:
            self._wait(main, side)

    def _wait(self, waiting: Any, awaited: Any) -> None:
        """Let the stream `waiting` go on only when what is now on `awaited` is done."""
        event = Event(timing=False)
        self._events.append(event)
        checked(self._api.cuEventRecord(event.handle, awaited.handle), "record an event")
        event.wait(waiting)

    def close(self) -> None:
        """Destroy the graph; it must not be running."""
        checked(self._api.cuGraphExecDestroy(self._executable), "destroy an executable CUDA graph")
        checked(self._api.cuGraphDestroy(self._graph), "destroy a CUDA graph")

    def __call__(self) -> None:
        """Run the graph once, asynchronously, on the main stream."""
        checked(self._api.cuGraphLaunch(self._executable, self._main), "launch a CUDA graph")
