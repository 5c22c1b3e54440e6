"""One rank of the scaling benchmark: `python -m nbcnn.bench.scaling_rank SPEC`, started by `scaling.py`; rank 0 prints its rows as JSON.

Every step is a collective, so nothing here may depend on one rank's clock: numbers of repetitions are rank 0's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from nbcnn.bench.rung import DEPTH, IMAGE, TERMS
from nbcnn.bench.timing import Timing, summarise
from nbcnn.bounds import parity_bound
from nbcnn.models import autoencoder
from nbcnn.net import Net
from nbcnn.optim import SGD
from nbcnn.session import TrainingSession
from nbcnn.team import ALONE, Team, join

SETTLE = 3
"""The first training steps of an epoch, which make up for ranks that began it at different times, do not count."""
CALLS, REPLAYS = 20, 50
"""All-reduces in one captured graph; how often that is replayed."""
CHECKED_EPOCH = 10
"""Training steps in an epoch of the check."""


def session_for(team: Team, batch: int, steps: int, **options: Any) -> TrainingSession:
    """A session on noise, an epoch of `steps` full batches; the last entries of `options` are the net's."""
    images = np.random.default_rng(7).integers(0, 256, (batch * steps, *IMAGE), dtype=np.uint8)
    net, rates = Net(autoencoder(), IMAGE, **options), np.full(steps, 0.01, np.float32)
    return TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=batch, team=team)


def agreed(team: Team, value: float) -> float:
    """Rank 0's value."""
    return float(np.frombuffer(team.told(np.float64(value).tobytes()))[0])


