"""This study times S4ConvD's whole training step with every variant of the depthwise convolution, beside Amdahl's prediction and PyTorch.

Between two variants only the depthwise convolutions change. From naive's step, the share s of it that they take (by events around
the launches of its plan), and a variant's speed-up S of the three paths alone, the law predicts naive · (1 − s + s / S).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import energy
from nbcnn.datasets.series import WINDOW, SeriesDataset
from nbcnn.lab.measure.timing import sensible_count, time_calls, wall_ms
from nbcnn.lab.peers import forecast as forecast_peers
from nbcnn.lab.studies.dwconv import amdahl
from nbcnn.nn import models
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

BLOCKS, WIDE = 4, 128
RATE = 1e-5
"""The published learning rate: small enough that hundreds of timed steps change little."""
STEPS = 24
"""Training steps of an epoch while timing."""
GROUPS = {
    "depthwise": ("dwconv1d",),
    "pointwise": ("conv",),
    "GELU": ("gelu",),
    "GLU": ("glu",),
    "filters": ("s4kernel",),
    "residual": ("add",),
}
"""What the decomposition adds up, by the beginnings of `timeline.label`s; the rest is "other"."""
CURVE_STEPS, CURVE_BATCH, CURVE_RATE = 100, 64, 1e-3
"""The training steps whose losses are compared between variants, at a hundred times the published rate.

In NumPy, weights that differ in their last bit from the start on make losses differ by 2e-6 within these steps; at a rate of 0.01, where training
is no longer stable, by 2e-2, and then no two orders of addition train alike.
"""
WATCHED = 5
"""Training steps that are watched launch by launch."""


def shape_of(batch: int) -> tuple[int, int, int, int]:
    """N, C, L and T of the step's depthwise convolutions."""
    return batch, WIDE, WINDOW, WINDOW


def data_of(batch: int) -> SeriesDataset:
    """The generated year, enough windows of it for an epoch of `STEPS` training steps."""
    return energy.load(Path("no files, the generated year")).cut(batch * STEPS)


def session_for(data: SeriesDataset, batch: int, *, rate: float = RATE, wide: int = WIDE, blocks: int = BLOCKS, **options: Any) -> TrainingSession:
    """A session of S4ConvD, SGD with momentum; `options` of the net: mode, precision, dwconv, fusing, seed."""
    train = data.windows("train")
    layers = models.s4convd(train.shape[0], wide=wide, blocks=blocks, taps=train.length)
    net, rates = Net(layers, train.shape, **options), learning_rates("constant", rate, 3)
    return TrainingSession(net, train, optimizer=SGD(), learning_rates=rates, batch=batch)


def group_of(label: str) -> str:
    """The part of the decomposition that a label belongs to."""
    return next((name for name, starts in GROUPS.items() if label.startswith(starts)), "other")


def first_losses(session: TrainingSession, count: int) -> list[float]:
    """The losses of the first `count` training steps."""
    losses = []
    for _ in range(count):
        _room(session)
        session.step()
        losses.append(session.status().last_loss)
    return losses


def curves_apart(variants: Sequence[str], **options: Any) -> dict[str, float]:
    """By variant, the largest difference of a loss from the first variant's over `CURVE_STEPS` steps, from the same weights on the same windows."""
    data, curves = data_of(CURVE_BATCH), {}
    for variant in variants:
        session = session_for(data, CURVE_BATCH, rate=CURVE_RATE, dwconv=variant, **options)
        curves[variant] = np.array(first_losses(session, CURVE_STEPS))
        session.close()
    return {variant: float(np.abs(losses - curves[variants[0]]).max()) for variant, losses in curves.items()}


def measure_variant(data: SeriesDataset, batch: int, variant: str, seconds: float = 1.0, **options: Any) -> dict[str, Any]:
    """One variant's step: whole as a CUDA graph, and every part of its decomposition."""
    session = session_for(data, batch, dwconv=variant, **options)
    device = session.net.device

    def step() -> None:
        _room(session)
        session.step()

    whole = time_calls(step, device, sensible_count(wall_ms(step, device.synchronize), seconds))
    parts = parts_of([_watched(session) for _ in range(WATCHED)])
    return {
        "form": f"nbcnn {variant}",
        "variant": variant,
        "mode": session.net.mode,
        "precision": session.net.precision,
        "batch": batch,
        "step_ms": whole.as_dict(),
        "windows_per_second": batch / whole.median * 1e3,
        "parts_ms": parts,
        "peak_bytes": sum(session.planned_bytes.values()),
    }


