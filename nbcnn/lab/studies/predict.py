"""This study measures predictions of networks, ours beside PyTorch's: how long one image takes, how many per second, and where the time goes.

    latency_ms   from a batch of images on the host to its outputs on the host: copies, the graph's launch, its kernels, waiting
    replay_ms    the CUDA graph alone, on the GPU, replayed one after another
    enqueue_ms   what the host needs to launch the graph
    images_per_second   many images on the host, batch by batch, by the host's clock
    evaluated_per_second   of a network with a loss: images of a resident test set whose loss is added up (`TrainingSession.evaluate`)

Parity comes first: our outputs are held against the twin's in float64, and may be `nets.FACTOR` times as far from it as PyTorch's in the same
precision, and what the roundings of the products add (`nets.rounding`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.lab.measure.nets import Network, examples
from nbcnn.lab.measure.timing import sensible_count, summarise, time_calls, wall_ms
from nbcnn.lab.studies.nets import FACTOR, Apart, rounding, terms_of
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run import inference
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

BATCHES = (1, 64, 1024)
FORMS = ("graph", "compile")
"""PyTorch's forms: a CUDA graph of the eager forward pass, and torch.compile; "eager" is one, too."""
MANY = 32
"""Batches of images, at most `MOST_IMAGES` images, that make a rate."""
MOST_IMAGES = 16_384
Row = dict[str, Any]


def measure(
    network: Network,
    precision: str,
    *,
    mode: str = "tensorcore",
    engine: str = "auto",
    batches: Sequence[int] = BATCHES,
    forms: Sequence[str] = FORMS,
    seconds: float = 0.5,
    peer: bool = True,
) -> Iterator[Row]:
    """Rows for every batch: ours, then PyTorch's forms, each as soon as it is measured; what fails is a row with `why` in place of its times.

    Without `peer` nothing is held against PyTorch, either: the outputs must be finite.
    """
    for batch in batches:
        named: Row = {"what": network.name, "precision": precision, "batch": batch}
        ours: Row = {"form": f"nbcnn {mode}"}
        try:
            net = Net(network.layers(), network.shape, mode=mode, precision=precision, engine=engine)
            images, targets = examples(net, _count(batch))
            ours |= _ours(net, images, targets, batch, seconds, _outputs(net, images[:batch], precision) if peer else None)
        except Exception as error:
            yield named | ours | {"ok": False, "why": f"{type(error).__name__}: {error}"[:400]}
            continue
        yield named | ours
        for form in forms if peer else ():
            row: Row = named | {"form": f"PyTorch {form}"}
            try:
                row |= _its(net, images, batch, precision, form, seconds)
                yield row | {"ratio": row["latency_ms"]["median"] / ours["latency_ms"]["median"]}
            except Exception as error:
                yield row | {"why": f"{type(error).__name__}: {error}"[:300]}
        net.close()