def check(team: Team, batch: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """The ranks' training against one process's, from the same weights on the same images.

    gradient_error  of the first step's gradients, ‖ranks − alone‖ / ‖alone‖, and its bound.
    drift           ‖ranks − alone‖ / ‖alone‖ of the weights after `steps` steps; drift_of_splits  the same for one process whose weight
                    gradients are summed in another number of parts.
    """
    alone = session_for(ALONE, batch, CHECKED_EPOCH, **options)
    halved = {key: _other_split(tile) if "wgrad" in key else tile for key, tile in alone.tiles().items()}
    sessions = {
        "alone": alone,
        "ranks": session_for(team, batch, CHECKED_EPOCH, **options),
        "splits": session_for(ALONE, batch, CHECKED_EPOCH, tiles=halved, **options),
    }
    gradients, weights = {}, {}
    for name, session in sessions.items():
        place = session.net.place
        session.step()
        gradients[name] = place.download(session.net.params.grads).astype(np.float64)
        for step in range(1, steps):
            if not session.steps_left:
                session.begin_epoch(step // CHECKED_EPOCH)
            session.step()
        weights[name] = place.download(session.net.params.weights).astype(np.float64)
        session.close()
    precision = alone.net.precision
    return {
        "what": "parity",
        "form": "nbcnn",
        "precision": precision,
        "ranks": team.size,
        "batch": batch,
        "gradient_error": _distance(gradients["ranks"], gradients["alone"]),
        "bound": DEPTH * parity_bound(TERMS, precision),
        "steps": steps,
        "drift": _distance(weights["ranks"], weights["alone"]),
        "drift_of_splits": _distance(weights["splits"], weights["alone"]),
    }


def _other_split(tile: dict[str, int]) -> dict[str, int]:
    split = tile.get("split")
    return tile if split is None else tile | {"split": split // 2 if split > 1 else 2}


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def time_steps(team: Team, session: TrainingSession, seconds: float, warm: float) -> Timing:
    """Milliseconds of one training step of all ranks, warmed up for `warm` seconds: whole epochs, without their first steps."""
    place = session.net.place

    def epoch() -> list[float]:
        session.begin_epoch(0)
        return _between(place, session.step, session.steps_per_epoch)[SETTLE:]

    epoch()
    begun = time.perf_counter()
    epoch()
    each = agreed(team, time.perf_counter() - begun)
    for _ in range(int(warm / each)):
        epoch()
    return summarise([ms for _ in range(max(1, int(seconds / each))) for ms in epoch()])


def _between(place: Any, call: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each of `count` calls, by events at every boundary; by the wall clock on a host."""
    if place.name == "host":
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
    from nbcnn.cuda import cuda

    events = [cuda.event() for _ in range(count + 1)]
    events[0].record(place.stream)
    for event in events[1:]:
        call()
        event.record(place.stream)
    place.synchronize()
    return [float(cuda.event_elapsed_time(a, b)) for a, b in pairwise(events)]


def time_all_reduce(team: Team, session: TrainingSession) -> dict[str, Any]:
    """The all-reduce of the gradients alone, many in one captured graph."""
    place, grads = session.net.place, session.net.params.grads
    place.upload(grads, np.zeros(session.net.params.layout.size, np.float32))
    replay = place.replayable([team.all_reduce(grads, 1 / team.size)] * CALLS)
    on_gpu = place.name == "gpu"
    team.barrier()
    _between(place, replay, 1)
    timing = summarise(_between(place, replay, REPLAYS if on_gpu else 2)[1:]).per(CALLS)
    if close := getattr(replay, "close", None):
        close()
    return {"what": "all-reduce", "form": "nbcnn", "ranks": team.size, "bytes": 4 * session.net.params.layout.size, "ms": timing.as_dict()}


def ours(team: Team, spec: dict[str, Any], precision: str) -> list[dict[str, Any]]:
    """Parity, then weak and strong scaling. Raises RuntimeError, and times nothing, if the gradients are not one process's."""
    options = {"mode": spec["mode"], "precision": precision}
    rows = []
    if team.size > 1:
        rows.append(check(team, spec["checked"], options, spec["steps"]))
        if not rows[0]["gradient_error"] <= rows[0]["bound"]:
            raise RuntimeError(
                f"{precision} is not timed: {team.size} ranks' gradients are off by {rows[0]['gradient_error']:.1e} (bound {rows[0]['bound']:.1e})"
            )
    each = spec["each"]
    for what, batch in {"weak": each * team.size, "strong": each}.items() if team.size > 1 else (("weak", each),):
        session = session_for(team, batch, spec["epoch"], **options)
        timing = time_steps(team, session, spec["seconds"], spec["warm"])
        session.begin_epoch(0)
        watched = [session.step_watched()() for _ in range(min(4, spec["epoch"]))]
        inside = min(found["kernels_ms"].get("all reduce", 0.0) for found in watched)
        rows.append(_step_row(what, "nbcnn", precision, team.size, batch, timing) | {"all_reduce_in_step_ms": inside, "mode": session.net.mode})
        if what == "weak" and precision == spec["precisions"][0] and team.size > 1:
            rows.append(time_all_reduce(team, session))
        session.close()
        del session
    return rows


def _step_row(what: str, form: str, precision: str, ranks: int, batch: int, timing: Timing) -> dict[str, Any]:
    rate = batch / timing.median * 1e3
    return {
        "what": what,
        "form": form,
        "precision": precision,
        "ranks": ranks,
        "batch": batch,
        "step_ms": timing.as_dict(),
        "images_per_second": rate,
    }


def main() -> int:
    """Measure what SPEC says; rank 0 prints a line of JSON."""
    spec = json.loads(sys.argv[1])
    team = join()
    rows = [row for precision in spec["precisions"] for row in ours(team, spec, precision)]
    if spec["peer"]:
        from nbcnn.bench.peers_ranks import Peer

        with Peer(team) as peer:
            for form, precision in spec["peer"]:
                timing = peer.step(spec["each"], precision, form, spec["seconds"])
                rows.append(_step_row("weak", f"PyTorch {form}", precision, team.size, spec["each"] * team.size, timing))
            for row in [row for row in rows if row["what"] == "all-reduce"]:
                times = peer.all_reduce(row["bytes"] // 4, CALLS, REPLAYS)
                rows += [row | {"form": f"PyTorch {form}", "ms": timing.as_dict()} for form, timing in times.items()]
    if team.leads:
        print(json.dumps(rows), flush=True)
    team.barrier()
    team.leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
