"""This module applies a net to arrays of the caller: outputs batch by batch, and the gradients of one batch. Neither changes the net."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.gpu.download import in_turn
from nbcnn.gpu.staging import Staging
from nbcnn.ops.update.advance import GOOD, LEAST_SCALE, SCALE
from nbcnn.ops.update.loss_scale import halved
from nbcnn.plan.graph import Buf, Plan
from nbcnn.plan.shapes import numel
from nbcnn.run.allocation import Allocated, check_memory, largest_batch
from nbcnn.run.program import Program

if TYPE_CHECKING:
    from nbcnn.run.net import Net


WORTH_BYTES = 1 << 26
"""Bytes of outputs from which on they are copied from the GPU beside what makes the next ones."""
MOST_BYTES = 1 << 28
"""Bytes of a batch's output up to which they are: three of them take page-locked memory, which the system cannot swap."""
KEPT_PLANS = 8
"""Plans that a net keeps in memory, one for each size of a batch; the oldest goes first."""


def outputs(net: Net, inputs: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Yield the output of `inputs` batch by batch. Raises UsageError if they are none, or have another shape or dtype than the net's."""
    _check(net, inputs)
    if _many(net, len(inputs), batch):
        yield from _copied_by_threads(net, inputs, batch, lambda start, stop: np.empty((stop - start, *net.output_shape), np.float32))
    else:
        for part in _computed(net, inputs, batch):
            yield part.copy()


def _check(net: Net, inputs: np.ndarray) -> None:
    """Raise UsageError for inputs that the net does not take."""
    name, dtypes = ("series", ("float32",)) if net.is_series else ("images", ("uint8", "float32"))
    if inputs.dtype.name not in dtypes or inputs.shape[1:] != net.input_shape:
        shape = ", ".join(map(str, net.input_shape))
        raise UsageError(f"{name} must be {' or '.join(dtypes)} (M, {shape}), got {inputs.dtype} {inputs.shape}")
    if not len(inputs):
        raise UsageError(f"there are no {name} to compute: the array is {inputs.shape}")


def whole(net: Net, inputs: np.ndarray, batch: int) -> np.ndarray:
    """The output of `inputs`, computed in batches. Raises what `outputs` raises."""
    _check(net, inputs)
    if _many(net, len(inputs), batch):
        made = np.empty((len(inputs), *net.output_shape), np.float32)
        for _ in _copied_by_threads(net, inputs, batch, lambda start, stop: made[start:stop]):
            pass
        return made
    made, stop = np.empty(0, np.float32), 0
    for part in _computed(net, inputs, batch):
        if not stop:
            made = np.empty((len(inputs), *part.shape[1:]), part.dtype)
        made[stop : stop + len(part)] = part
        stop += len(part)
    return made


def _many(net: Net, count: int, batch: int) -> bool:
    """Whether so many outputs are worth the threads and the page-locked memory of `nbcnn.gpu.download`."""
    each = 4 * numel(net.output_shape)
    return net.device.name == "gpu" and count > batch and count * each >= WORTH_BYTES and batch * each <= MOST_BYTES


def _copied_by_threads(net: Net, inputs: np.ndarray, batch: int, target: Callable[[int, int], np.ndarray]) -> Iterator[np.ndarray]:
    """The outputs of every batch, in `target` of its first image and the first behind it; the GPU makes the next one while one is copied."""

    def made() -> Iterator[tuple[Any, np.ndarray]]:
        for start in range(0, len(inputs), batch):
            part = inputs[start : start + batch]
            held = _prepared(net, len(part), part.dtype.name)
            held.upload("images", part)
            held.programs["predict"].replay()
            yield held.array("output"), target(start, start + len(part))

    return in_turn(net.device, made(), min(batch, len(inputs)) * numel(net.output_shape))


def _computed(net: Net, inputs: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """The output batch by batch, each in memory that holds it until the next is asked for.

    While the GPU computes a batch, the host prepares the next one and takes the one before (`nbcnn.gpu.staging`).
    """
    with ExitStack() as under_way:
        found: Callable[[], np.ndarray] | None = None
        for start in range(0, len(inputs), batch):
            part = inputs[start : start + batch]
            held = _prepared(net, len(part), inputs.dtype.name)
            with ExitStack() as this:
                stage = this.enter_context(held.staged("images", "output"))
                if stage is None:
                    held.upload("images", part)
                    held.programs["predict"].replay()
                    now = partial(_shaped, held, held.download("output"))
                else:
                    stage.run(part, held.programs["predict"].replay)
                    now = partial(_waited, held, stage)
                if found is not None:
                    yield found()
                    under_way.close()
                found = now
                under_way.push(this.pop_all())
        if found is not None:
            yield found()


def _waited(held: Allocated, stage: Staging) -> np.ndarray:
    return _shaped(held, stage.wait())


def _shaped(held: Allocated, flat: np.ndarray) -> np.ndarray:
    shape = held.bufs["output"].shape
    return flat[: numel(shape)].reshape(shape)


def on_gpu(net: Net, inputs: DeviceArray, batch: int) -> DeviceArray:
    """The output of `inputs` (M, *shape), uint8 or float32 in GPU memory, batch by batch: read where they lie, written where they stay.

    When this returns, the inputs have been read and the outputs are written. Raises MemoryPlanError if there is no room for these.
    """
    device, count, width, row = net.device, len(inputs), numel(net.output_shape), numel(net.input_shape)
    # So the outputs of every batch begin at a multiple of 16 bytes, as the widest stores want it.
    batch = -(-batch // 4) * 4 if count > batch else batch
    check_memory(device, {"outputs": 4 * count * width}, f"the output of {count:,} examples")
    made = device.empty(count * width, "float32")
    inputs.wait(device.stream)
    for start in range(0, count, batch):
        held = _prepared(net, min(batch, count - start), inputs.dtype.name)
        stop = min(count, start + batch)
        arrays = {held.bufs["images"]: inputs.flat[start * row : stop * row], held.bufs["output"]: made[start * width : stop * width]}
        held.programs["predict"].run_with(arrays)
    device.synchronize()
    return DeviceArray(made, (count, *net.output_shape), None, device.stream)


def program(net: Net, batch: int) -> Program:
    """The bound inference plan for `batch` inputs. Raises MemoryPlanError, before anything is allocated, if it does not fit."""
    return _prepared(net, batch).programs["predict"]


def planned_bytes(net: Net, batch: int, lean: bool = False) -> dict[str, int]:
    """What inference on `batch` inputs takes besides the parameters, by name; `lean` as in `lowering.lower`."""
    recorded = net.record_predict(batch)
    return _bytes(net.lower(recorded, lean=lean), recorded.io)


def _bytes(plan: Plan, io: Mapping[str, Buf]) -> dict[str, int]:
    return {"arena": plan.arena_bytes, "images and output": sum(buf.nbytes for buf in io.values())}


def _prepared(net: Net, batch: int, dtype: str = "uint8") -> Allocated:
    """One walk down, once for each size of batch and dtype of images: record → lower → check → allocate, upload, compile."""
    if (batch, dtype) not in net.prepared:
        while len(net.prepared) >= KEPT_PLANS:
            net.device.synchronize()
            net.prepared.pop(next(iter(net.prepared))).close()
        recorded = net.record_predict(batch, dtype)
        plan = net.lower(recorded)
        if sum(_bytes(plan, recorded.io).values()) > net.device.free_bytes():
            plan = net.lower(recorded, lean=True)
        largest = largest_batch(batch, lambda size: planned_bytes(net, size, lean=True))
        check_memory(net.device, _bytes(plan, recorded.io), f"a batch of {batch}", largest)
        # A GPU runs a plan once before it captures it, so what that run reads must be there.
        first = {"images": np.zeros(recorded.io["images"].shape, recorded.io["images"].dtype)}
        if "order" in recorded.io:
            first["order"] = np.arange(batch, dtype=np.int32)
        held = Allocated(net, {"predict": plan}, recorded.io, first)
        held.compile()
        net.prepared[batch, dtype] = held
    return net.prepared[batch, dtype]


def gradients(net: Net, x: np.ndarray, labels: np.ndarray | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and parameter gradients for float32 inputs `x` (N, …); `labels` (N,) or (N, H, W) if the loss needs them, or the targets (N, *output)
    of a network that does not give its input back.

    With a loss scale (`nbcnn.ops.update.loss_scale`) gradients are taken again with half of it where they are not finite.
    For tests and for `gradcheck`: allocates on every call. Arena and gradients start as NaN; the net's own weights, gradients and states
    (the running statistics of a norm) are afterwards what they were.
    """
    if not net.has_loss:
        raise UsageError("this net has no loss, so it has no gradients")
    if net.takes_classes:
        labels = arrays.labels(labels, len(x), net.classes, plane=net.plane, ignore=net.ignored).astype(np.int32)
    elif net.needs_values:
        labels = arrays.seen(arrays.targets(labels, len(x), net.output_shape)).astype(np.float32)
    elif net.layers[-1].needs_labels and (labels is None or len(labels) != len(x)):
        raise UsageError(
            f"the loss {type(net.layers[-1]).__name__} needs one target per example, and there are {0 if labels is None else len(labels)}"
        )
    if not len(x):
        raise UsageError("gradients need at least one example, got none")
    recorded = net.record_gradients(len(x))
    given = {"x": x.astype(np.float32), "labels": np.zeros(recorded.io["labels"].shape, net.label_dtype) if labels is None else labels}
    held = Allocated(net, {"gradients": net.lower(recorded)}, recorded.io, given)
    held.compile()
    with net.params.kept():
        held.device.upload(held.arena, np.full(held.arena.size, 0xFF, np.uint8))
        net.params.poison_grads()
        held.programs["gradients"].run()
        while net.row.scales_loss and (state := held.download("state"))[GOOD] < 0 and state[SCALE] > LEAST_SCALE:
            held.upload("state", halved(state))
            held.programs["gradients"].run()
        return float(held.download("loss")[0]), net.params.grads_dict()