def _room(session: TrainingSession) -> None:
    """Begin another epoch if this one is over."""
    if session.steps_left == 0:
        session.begin_epoch(0)


def _watched(session: TrainingSession) -> Mapping[str, Any]:
    """One training step, launch by launch (`nbcnn.run.timeline`)."""
    _room(session)
    return session.step_watched()()


def parts_of(watched: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of every part of the decomposition, medians of watched steps, the most first."""
    sums: list[dict[str, float]] = []
    for found in watched:
        spent: dict[str, float] = {"gaps": found["gaps_ms"]}
        for name, ms in found["kernels_ms"].items():
            spent[group_of(name)] = spent.get(group_of(name), 0.0) + ms
        sums.append(spent)
    medians = {name: float(np.median([spent[name] for spent in sums])) for name in sums[0]}
    return {name: round(ms, 5) for name, ms in sorted(medians.items(), key=lambda pair: -pair[1])}


def predicted(rows: Sequence[dict[str, Any]], trios: Mapping[str, float]) -> None:
    """Put Amdahl's prediction into `rows` (naive's among them): `trios` are milliseconds of the three paths alone, by variant."""
    naive = next(row for row in rows if row["variant"] == "naive")
    before = naive["step_ms"]["median"]
    share = naive["parts_ms"]["depthwise"] / sum(naive["parts_ms"].values())
    for row in rows:
        gain = amdahl(share, trios["naive"] / trios[row["variant"]])
        row |= {"share_of_naive": share, "predicted_ms": before / gain, "off": row["step_ms"]["median"] * gain / before - 1}


def measure(
    batch: int,
    variants: Sequence[str],
    trios: Mapping[str, float],
    *,
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    forms: tuple[str, ...] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of every variant, predicted and measured, then of PyTorch's `forms`.

    `trios` empty: no prediction. `ratio`: how many times as long a row takes as the best variant. `curve_apart`: see `curves_apart`.
    keep: gets all rows so far whenever a part is done: ours, the curves, PyTorch's. Raises RuntimeError if PyTorch's network is not ours.
    """
    data = data_of(batch)
    rows = []
    for variant in variants:
        say(f"one training step of S4ConvD, batch {batch:,}, {variant} …")
        rows.append(measure_variant(data, batch, variant, **options))
        gc.collect()
    if trios:
        predicted(rows, trios)
    keep(compared(rows))
    if len(variants) > 1:
        say(f"the losses of {CURVE_STEPS} training steps with every variant …")
        apart = curves_apart(variants, **options)
        rows = [row | {"curve_apart": apart[row["variant"]]} for row in rows]
        keep(compared(rows))
    if forms:
        say("PyTorch's training step, eager and compiled …")
        rows += _peers(data, batch, forms, **options)
        keep(compared(rows))
    return compared(rows)


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its `ratio`."""
    best = min(row["step_ms"]["median"] for row in rows if "variant" in row)
    return [{**row, "ratio": row["step_ms"]["median"] / best} for row in rows]


def _peers(data: SeriesDataset, batch: int, forms: tuple[str, ...], **options: Any) -> list[dict[str, Any]]:
    """PyTorch's rows, after its loss on one batch was ours."""
    windows = data.windows("train")
    x, target = windows.series(slice(0, batch)), windows.targets[windows.starts[:batch] + windows.length]
    net = Net(models.s4convd(x.shape[1], wide=WIDE, blocks=BLOCKS, taps=x.shape[2]), x.shape[1:], **options)
    weights = net.params.as_dict()
    small = min(batch, 256)
    ours = float(np.square(net.predict(x[:small], small).reshape(-1).astype(np.float64) - target[:small]).mean())
    torch, _ = forecast_peers.peers._prepare(net.precision)
    theirs = forecast_peers.loss_of(torch, weights, x[:small], target[:small], BLOCKS, False, "cuda")
    precision = net.precision
    if abs(ours - theirs) > forecast_peers.TOLERANCE[precision] * ours:
        raise RuntimeError(f"PyTorch's network is not ours: its loss is {theirs:.6f}, ours {ours:.6f}")
    del net
    gc.collect()
    rows = forecast_peers.training_step(weights, x, target, BLOCKS, forms, precision)
    return [{**row, "windows_per_second": batch / row["step_ms"]["median"] * 1e3} for row in rows]
