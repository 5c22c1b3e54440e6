"""This module applies a net to arrays of the caller: outputs batch by batch, and the gradients of one batch. Neither changes the net."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.plan.graph import Buf, Plan
from nbcnn.run.allocation import Allocated, check_memory, largest_batch
from nbcnn.run.program import Program

if TYPE_CHECKING:
    from nbcnn.run.net import Net


def outputs(net: Net, inputs: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Yield the output of `inputs` batch by batch. Raises UsageError if they have another shape or dtype than the net's."""
    name, dtype = ("series", np.float32) if net.is_series else ("images", np.uint8)
    if inputs.dtype != dtype or inputs.shape[1:] != net.input_shape:
        raise UsageError(f"{name} must be {dtype.__name__} (M, {', '.join(map(str, net.input_shape))}), got {inputs.dtype} {inputs.shape}")
    for start in range(0, len(inputs), batch):
        part = inputs[start : start + batch]
        held = _prepared(net, len(part))
        held.upload("images", part)
        held.programs["predict"].replay()
        yield held.download("output").reshape(held.bufs["output"].shape)


def program(net: Net, batch: int) -> Program:
    """The bound inference plan for `batch` inputs. Raises MemoryPlanError, before anything is allocated, if it does not fit."""
    return _prepared(net, batch).programs["predict"]


def planned_bytes(net: Net, batch: int) -> dict[str, int]:
    """What inference on `batch` inputs takes besides the parameters, by name."""
    recorded = net.record_predict(batch)
    return _bytes(net.lower(recorded), recorded.io)


def _bytes(plan: Plan, io: Mapping[str, Buf]) -> dict[str, int]:
    return {"arena": plan.arena_bytes, "images and output": sum(buf.nbytes for buf in io.values())}


def _prepared(net: Net, batch: int) -> Allocated:
    """The bound inference plan of one batch size, made once: record → lower → check → allocate, upload, compile."""
    if batch not in net.prepared:
        recorded = net.record_predict(batch)
        plan = net.lower(recorded)
        check_memory(net.device, _bytes(plan, recorded.io), f"a batch of {batch}", largest_batch(batch, lambda size: planned_bytes(net, size)))
        # A GPU runs a plan once before it captures it, so what that run reads must be there.
        first = {"images": np.zeros(recorded.io["images"].shape, recorded.io["images"].dtype)}
        if "order" in recorded.io:
            first["order"] = np.arange(batch, dtype=np.int32)
        held = Allocated(net, {"predict": plan}, recorded.io, first)
        held.compile()
        net.prepared[batch] = held
    return net.prepared[batch]


def gradients(net: Net, x: np.ndarray, labels: np.ndarray | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and parameter gradients for float32 inputs `x` (N, …); `labels` (N,) if the loss needs them.

    For tests and for `gradcheck`: allocates on every call. Arena and gradients start as NaN; the net's own weights, gradients and states
    (the running statistics of a norm) are afterwards what they were.
    """
    recorded = net.record_gradients(len(x))
    given = {"x": x.astype(np.float32), "labels": np.zeros(len(x), net.label_dtype) if labels is None else labels}
    held = Allocated(net, {"gradients": net.lower(recorded)}, recorded.io, given)
    held.compile()
    with net.params.kept():
        held.device.upload(held.arena, np.full(held.arena.size, 0xFF, np.uint8))
        net.params.poison_grads()
        held.programs["gradients"].run()
        return float(held.download("loss")[0]), net.params.grads_dict()
