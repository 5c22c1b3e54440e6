"""This module times one rung of the ladder: the autoencoder's whole training step and its passes, in one mode at one batch size.

Run as `python -m nbcnn.lab.measure.rung MODE BATCH PRECISION plain|fused`, it prints one line of JSON. A process of its own, so that its peak memory
is the rung's and nobody else's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.datasets import shapes
from nbcnn.gpu import memory
from nbcnn.gpu.device import GPU_MEMORY
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.in_a_row import Steps, epochs, in_a_row
from nbcnn.lab.measure.sampling import spoilt, state_of
from nbcnn.lab.measure.steady import warm_up
from nbcnn.lab.measure.timing import sensible_count, time_calls, wall_ms
from nbcnn.nn.models import autoencoder
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.ops.kernel.row import Row
from nbcnn.ops.update.advance import POSITION
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.flops import conv_shape, step_flops
from nbcnn.plan.graph import Plan
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

IMAGE = (3, 32, 32)
PASSES = ("fprop", "dgrad", "wgrad")
EPOCH_IMAGES = 50_000
DEPTH, TERMS = 10, 9 * 256
"""A gradient of the first layer has come through ten convolutions, each a sum of at most 9·256 products, and may err by each one's bound."""


def session_for(batch: int, images: int, **options: Any) -> TrainingSession:
    """A session on synthetic images, SGD with momentum; `options` of the net: mode, precision, engine, fusing."""
    data = shapes.generate(images, seed=1)[0]
    rates = learning_rates("constant", 0.01, 3)
    return TrainingSession(Net(autoencoder(), IMAGE, **options), data, optimizer=SGD(), learning_rates=rates, batch=batch)


def measure(
    mode: str,
    batch: int,
    precision: str | None = None,
    engine: str = "auto",
    *,
    seconds: float = 1.0,
    warmup: float | None = None,
    counts: Sequence[int] = (),
    launched: bool = False,
    fusing: bool = True,
) -> dict[str, Any]:
    """Time one rung for about `seconds`, warm: by its times and the clock (`warmup` None), or after so many seconds.

    counts  also time so many steps in a row, `launched` one kernel after another as well: rows of `in_a_row`.

    Refuses (RuntimeError) to time a step whose updates are not the NumPy path's.
    """
    images = max(batch, min(65_536, 400 * batch))
    options = {"mode": mode, "precision": precision, "engine": engine, "fusing": fusing}
    session = session_for(batch, images - images % batch, **options)
    check_against_numpy(options)
    device = session.net.device

    def step() -> None:
        if session.steps_left == 0:
            session.begin_epoch(0)
        session.step()

    estimate = wall_ms(step, device.synchronize)
    per_epoch = session.steps_per_epoch
    count = min(sensible_count(estimate, seconds), per_epoch - 1) if per_epoch > 4 else sensible_count(estimate, seconds)
    with Watch(device) as watch:
        warm = warm_up([Steps(session)], watch, 0.0 if device.name == "host" else warmup)
        session.begin_epoch(0)
        begin = time.perf_counter()
        whole = time_calls(step, device, count, 0.0)
        readings = watch.since(begin)
        rows = in_a_row(session, counts, launched, warm, watch, seconds)
    passes = {name: time_pass(session, name, estimate, seconds).as_dict() for name in PASSES}
    rest = whole.median - sum(p["median"] for p in passes.values())
    flops = training_flops(session)
    return {
        "mode": mode,
        "precision": session.net.precision,
        "engine": engine,
        "fused": fusing and fuses(session.net.row),
        "algebra": algebra(session.plans["train", batch]),
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
        "host_peak_bytes": memory.peak() or 0,
        "gpu_used_bytes": device.used_bytes().get(GPU_MEMORY),
        **state_of(readings),
        "steady": warm.steady and not spoilt(readings, warm),
        **({"in_a_row": rows} if counts else {}),
    }