def _count(batch: int) -> int:
    return max(batch, min(MANY * batch, MOST_IMAGES // batch * batch))


def _outputs(net: Net, images: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """The twin's outputs in float64, and in the precision."""
    from nbcnn.lab.peers.predict import Predictor

    weights = net.params.as_dict()
    exact, its = (Predictor(net.layers, weights, net.input_shape, len(images), name, "eager", _device(net))(images) for name in ("fp64", precision))
    return exact, its


def _device(net: Net) -> str:
    return "cuda" if net.device.name == "gpu" else "cpu"


def check(net: Net, got: np.ndarray, exact: np.ndarray, its: np.ndarray) -> dict[str, float]:
    """How far our outputs and PyTorch's are from those in float64, over their length. Raises Apart if ours are further off than it may be."""
    length = float(np.linalg.norm(exact))
    ours, other = (float(np.linalg.norm(np.subtract(outputs.reshape(exact.shape), exact, dtype=np.float64))) for outputs in (got, its))
    allowed = FACTOR * other + rounding(terms_of(inference.program(net, len(got)).plan), net.precision) * length
    if not ours <= allowed:
        raise Apart(f"the outputs are {ours:.2e} from those in float64, of which the length is {length:.2e}; {allowed:.2e} is allowed")
    return {"error": ours / max(length, 1e-300), "peer_error": other / max(length, 1e-300)}


def _ours(
    net: Net, images: np.ndarray, targets: np.ndarray | None, batch: int, seconds: float, wanted: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, Any]:
    part, device = images[:batch], net.device
    got = net.predict(part, batch)
    if not np.isfinite(got).all():
        raise Apart("an output is not finite")
    errors = check(net, got, *wanted) if wanted else {}
    program = inference.program(net, batch)
    count = sensible_count(wall_ms(program.replay, device.synchronize), seconds)
    replay = time_calls(program.replay, device, count, seconds / 2)
    row: Row = {
        **_latency(lambda: net.predict(part, batch), seconds),
        "replay_ms": replay.as_dict(),
        "enqueue_ms": _enqueued(program, device, count),
        "images_per_second": _rate(lambda: net.predict(images, batch), len(images), seconds),
        "launches": len(program.launches),
        "peak_bytes": sum(inference.planned_bytes(net, batch).values()) + 4 * net.params.layout.size,
        "ratio": 1.0,
        **errors,
    }
    if net.has_loss:
        row["evaluated_per_second"] = _evaluations(net, images, targets, batch, seconds)
    return row


def _its(net: Net, images: np.ndarray, batch: int, precision: str, form: str, seconds: float) -> dict[str, Any]:
    import torch

    from nbcnn.lab.peers.predict import Predictor
    from nbcnn.lab.peers.torch_step import release

    torch.compiler.reset()
    release()
    before = torch.cuda.memory_allocated()
    its = Predictor(net.layers, net.params.as_dict(), net.input_shape, batch, precision, form)
    part = images[:batch]

    def whole() -> None:
        for start in range(0, len(images), batch):
            its(images[start : start + batch])

    found = _latency(lambda: its(part), seconds)
    found |= {"replay_ms": its.replayed(seconds).as_dict(), "images_per_second": _rate(whole, len(images), seconds)}
    return found | {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def _latency(call: Any, seconds: float) -> dict[str, Any]:
    """Milliseconds by the host's clock of calls that return when their result is there, after some that warm up."""
    until, taken = time.perf_counter() + seconds, list[float]()
    while len(taken) < 5 or time.perf_counter() < until:
        taken.append(wall_ms(call, _nothing))
    return {"latency_ms": summarise(taken[len(taken) // 3 :]).as_dict()}


def _nothing() -> None:
    """A call that returns its result has waited already."""


def _enqueued(program: Any, device: Any, count: int) -> float:
    """Median milliseconds that the host needs for one launch of the graph."""
    taken = []
    for _ in range(min(count, 100)):
        device.synchronize()
        taken.append(wall_ms(program.replay, _nothing))
    return float(np.median(taken))


def _rate(call: Any, images: int, seconds: float) -> float:
    """Images per second of a call that takes so many; the median of some calls."""
    call()
    until, taken = time.perf_counter() + seconds, list[float]()
    while len(taken) < 3 or time.perf_counter() < until:
        taken.append(wall_ms(call, _nothing))
    return images / float(np.median(taken)) * 1e3


def _evaluations(net: Net, images: np.ndarray, targets: np.ndarray | None, batch: int, seconds: float) -> float:
    """Images per second of an evaluation on a resident test set."""
    named: dict[str, Any] = {"labels": targets, "test_labels": targets} if net.takes_classes else {"targets": targets, "test_targets": targets}
    rates = learning_rates("constant", 1e-4, 3)
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=batch, test_images=images, **named)
    try:
        return _rate(session.evaluate, len(images), seconds)
    finally:
        session.close()


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as a table; the ratio is the latency over ours."""
    head = f"{'latency µs':>12}{'on the GPU':>12}{'launch µs':>11}{'launches':>10}{'images/s':>13}{'evaluated/s':>13}{'MiB':>8}{'ours is':>9}"
    text = [f"{'network':14}{'':6}{'batch':>6}  {'form':20}{head}"]
    for row in rows:
        line = f"{row['what']:14.14}{row['precision']:6}{row['batch']:6}  {row['form']:20}"
        if "why" in row:
            text.append(f"{line}not timed: {row['why']}")
            continue
        line += f"{row['latency_ms']['median'] * 1e3:12.1f}{row['replay_ms']['median'] * 1e3:12.1f}"
        line += f"{row['enqueue_ms'] * 1e3:11.1f}{row['launches']:10}" if "launches" in row else " " * 21
        line += f"{row['images_per_second']:13,.0f}"
        line += f"{row['evaluated_per_second']:13,.0f}" if "evaluated_per_second" in row else " " * 13
        text.append(f"{line}{row['peak_bytes'] / 2**20:8,.1f}{row.get('ratio', 1.0):8.2f}×")
    return text
