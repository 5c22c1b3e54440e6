"""This module binds a plan to memory: every step with its launches, run one by one or replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from nbcnn.gpu.capture import JOIN, MAIN, SIDE
from nbcnn.nn.params import ParameterBuffer
from nbcnn.ops.kernel.call import Call, Planes, bare_call, places_of
from nbcnn.plan.arena import side_ends
from nbcnn.plan.graph import Buf, Plan, Planned
from nbcnn.plan.lowering import banks_of
from nbcnn.plan.packing import table
from nbcnn.plan.parts import own, span
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import FLOATING, decode
from nbcnn.run import blas


class Program:
    """Steps with their launches.

    arena  uint8 array of at least `plan.arena_bytes`, shared by all programs of a net.
    fixed  arrays for every Buf whose home is io, for state that no layer owns, and for the flat views of the parameters.

    `enqueue_ms` is what the host needs to enqueue all launches one by one: a guess, until somebody measures it. `threads()` is a context within which
    BLAS has the threads that the plan's bits are made with.
    """

    def __init__(self, plan: Plan, params: ParameterBuffer, arena: Any, fixed: Mapping[Buf, Any]) -> None:
        self.plan, self.device = plan, params.device
        self._params, self._arena, self._fixed = params, arena, dict(fixed)
        self._fixed |= constants(plan, params, fixed)
        self.bound: list[tuple[Planned, list[Any]]] = [(item, list(item.how.impl.bind(self._call(item)))) for item in plan.steps]
        self.threads: Callable[[], Any] = blas.single if self.device.name == "host" and blas.one_thread(plan) else nullcontext
        self._replay: Callable[[], None] | None = None
        self._segments: list[Planned | Callable[[], None]] | None = None
        self._moved: dict[Planned, list[Any]] = {}
        self.enqueue_ms = 0.05 * len(self.launches)

    @property
    def launches(self) -> list[Any]:
        """Everything to run, in order."""
        return [launch for _, launches in self.bound for launch in launches]

    def array(self, buf: Buf) -> Any:
        """The flat array of a Buf; of a part of a larger one, from its first element to its last."""
        whole = self._whole(buf.root)
        return whole if buf.first is None else whole[span(buf, self.plan.layout)]

    def _whole(self, root: Buf) -> Any:
        if root in self._fixed:
            return self._fixed[root]
        if root.home in ("param", "grad", "state"):
            return self._params.view(root.home, root.name)
        return self.device.view(self._arena, self.plan.offsets[root], numel(root.shape), root.dtype)

    def _call(self, item: Planned, other: Mapping[Buf, Any] | None = None) -> Call:
        """What the step's implementation binds; `other` has arrays in the place of some of the caller's."""
        step, given = item.step, other or {}

        def array(buf: Buf) -> Any:
            return given[buf.root] if buf.root in given else self.array(buf)

        packed = scratch = None
        if item.packed is not None:
            buf, start, count = item.packed
            packed = self.array(buf)[start : start + count]
        if item.scratch is not None:
            scratch = self.array(item.scratch)
        return Call(
            step.op,
            tuple(array(buf) for buf in step.ins),
            tuple(array(buf) for buf in step.outs),
            tuple(buf.shape for buf in step.ins),
            tuple(buf.shape for buf in step.outs),
            step.attrs,
            self.plan.layout,
            item.how.tile,
            packed,
            scratch,
            tuple(buf.dtype for buf in step.ins),
            tuple(buf.dtype for buf in step.outs),
            {each.position: Planes(array(each.buf), each.made) for each in item.planes},
            places_of(step),
        )

    def run(self) -> None:
        """Enqueue every launch, one by one."""
        stream = getattr(self.device, "stream", 0)
        with self.threads():
            for launch in self.launches:
                launch.run(stream)

    def prepare(self) -> None:
        """Make the plan ready to replay. On a GPU this runs it once, so what it writes is overwritten."""
        self._replay = self.device.replayable(self.launches, self._branches())

    def _branches(self) -> list[str]:
        """For every launch, the branch of the graph that it runs on."""
        joined = side_ends(self.plan.steps)
        branches, joins = list[str](), False
        for at, (item, launches) in enumerate(self.bound):
            joins = joins or at in joined
            branches += [SIDE if item.side else JOIN if joins else MAIN] * len(launches)
            # A step without launches leaves it to the next one.
            joins = joins and (item.side or not launches)
        return branches

    def replay(self) -> None:
        """Run the whole plan asynchronously: one CUDA graph on a GPU. Prepares on first use."""
        if self._replay is None:
            self.prepare()
        with self.threads():
            self._replay()  # type: ignore[misc]

    def run_with(self, arrays: Mapping[Buf, Any]) -> None:
        """Run the whole plan asynchronously with other arrays for some of the caller's Bufs, of which every call must name the same.

        The steps that touch them are bound to these arrays; what lies between is one CUDA graph each on a GPU.
        """
        if self._segments is None:
            self._segments = []
            still: list[Any] = []
            for item, launches in [*self.bound, (None, [])]:
                touches = item is None or any(buf.root in arrays for buf in (*item.step.ins, *item.step.outs))
                if not touches:
                    still += launches
                    continue
                if still:
                    self._segments.append(self.device.replayable(still))
                    still = []
                if item is not None:
                    self._segments.append(item)
        stream = getattr(self.device, "stream", 0)
        for segment in self._segments:
            if not isinstance(segment, Planned):
                segment()
                continue
            # Kept until the next run: a launch may hold memory of its own, which its kernel still reads.
            self._moved[segment] = list(segment.how.impl.bind(self._call(segment, arrays)))
            for launch in self._moved[segment]:
                launch.run(stream)

    def first_nonfinite(self, to_end: bool = False) -> tuple[int, str] | None:
        """Run step by step to the first that writes a NaN or Inf; its number and name, None if all results are finite.

        `to_end`: run the steps after it all the same, because in one of them other ranks wait for this one.
        """
        stream = getattr(self.device, "stream", 0)
        found = None
        for at, (item, launches) in enumerate(self.bound):
            for launch in launches:
                launch.run(stream)
            for buf in item.step.outs if found is None else ():
                if _floating(buf) and not np.isfinite(decode(own(self.device.download(self.array(buf)), buf, self.plan.layout), buf.dtype)).all():
                    found = at, f"{item.step.scope}.{item.step.op} ({buf.name})"
                    break
            if found and not to_end:
                break
        return found

    def close(self) -> None:
        """Free the captured graph, and with it what it holds of other libraries' resources; the next replay captures anew."""
        for held in (self._replay, *(self._segments or ())):
            if close := getattr(held, "close", None):
                close()
        self._replay = self._segments = None


