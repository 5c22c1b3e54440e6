"""This module trains a model on data in its form, for `Model.fit`: a session and a trainer, and what they leave behind for the next call."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nbcnn.dictionary import fit as dictionary
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import counted, quoted
from nbcnn.files.warn import warn
from nbcnn.model import files
from nbcnn.model.evaluation import no_better
from nbcnn.model.history import History
from nbcnn.nn.optim import Factor, Optimizer, Schedule
from nbcnn.run.session import TrainingSession
from nbcnn.run.streaming import Batches
from nbcnn.train.callbacks import ClassesOfPixels, Classification, Curves, Pictures, Plots, Progress
from nbcnn.train.events import Callback
from nbcnn.train.runlog import InMemory, RunFolder
from nbcnn.train.trainer import Diverged, Trainer

if TYPE_CHECKING:
    from nbcnn.model.network import Model


class Data(NamedTuple):
    """What a model is trained on, in its form: examples (M, …), their targets (None: the examples), those it is evaluated on; a callable's batches,
    of which `images` and `targets` have the shapes alone; and a name."""

    images: Any
    targets: Any
    test_images: np.ndarray | None
    test_targets: np.ndarray | None
    batches: Batches | None
    name: str


@dataclass
class Past:
    """What earlier trainings of a model left: the class of their optimizer, its moments by name, updates and epochs so far."""

    optimizer: str = ""
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0


def train(
    model: Model,
    data: Data,
    past: Past,
    *,
    epochs: int,
    batch_size: int | None,
    optimizer: Optimizer,
    factors: Mapping[str, Factor],
    callbacks: Sequence[Callback],
    folder: RunFolder,
    options: dict[str, Any],
    verbose: int | bool,
) -> History:
    """Train `model` for so many more epochs, and leave in `past` what the next call goes on from.

    factors  of learning rates and weight decays, by parameter.
    folder   takes the files of the run; `InMemory` keeps them from the disk.
    options  flip, augment, shuffle, accumulate, ema and recompute, as `TrainingSession` takes them.
    Raises as `Model.fit`.
    """
    for each in callbacks:
        if not isinstance(each, Callback):
            line = f": write {each.__name__}()" if isinstance(each, type) and issubclass(each, Callback) else ""
            raise UsageError(f"callbacks are objects of subclasses of nbcnn.Callback, got {quoted(each)}{line}")
    images, targets, test_images, test_targets, batches, name = data
    net, batch = model.net, batches.batch if batches else min(batch_size or 64, len(images))
    if batch_size is not None and batch < batch_size:
        warn(f"batch_size {batch_size} is more than the {counted(len(images), 'example')}: a training step takes all of them")
    steps = -(-len(images) // (batch * options["accumulate"]))
    if batches is None:
        # Patches are drawn on the host.
        dictionary.fit(net, images if isinstance(images, np.ndarray) or dictionary.is_fitted(net) else np.asarray(images), model.seed)
    elif not dictionary.is_fitted(net):
        raise UsageError("Whiten is fitted to images before training, and x is a callable: nbcnn.dictionary.fit.fit(model.net, images) does it")
    rates = optimizer.rates(epochs * steps, steps)
    before = past.steps if past.optimizer == type(optimizer).__name__ else 0
    first_epoch = past.epochs
    net.params.grads_of = None
    session = TrainingSession(
        net,
        images,
        optimizer=optimizer,
        learning_rates=np.concatenate([np.zeros(before, np.float32), rates]),
        batch=batch,
        seed=model.seed,
        test_images=test_images,
        labels=targets if net.takes_classes else None,
        test_labels=test_targets if net.takes_classes else None,
        targets=None if net.takes_classes else targets,
        test_targets=None if net.takes_classes else test_targets,
        factors=factors,
        batches=batches,
        **options,
    )
    if before:
        session.go_on(past.moments, before)
    shown: list[Callback] = [Progress()] if verbose else []
    scores = None
    if test_images is not None:
        title = f"{name}, {net.mode} {net.precision}"
        pictures = _pictures(model, title, test_images, test_targets)
        scores = pictures.scores
        shown += [pictures] if not isinstance(folder, InMemory) else []
    further = {key: options[key] for key in ("accumulate", "ema") if options[key] not in (0, 1)}
    identity, notes = files.words(model, session, optimizer, images, epochs, batch, name)
    identity |= {key: f"{value:g}" for key, value in further.items()}
    trainer = Trainer(
        session,
        folder,
        learning_rates=rates,
        identity=identity,
        notes=notes,
        callbacks=[*shown, *callbacks],
        scores=scores,
        first_epoch=first_epoch,
    )
    if not isinstance(folder, InMemory):
        config = files.config(model, session, optimizer, images, test_images, epochs, batch, name)
        further |= {"recompute": True} if options["recompute"] else {}
        folder.write_config({**config, "flags": {**config["flags"], **further}})
    try:
        result = trainer.fit()
        rows = trainer.rows
        _warn(model, rows, data, optimizer)
    except Diverged:
        trainer.go_back()
        raise
    finally:
        past.optimizer = type(optimizer).__name__
        past.moments = {key: tensor for key, tensor in session.state().items() if key.startswith("optim.")}
        past.steps, past.epochs = before + trainer.step, first_epoch + trainer.epochs_done
        session.close()
        del session, trainer
        if net.device.name == "gpu":
            gc.collect()
    return History(rows, result)


def _warn(model: Model, rows: Sequence[Mapping[str, Any]], data: Data, optimizer: Optimizer) -> None:
    """Say so where a network is no better than the same answer to all examples after two epochs or more."""
    rate = optimizer.own_lr if optimizer.lr is None else optimizer.lr.lr if isinstance(optimizer.lr, Schedule) else optimizer.lr
    name = type(optimizer).__name__
    size, other = optimizer.other_rate(rate)
    advice = size, f"{name}, lr {rate:g}: try {'' if name.startswith('Adam') else 'Adam() or '}lr {other:g}"
    own = data.targets is None
    targets = None if data.batches is not None else data.images if own else data.targets
    words = no_better(model.net, rows, targets, (lambda some: model._prepared(some, 256)) if own else None, advice)
    if words:
        warn(words)


def _pictures(model: Model, title: str, images: np.ndarray, targets: np.ndarray | None) -> Pictures:
    """What is drawn of the outputs after every epoch: images, classes, classes of pixels, or curves alone."""
    if len(model.net.output_shapes) > 1:
        return Curves(title)
    if not model.net.takes_classes:
        drawn = targets is None and images.ndim == 4 and images.shape[1] in (1, 3)
        return Plots(title, images[:8]) if drawn else Curves(title)
    assert targets is not None
    if model.net.plane:
        return ClassesOfPixels(title, model.net, images, targets, model.classes)
    names = model.classes or tuple(str(number) for number in range(model.net.output_shape[0]))
    return Classification(title, model.net, SimpleNamespace(test_images=images, test_labels=targets, classes=names))


def new_folder(run: Path | str, held: ExitStack) -> RunFolder:
    """The folder `run`, held by this process. Raises UsageError if there is something in it, OSError if it cannot be written."""
    folder = RunFolder(run)
    if folder.is_taken():
        raise UsageError(f"run={str(run)!r} is there already: choose a new folder")
    folder.check_writable("run=")
    held.enter_context(folder.held())
    return folder
