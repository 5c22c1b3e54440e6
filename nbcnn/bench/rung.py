"""One rung of the ladder: the autoencoder's whole training step and its passes, in one mode at one batch size.

Run as `python -m nbcnn.bench.rung MODE BATCH`, it prints one line of JSON. A process of its own, so that its peak memory
is the rung's and nobody else's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np

from nbcnn.bench.timing import sensible_count, time_calls
from nbcnn.datasets import shapes
from nbcnn.explain import step_flops
from nbcnn.models import autoencoder
from nbcnn.net import Net
from nbcnn.ops.advance import POSITION
from nbcnn.optim import SGD, learning_rates
from nbcnn.session import TrainingSession

IMAGE = (3, 32, 32)
PASSES = {"fprop": ("conv_fprop",), "dgrad": ("conv_dgrad",), "wgrad": ("conv_wgrad",)}
EPOCH_IMAGES = 50_000
PARITY = 1e-5
"""Relative: two float32 training steps that differ only in summation order; the bound of a sum of 65,536 products is 1.2e-4."""


def session_for(mode: str, batch: int, images: int) -> TrainingSession:
    """A session on synthetic images, SGD with momentum."""
    data = shapes.generate(images, seed=1)[0]
    rates = learning_rates("constant", 0.01, 1)
    return TrainingSession(Net(autoencoder(), IMAGE, mode=mode), data, optimizer=SGD(), learning_rates=rates, batch=batch)


def measure(mode: str, batch: int, seconds: float = 1.0) -> dict[str, Any]:
    """Time one rung. Refuses (RuntimeError) to time a step whose loss is not the NumPy path's."""
    images = max(batch, min(65_536, 400 * batch))
    session = session_for(mode, batch, images - images % batch)
    check_against_numpy(mode)
    place = session.net.place

    def step() -> None:
        if session.steps_left == 0:
            session.begin_epoch(0)
        session.step()

    start = time.perf_counter()
    step()
    place.synchronize()
    estimate = (time.perf_counter() - start) * 1e3
    per_epoch = session.steps_per_epoch
    count = min(sensible_count(estimate, seconds), per_epoch - 1) if per_epoch > 4 else sensible_count(estimate, seconds)
    warm = 0.0 if mode == "cpu" else 0.5
    session.begin_epoch(0)
    time_calls(step, place, 1, warm)
    session.begin_epoch(0)
    whole = time_calls(step, place, count, 0.0)
    passes = {name: time_pass(session, ops, estimate, seconds).as_dict() for name, ops in PASSES.items()}
    rest = whole.median - sum(p["median"] for p in passes.values())
    flops = training_flops(session)
    return {
        "mode": mode,
        "precision": session.net.precision,
        "batch": batch,
        "device": session.net.device_name,
        "step_ms": whole.as_dict(),
        "images_per_second": batch / whole.median * 1e3,
        "epoch_seconds": EPOCH_IMAGES / batch * whole.median / 1e3,
        "tflops": flops / whole.median / 1e9,
        "passes_ms": passes,
        "rest_ms": round(rest, 5),
        "planned_bytes": session.planned_bytes,
        "sgemm_gflops": sgemm_gflops() if mode == "cpu" else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def training_flops(session: TrainingSession) -> int:
    """Flops of the convolutions of one training step."""
    return sum(step_flops(item.step) for item in session.plans["train", session.batch].steps)


def sgemm_gflops(size: int = 2048) -> float:
    """What BLAS reaches on this host: the best of seven float32 products of `size`³."""
    a, b = (np.random.default_rng(seed).standard_normal((size, size)).astype(np.float32) for seed in (0, 1))
    best = np.inf
    for _ in range(7):
        start = time.perf_counter()
        np.dot(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def time_pass(session: TrainingSession, ops: tuple[str, ...], estimate: float, seconds: float) -> Any:
    """Time the steps of one pass alone, back to back, as the whole step runs them."""
    program = session.program
    launches = [launch for item, launches in program.bound if item.step.op in ops for launch in launches]
    replay = program.place.replayable(launches)
    return time_calls(replay, program.place, sensible_count(estimate / 3, seconds / 2), 0.0 if session.net.mode == "cpu" else 0.2)


def check_against_numpy(mode: str) -> None:
    """Three training steps of four images in `mode` and in NumPy must end with the same weights."""
    if mode == "cpu":
        return
    weights = []
    for name in ("cpu", mode):
        session = session_for(name, 4, 12)
        for _ in range(3):
            session.step()
        weights.append(np.concatenate([t.reshape(-1) for t in session.net.params.as_dict().values()]).astype(np.float64))
        assert session.state()["step_state"][POSITION] == 12
    error = float(np.linalg.norm(weights[1] - weights[0]) / np.linalg.norm(weights[0]))
    if not error <= PARITY:
        raise RuntimeError(
            f"mode {mode} is not timed: after three training steps its weights differ from NumPy's by {error:.1e} (bound {PARITY:.0e})"
        )


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