def constants(plan: Plan, params: Any, known: Collection[Buf] = ()) -> dict[Buf, Any]:
    """Arrays on the device of `params` for the constants of `plan` that are not `known` yet: index maps of packed weights, vectors of layers."""
    made: dict[Buf, Any] = {}
    for packed, pack_map in plan.packs.items():
        if pack_map not in known:
            made[pack_map] = _uploaded(params.device, pack_index(plan, packed, params.layout).reshape(-1))
        if packed in plan.tables and plan.tables[packed] not in known:
            banks = banks_of(plan.steps, packed, params.layout.offsets.__getitem__)
            made[plan.tables[packed]] = _uploaded(params.device, table(banks))
    for buf in {buf.root for item in plan.steps for buf in item.step.ins if buf.root.values is not None}:
        if buf not in known:
            made[buf] = _uploaded(params.device, np.array(buf.values, buf.dtype))
    return made


def _uploaded(device: Any, values: np.ndarray) -> Any:
    array = device.empty(values.size, values.dtype.name)
    if values.size:  # on a GPU an array of zero elements has one
        device.upload(array, values)
    return array


def _floating(buf: Buf) -> bool:
    return buf.dtype in FLOATING or buf.dtype == "float64"


def pack_index(plan: Plan, packed: Buf, layout: Any) -> np.ndarray:
    """Where each element of the Buf `packed` comes from that no table places, −1 for nothing; int32 (terms, elements).

    That is in the flat parameters, or in the weight itself if a step makes it.
    """
    index = np.full(plan.packs[packed].shape, -1, np.int32)
    for item in plan.steps:
        if item.packed is not None and item.packed[0] is packed and item.how.placement is None:
            _, start, count = item.packed
            inside = item.how.impl.pack(bare_call(item.step, plan.layout, item.how.tile)).reshape(-1, count)
            weight = item.step.ins[1].root
            first = layout.offsets[weight.name] if weight.home == "param" else 0
            index[: len(inside), start : start + count] = np.where(inside >= 0, inside + first, -1)
    return index
