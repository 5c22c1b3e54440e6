"""This module trains one phase of the climb for some seconds: the autoencoder by serial loops, or in one mode, plain or fused.

Run as `python -m nbcnn.lab.measure.phase SPEC`, SPEC the fields of `Spec` in JSON, it prints one line of JSON. A process of its own, so that its peak
memory is the phase's and nobody else's.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from nbcnn.files import extras
from nbcnn.files.errors import UsageError
from nbcnn.gpu import memory
from nbcnn.gpu.device import GPU_MEMORY
from nbcnn.lab.measure.rung import EPOCH_IMAGES, algebra, check_against_numpy, fuses, session_for
from nbcnn.modes import MODES
from nbcnn.ops.conv.cuda_ladder.serial import implementations
from nbcnn.ops.kernel.row import Row
from nbcnn.run.rows import Choice

SERIAL = "serial"
OPENING = 8
"""Training steps whose mean loss tells that all phases train alike: they take the same images in the same order. They are not timed. The serial
loops take smaller batches, so theirs tells nothing."""
CHUNK = 0.2
"""Seconds of training between two looks at the clock, for which the host waits for the device."""


@dataclass(frozen=True)
class Spec:
    """A phase: `mode` serial or one of `nbcnn.modes`; its precision and form; how long it trains: `epochs` of `images`, and no
    longer than `seconds`."""

    mode: str
    precision: str
    fused: bool
    batch: int
    images: int
    epochs: int
    seconds: float


def serial_row() -> Row:
    """The row `cpu` with its convolutions by serial loops. Raises UsageError where Numba is not installed."""
    loops = implementations()
    if loops is None:
        raise UsageError(f"the serial loops are compiled by Numba, which is not installed: {extras.line('cu13')}")
    cpu = MODES["cpu", "fp32"]
    return replace(cpu, mode=SERIAL, fallbacks=((SERIAL, loops), *cpu.fallbacks), own=(SERIAL, "cpu"))


def measure(spec: Spec) -> dict[str, Any]:
    """Train one phase; seconds per 50,000 images count what is trained behind the opening, steps at the ends of epochs included.

    Refuses (RuntimeError) to time a phase whose updates are not the NumPy path's.
    """
    options: dict[str, Any] = {"mode": spec.mode, "precision": spec.precision, "fusing": spec.fused}
    if spec.mode == SERIAL:
        options = {"mode": SERIAL, "choice": Choice(serial_row(), "as asked")}
    begun = time.perf_counter()
    session = session_for(spec.batch, spec.images, **options)
    check_against_numpy(options, 1 if spec.mode == SERIAL else 4)
    device, opening = session.net.device, min(OPENING, session.steps_per_epoch // 2)
    session.begin_epoch(0)
    for _ in range(opening):
        session.step()
    loss, ready = session.status().loss_mean, time.perf_counter() - begun
    epoch, chunk, done, start = 0, 1, False, time.perf_counter()
    while not done and time.perf_counter() - start < spec.seconds:
        before = time.perf_counter()
        for _ in range(chunk):
            if not session.steps_left:
                if done := epoch + 1 == spec.epochs:
                    break
                epoch += 1
                session.begin_epoch(epoch)
            session.step()
        device.synchronize()
        if time.perf_counter() - before < CHUNK / 2:
            chunk *= 2
    spent = time.perf_counter() - start
    images = epoch * spec.images + session.status().position - opening * spec.batch
    return {
        "mode": spec.mode,
        "precision": spec.precision,
        "fused": spec.fused and fuses(session.net.row),
        "algebra": algebra(session.plans["train", spec.batch]),
        "batch": spec.batch,
        "device": session.net.device_name,
        "images": images,
        "seconds": spent,
        "epoch_seconds": EPOCH_IMAGES * spent / images,
        "opening_loss": loss if opening and spec.mode != SERIAL else None,
        "ready_seconds": ready,
        "planned_bytes": session.planned_bytes,
        "host_peak_bytes": memory.peak() or 0,
        "gpu_used_bytes": device.used_bytes().get(GPU_MEMORY),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))))
