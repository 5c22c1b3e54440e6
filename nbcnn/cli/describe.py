"""This module writes what train.py prints: the header before training, the summary after it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from nbcnn import __version__
from nbcnn.cli.train_data import Material
from nbcnn.files.quote import counted
from nbcnn.files.suggest import called
from nbcnn.gpu.language import SIMULATOR
from nbcnn.plan.recompute import made_again
from nbcnn.run.explain import summary as layer_table
from nbcnn.train.callbacks import Pictures, duration, rate
from nbcnn.train.events import Result
from nbcnn.train.runlog import RunFolder


def explanation(session: Any) -> str:
    """The answer to --explain: layers, planned memory, the plan of one training step."""
    net = session.net
    return "\n".join(
        ("layers", layer_table(net.layers, net.input_shape), "", "memory", *_memory(session), "", "one training step", session.explain())
    )


def compiling(net: Any) -> str:
    """The line to print before the first launch, which may take long; empty where nothing is compiled."""
    if net.mode == "cpu":
        return ""
    if SIMULATOR:
        return f"the {net.mode} kernels run in the simulator, thread by thread: a millionth of a GPU's speed"
    return f"preparing the {net.mode} kernels; compiling them at the first start takes up to a minute"


def header(flags: SimpleNamespace, data: Material, session: Any, run: RunFolder, ready: float) -> str:
    """What was decided, and why, before training starts, `ready` seconds after the program did."""
    net = session.net
    warmup = f" after {counted(flags.warmup, 'epoch')} of warm-up" if flags.warmup else ""
    extras = {name: getattr(flags, name) for name in ("momentum", "weight_decay", "clip_value", "clip_norm")}
    extra = "".join(f", {name.replace('_', '-')} {value:g}" for name, value in extras.items() if value) + (", nesterov" if flags.nesterov else "")
    together = f"{flags.accumulate} × " if flags.accumulate > 1 else ""
    average = f", average of the weights with decay {flags.ema:g}" if flags.ema else ""
    shape = "×".join(map(str, net.input_shape))
    source = textwrap.fill(data.source, 100, initial_indent=" " * 11, subsequent_indent=" " * 11)
    planned, resident = sum(session.planned_bytes.values()) / 2**20, session.planned_bytes["data set"] / 2**20
    training = "training" if data.test_noun == "test images" else "training windows"
    lines = [
        f"nbcnn {__version__}",
        f"  mode     {net.mode}, {net.precision} ({net.why})",
        f"  device   {net.device_name}{_ranks(session.team)}",
        f"  data     {data.name}: {data.count:,} {training} and {data.test_count:,} {data.test_noun} of {shape}",
        source,
        f"  model    {flags.model}, {net.params.count:,} parameters, {flags.init} initialisation, seed {flags.seed}",
        f"  recipe   {flags.recipe}: {flags.optimizer}, lr {flags.lr:g} {flags.schedule}{warmup}{extra}",
        f"           batch {together}{flags.batch}{average}, {counted(flags.epochs, 'epoch')}{', images mirrored at random' if flags.flip else ''}",
        *([f"           augmented: {flags.augment}"] if flags.augment else []),
        *([f"           {harder}"] if (harder := _harder(flags)) else []),
        *([f"           normalised: {_normalised(net.normalisation)}"] if net.normalisation else []),
        f"  memory   {planned:,.1f} MiB planned, of which the data set {resident:,.1f}{_streamed(session)}{_recomputed(session)}",
        f"  steps    {counted(session.steps_per_epoch, 'training step')} per epoch",
        f"  run      {run.path}",
        f"  ready    after {ready:.1f} s, {counted(session.compiled, 'kernel')} compiled",
    ]
    lines += [f"  note     {fallback}" for fallback in net.fallbacks(session.plans["train", session.batch])]
    return "\n".join(lines)


def _harder(flags: SimpleNamespace) -> str:
    """What --whiten, --noise, --mask and --sparse put into the network, in words; empty if nothing."""
    words = ["whitened images"] if flags.whiten else []
    words += [f"noise of {flags.noise:g}"] if flags.noise else []
    words += [f"{flags.mask:.0%} of the squares masked"] if flags.mask else []
    return ", ".join([*words, *([f"{counted(flags.sparse, 'channel')} of a pixel of the code pass on"] if flags.sparse else [])])


def _normalised(normalisation: Any) -> str:
    mean, deviation = (", ".join(f"{value:.4g}" for value in values) for values in (normalisation.mean, normalisation.deviation))
    return f"mean {mean}; deviation {deviation}"


def _streamed(session: Any) -> str:
    """Where the images are if they are not resident."""
    held = session.streamed_bytes
    return f"; images are streamed through {held / 2**20:,.1f} MiB of page-locked host memory" if held else ""


def _recomputed(session: Any) -> str:
    """What --recompute found to make again."""
    count = len({buf.name for buf in made_again(session.plans["train", session.batch].steps)})  # each part of a batch makes them under the same names
    if count:
        return f", {counted(count, 'output')} of norms made again in the backward pass"
    return ", of which --recompute saves nothing" if session.training.recompute else ""


def _ranks(team: Any) -> str:
    machines = "" if team.beside == team.size else f", {team.beside} of them on this machine"
    return f", {team.size} ranks{machines}" if team.size > 1 else ""


def _memory(session: Any) -> list[str]:
    parts = [*session.planned_bytes.items(), ("total", sum(session.planned_bytes.values()))]
    return [f"{name:40} {nbytes / 2**20:10,.1f} MiB" for name, nbytes in parts]


def results(
    result: Result, data: Material, session: Any, run: RunFolder, ready: float, pictures: Pictures, scores: Mapping[str, float]
) -> dict[str, Any]:
    """How the run ended, with the scores of its last epoch and the outcome of its pictures, for --json."""
    net = session.net
    where = {"run": str(run.path), "dataset": data.name, "mode": net.mode, "precision": net.precision, "device": net.device_name}
    begun = {"ready_seconds": round(ready, 2), "kernels_compiled": session.compiled}
    return where | begun | asdict(result) | dict(scores) | pictures.outcome


def summary(result: Result, data: Material, session: Any, run: RunFolder, pictures: Pictures, scores: Mapping[str, float]) -> str:
    """The same for people, in a few lines."""
    best = run.checkpoint() == run.best and result.best_epoch != result.epochs
    net = session.net
    if result.interrupted:
        return f"stopped at training step {result.step:,} and saved; continue with\n  {called('train', '--resume', run.path)}"
    epochs = counted(result.epochs, "epoch")
    # Features of images without labels lead no further: there is nothing to classify them by.
    command = "report" if pictures.command == "extract" and getattr(data.data, "classes", None) is None else pictures.command
    return "\n".join(
        (
            f"{data.name}, {net.mode} {net.precision}, {epochs}: test loss {result.test_loss:.5f}, train loss {result.train_loss:.5f}",
            *([f"ended early: {result.stopped}"] if result.stopped else []),
            *([f"the weights are those of epoch {result.best_epoch}, the best; --checkpoint last takes those of the last one"] if best else []),
            *(f"{name.replace('_', ' ')} {value:.2%}" for name, value in scores.items()),
            f"best test loss {result.best_loss:.5f}, epoch {result.best_epoch}",
            f"trained {counted(result.step, 'step')} in {duration(result.seconds)}, {rate(result.images_per_second)} {data.noun}/s",
            *(pictures.lines() if pictures.outcome else []),
            f"run folder {run.path}: metrics.csv, checkpoints, {pictures.written}",
            *([f"next: {called(command, run.path)}"] if command else []),
        )
    )
