"""A plan bound to memory: every step with its launches, run one by one or replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nbcnn.graph import Buf, Plan, Planned
from nbcnn.ops.call import Call, bare_call
from nbcnn.params import ParameterBuffer
from nbcnn.shapes import numel


class Program:
    """Steps with their launches.

    arena  uint8 array of at least `plan.arena_bytes`, shared by all programs of a net.
    fixed  arrays for every Buf whose home is io or state, and for the flat views of the parameters.
    """

    def __init__(self, plan: Plan, params: ParameterBuffer, arena: Any, fixed: Mapping[Buf, Any]) -> None:
        self.plan, self.place = plan, params.place
        self._params, self._arena, self._fixed = params, arena, dict(fixed)
        if plan.pack_map is not None:
            index = pack_index(plan, params.layout)
            self._fixed[plan.pack_map] = self.place.empty(index.size, "int32")
            self.place.upload(self._fixed[plan.pack_map], index)
        self.bound: list[tuple[Planned, list[Any]]] = [(item, list(item.how.impl.bind(self._call(item)))) for item in plan.steps]
        self._replay: Callable[[], None] | None = None

    @property
    def launches(self) -> list[Any]:
        """Everything to run, in order."""
        return [launch for _, launches in self.bound for launch in launches]

    def array(self, buf: Buf) -> Any:
        """The flat array of a Buf."""
        root = buf.root
        if root in self._fixed:
            return self._fixed[root]
        if root.home in ("param", "grad"):
            return self._params.view(root.home, root.name)
        return self.place.view(self._arena, self.plan.offsets[root], numel(root.shape), root.dtype)

    def _call(self, item: Planned) -> Call:
        step = item.step
        packed = scratch = None
        if item.packed is not None:
            start, count = item.packed
            packed = self.array(self.plan.packed)[start : start + count]  # type: ignore[arg-type]
        if item.scratch is not None:
            scratch = self.array(item.scratch)
        return Call(
            step.op,
            tuple(self.array(buf) for buf in step.ins),
            tuple(self.array(buf) for buf in step.outs),
            tuple(buf.shape for buf in step.ins),
            tuple(buf.shape for buf in step.outs),
            step.attrs,
            self.plan.layout,
            item.how.tile,
            packed,
            scratch,
        )

    def run(self) -> None:
        """Enqueue every launch, one by one."""
        stream = getattr(self.place, "stream", 0)
        for launch in self.launches:
            launch.run(stream)

    def prepare(self) -> None:
        """Make the plan ready to replay. On a GPU this runs it once, so what it writes is overwritten."""
        self._replay = self.place.replayable(self.launches)

    def replay(self) -> None:
        """Run the whole plan asynchronously: one CUDA graph on a GPU. Prepares on first use."""
        if self._replay is None:
            self.prepare()
        self._replay()  # type: ignore[misc]

    def first_nonfinite(self) -> str | None:
        """Run step by step and name the first that writes a NaN or Inf; None if all results are finite."""
        stream = getattr(self.place, "stream", 0)
        for item, launches in self.bound:
            for launch in launches:
                launch.run(stream)
            for buf in item.step.outs:
                if buf.dtype.startswith("float") and not np.isfinite(self.place.download(self.array(buf))).all():
                    return f"{item.step.scope}.{item.step.op} ({buf.name})"
        return None


def pack_index(plan: Plan, layout: Any) -> np.ndarray:
    """Where each packed element comes from in the flat parameters, −1 for padding; int32."""
    assert plan.packed is not None
    index = np.full(numel(plan.packed.shape), -1, np.int32)
    for item in plan.steps:
        if item.packed is not None:
            start, count = item.packed
            inside = item.how.impl.pack(bare_call(item.step, plan.layout, item.how.tile))
            weight = item.step.ins[1].root.name
            index[start : start + count] = np.where(inside >= 0, inside + layout.offsets[weight], -1)
    return index
