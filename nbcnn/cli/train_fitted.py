"""This module has train.py fit layers to the images before the training, and the models that are fitted instead of being trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.cli import train_run
from nbcnn.cli.saying import to_stdout
from nbcnn.cli.train_data import Material
from nbcnn.dictionary import fit
from nbcnn.files.errors import UsageError
from nbcnn.files.suggest import called
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice, choose_mode

if TYPE_CHECKING:
    from nbcnn.ranks.team import Team

PRECISION = "tf32"
"""Precision of a dictionary on tensor cores where no flag says otherwise: in bf16 the small differences within a patch would be rounded away."""


def choice(taken: Choice, flags: SimpleNamespace) -> Choice:
    """The row of a model that is fitted: the one that was `taken`, on tensor cores in PRECISION unless --precision names one."""
    if taken.row.mode != "tensorcore" or flags.precision or taken.row.precision == PRECISION:
        return taken
    return choose_mode("tensorcore", PRECISION, flags.engine, strict=flags.strict)


def random_init(flags: SimpleNamespace) -> str:
    """How parameters start that are not fitted: k-means leaves those of a decoder to "torch"."""
    return "torch" if flags.init == "kmeans" else str(flags.init)


def prepare(net: Net, data: Material, flags: SimpleNamespace, say: Callable[[str], None]) -> None:
    """Fit the layers of a new run that wait for images, and with --init kmeans its first weights, unless --weights brought them."""
    fit.fit(net, data.train, flags.seed, say)
    if flags.init == "kmeans" and not flags.weights:
        fit.start(net, data.train, flags.seed, say)


def fitted(
    start: train_run.Start,
    data: Material,
    net: Net,
    identity: dict[str, str],
    team: Team,
    held: ExitStack,
    say: Callable[[str], None],
    started: float,
) -> int:
    """Fit a model of `nbcnn.plan.names.FITTED` to the training images and write its run folder; returns the exit code. Every rank fits all of it.

    Raises UsageError for --resume of a run that is complete, and for --explain.
    """
    flags = start.flags
    if start.checkpoint:
        raise UsageError(f"{start.folder.path if start.folder else flags.resume} is complete: --model {flags.model} is fitted in one pass")
    if flags.explain:
        raise UsageError(f"--explain is of a training step, and --model {flags.model} has none")
    begun = time.perf_counter()
    fit.fit_encoder(net, data.train, flags.seed, say)
    seconds = time.perf_counter() - begun
    if not team.leads:
        return 0
    run = train_run.claimed(start, data, net.mode, held)
    session = SimpleNamespace(team=team, planned_bytes={}, tiles=dict)
    run.rewrite([])
    run.write_config(train_run.config(flags, data, net, session, ""))
    tensors = {f"param.{name}": np.ascontiguousarray(tensor) for name, tensor in net.params.as_dict().items()}
    position = {"step": "0", "epochs_done": "0", "epoch_seconds": "0.0"}
    for path in (run.best, run.last):
        run.keep(path, tensors, {**train_run.notes(net, session, data), **identity, **position})
    told: dict[str, Any] = {"run": str(run.path), "dataset": data.name, "mode": net.mode, "precision": net.precision, "device": net.device_name}
    whole = time.perf_counter() - started
    if flags.json:
        to_stdout(json.dumps(told | {"fit_seconds": round(seconds, 3), "seconds": round(whole, 3), "parameters": net.params.count}))
        return 0
    said = (
        f"{data.name}, {net.mode} {net.precision}: {flags.model} fitted to {data.count:,} images in {seconds:.1f} s ({whole:.1f} s since the start)\n"
        f"run folder {run.path}: checkpoints\n"
        f"next: {called('extract', run.path)}"
    )
    to_stdout(said)
    return 0