def measure_epoch(
    mode: str, batch: int, precision: str | None = None, engine: str = "auto", counts: Sequence[int] = (1,), warmup: float | None = None
) -> list[dict[str, Any]]:
    """Wall seconds of whole epochs of 50,000 resident images (`in_a_row.epochs`), a row for every number of epochs in a row.

    Refuses (RuntimeError) like `measure`.
    """
    options = {"mode": mode, "precision": precision, "engine": engine}
    session = session_for(batch, EPOCH_IMAGES, **options)
    check_against_numpy(options)
    which = {"mode": mode, "precision": session.net.precision, "engine": engine, "batch": batch}
    with Watch(session.net.device) as watch:
        found = epochs(session, counts, warmup, watch)
    return [which | {"images": session.count, "steps": session.steps_per_epoch} | row for row in found]


ALGEBRA = {
    **dict.fromkeys(("serial", "naive", "tiled"), "definition"),
    **{"cpu": "GEMM by BLAS", "winograd": "Winograd", "nine products": "nine products", "thin mma": "thin mma", "pointwise": "1×1 GEMM"},
    **{"im2col": "implicit GEMM", "wgmma": "implicit GEMM by wgmma", "mma": "implicit GEMM by mma.sync"},
}
"""What the engine of a convolution computes, or the part of a row that names none; others by their own name."""


def fuses(row: Row) -> bool:
    """Whether a row has convolutions with something fused to them."""
    return any(op.kind == "conv" and op.after for op in row.ops)


def form_of(row: Mapping[str, Any]) -> str:
    """plain or fused; "" of a row that was measured before there were both."""
    return {None: "", False: "plain", True: "fused"}[row.get("fused")]


def algebra(plan: Plan) -> str:
    """How a plan computes its convolutions: so many of each kind, those in which an upsampling is folded apart."""
    kinds: Counter[str] = Counter()
    for item in plan.steps:
        if conv_shape(item.step):
            engine = item.how.impl.engine or item.how.mode
            kinds[("folded " if item.step.op.kind == "upconv" else "") + ALGEBRA.get(engine, engine)] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


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


def time_pass(session: TrainingSession, path: str, estimate: float, seconds: float) -> Any:
    """Time the convolutions of one pass alone, back to back, as the whole step runs them."""
    program = session.program
    launches = [launch for item, launches in program.bound if conv_shape(item.step) and item.step.op.direction == path for launch in launches]
    replay = program.device.replayable(launches)
    return time_calls(replay, program.device, sensible_count(estimate / 3, seconds / 2), 0.0 if session.net.mode == "cpu" else 0.2)


def check_against_numpy(options: Mapping[str, Any], batch: int = 4) -> None:
    """Three training steps of `batch` images must change the weights as they do in NumPy."""
    if options["mode"] == "cpu":
        return
    updates = []
    for chosen in ({"mode": "cpu"}, options):
        session = session_for(batch, 3 * batch, **chosen)
        before = weights(session)
        for _ in range(3):
            session.step()
        updates.append(weights(session) - before)
        if (position := session.state()["step_state"][POSITION]) != 3 * batch:
            raise RuntimeError(f"three training steps of {batch} images end at image {position}, not {3 * batch}: they are not timed")
    error, bound = error_of(updates[1], updates[0], session.net.precision)
    if not error <= bound:
        raise RuntimeError(f"{options} is not timed: three training steps change its weights otherwise than NumPy's: {error:.1e} (bound {bound:.1e})")


def error_of(update: np.ndarray, numpys: np.ndarray, precision: str) -> tuple[float, float]:
    """(error, bound) of a change of the weights beside NumPy's, relative to its norm."""
    return float(np.linalg.norm(update - numpys) / np.linalg.norm(numpys)), DEPTH * parity_bound(TERMS, precision)


def weights(session: TrainingSession) -> np.ndarray:
    """All weights in float64."""
    return np.concatenate([t.reshape(-1) for t in session.net.params.as_dict().values()]).astype(np.float64)


if __name__ == "__main__":
    name, size, precision, form = sys.argv[1:]
    print(json.dumps(measure(name, int(size), precision, fusing=form == "fused")))
