"""This module is one rank of the scaling study: `scaling.py` starts `python -m nbcnn.lab.studies.scaling_rank SPEC`; rank 0 prints rows as JSON.

Every step is a collective, so nothing here may depend on one rank's clock: numbers of repetitions are rank 0's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.lab.measure.rung import DEPTH, IMAGE, TERMS
from nbcnn.lab.measure.timing import Timing, each_ms, summarise, timer_of
from nbcnn.lab.studies.scaling import agrees
from nbcnn.nn.models import autoencoder
from nbcnn.nn.optim import SGD
from nbcnn.plan.bounds import parity_bound
from nbcnn.ranks.team import ALONE, Team, join
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

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
    return float(np.frombuffer(team.broadcast(np.float64(value).tobytes()))[0])


def check(team: Team, batch: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """The ranks' training against one process's, from the same weights on the same images.

    gradient_error  of the first step's gradients, ‖ranks − alone‖ / ‖alone‖, and its bound.
    drift           ‖ranks − alone‖ / ‖alone‖ of the weights after `steps` steps; drift_of_splits  the same for one process whose weight
                    gradients are summed in another number of parts (0 where nothing is).
    ok              what `agrees` says of them.
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
        device = session.net.device
        session.step()
        gradients[name] = device.download(session.net.params.grads).astype(np.float64)
        for step in range(1, steps):
            if not session.steps_left:
                session.begin_epoch(step // CHECKED_EPOCH)
            session.step()
        weights[name] = device.download(session.net.params.weights).astype(np.float64)
        session.close()
    precision = alone.net.precision
    error, bound = _distance(gradients["ranks"], gradients["alone"]), DEPTH * parity_bound(TERMS, precision)
    drift, of_splits = (_distance(weights[name], weights["alone"]) for name in ("ranks", "splits"))
    found = {"what": "parity", "form": "nbcnn", "precision": precision, "ranks": team.size, "batch": batch, "steps": steps}
    found |= {"gradient_error": error, "bound": bound, "drift": drift, "drift_of_splits": of_splits}
    return found | {"ok": agrees(found)}


def _other_split(tile: dict[str, int]) -> dict[str, int]:
    """The tile of a weight gradient with half as many parts in its sums; what they are called depends on the kernel."""
    parts = {name: tile[name] for name in ("split", "blocks") if name in tile}
    return tile | {name: count // 2 if count > 1 else 2 for name, count in parts.items()}


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def time_steps(team: Team, session: TrainingSession, seconds: float, warm: float) -> Timing:
    """Milliseconds of one training step of all ranks, warmed up for `warm` seconds: whole epochs, without their first steps."""
    timer = timer_of(session.net.device)

    def epoch() -> list[float]:
        session.begin_epoch(0)
        return each_ms(session.step, session.steps_per_epoch, timer)[SETTLE:]

    begun = time.perf_counter()
    epoch()
    each = agreed(team, time.perf_counter() - begun)
    for _ in range(int(warm / each)):
        epoch()
    return summarise([ms for _ in range(max(1, int(seconds / each))) for ms in epoch()])


def time_all_reduce(team: Team, session: TrainingSession) -> dict[str, Any]:
    """The all-reduce of the gradients alone, many in one captured graph."""
    device, grads = session.net.device, session.net.params.grads
    device.upload(grads, np.zeros(session.net.params.layout.size, np.float32))
    replay = device.replayable([team.all_reduce(grads, 1 / team.size)] * CALLS)
    on_gpu = device.name == "gpu"
    team.barrier()
    timer = timer_of(device)
    each_ms(replay, 1, timer)
    timing = summarise(each_ms(replay, REPLAYS if on_gpu else 2, timer)[1:]).per(CALLS)
    if close := getattr(replay, "close", None):
        close()
    return {"what": "all-reduce", "form": "nbcnn", "ranks": team.size, "bytes": 4 * session.net.params.layout.size, "ms": timing.as_dict()}


def ours(team: Team, spec: dict[str, Any], precision: str) -> Iterator[dict[str, Any]]:
    """Parity, then weak and strong scaling. Raises RuntimeError, and times nothing, if the gradients are not one process's."""
    options = {"mode": spec["mode"], "precision": precision}
    if team.size > 1:
        _say(team, f"{precision}: {spec['steps']} steps of {team.size} ranks, and of one process twice")
        found = check(team, spec["checked"], options, spec["steps"])
        yield found
        if not found["gradient_error"] <= found["bound"]:
            raise RuntimeError(
                f"{precision} is not timed: {team.size} ranks' gradients are off by {found['gradient_error']:.1e} (bound {found['bound']:.1e})"
            )
    each = spec["each"]
    for what, batch in {"weak": each * team.size, "strong": each}.items() if team.size > 1 else (("weak", each),):
        _say(team, f"{precision}: {what} scaling, {batch} images")
        session = session_for(team, batch, spec["epoch"], **options)
        timing = time_steps(team, session, spec["seconds"], spec["warm"])
        session.begin_epoch(0)
        watched = [session.step_watched()() for _ in range(min(4, spec["epoch"]))]
        inside = min(found["kernels_ms"].get("all reduce", 0.0) for found in watched)
        yield _step_row(what, "nbcnn", precision, team.size, batch, timing) | {"all_reduce_in_step_ms": inside, "mode": session.net.mode}
        if what == "weak" and precision == spec["precisions"][0] and team.size > 1:
            yield time_all_reduce(team, session)
        session.close()
        del session


def peers(team: Team, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """PyTorch's training steps in every form of `spec`, and its all-reduce of as many bytes as ours."""
    from nbcnn.lab.peers.several_ranks import Peer

    with Peer(team) as peer:
        if spec["bytes"]:
            times = peer.all_reduce(spec["bytes"] // 4, CALLS, REPLAYS)
            reduced = {"what": "all-reduce", "ranks": team.size, "bytes": spec["bytes"]}
            yield from (reduced | {"form": f"PyTorch {form}", "ms": timing.as_dict()} for form, timing in times.items())
        for form, precision in spec["forms"]:
            _say(team, f"{precision}: PyTorch {form}")
            timing = peer.step(spec["each"], precision, form, spec["seconds"])
            yield _step_row("weak", f"PyTorch {form}", precision, team.size, spec["each"] * team.size, timing)


def _say(team: Team, text: str) -> None:
    if team.leads:
        print(text, file=sys.stderr, flush=True)


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
    """Measure what SPEC says; rank 0 prints a line of JSON for every row. What fails on one rank ends all."""
    spec, team = json.loads(sys.argv[1]), join()
    try:
        measured = peers(team, spec) if "forms" in spec else (row for precision in spec["precisions"] for row in ours(team, spec, precision))
        for row in measured:
            if team.leads:
                print(json.dumps(row), flush=True)
        team.barrier()
        team.leave(0)
    except Exception as error:
        print(f"nbcnn: error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        team.leave(getattr(error, "exit_code", 1))
        os._exit(getattr(error, "exit_code", 1))  # a GPU that waits for another rank would keep Python's own end waiting
    return 0


if __name__ == "__main__":
    sys.exit(main())
