"""nbcnn evaluate RUN DATA: what a trained network is worth on a data set: loss and accuracy, precision, recall and F1 of every class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.finite import finite, weights
from nbcnn.cli.flags import OWN_CHECKPOINT, Parser, count, flag, inference_flags, one_of, take_device
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.cli.train_flags import dataset
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import counted, quoted
from nbcnn.files.suggest import called, examples

if TYPE_CHECKING:
    import numpy as np

SUMMARY = "Evaluate a trained network on the labelled images of a data set: loss, accuracy, precision, recall and F1 of every class."
EXAMPLES = (
    "evaluate runs/digits digits",
    "evaluate net.safetensors folder:photographs --split train",
    "evaluate RUN cifar10 --checkpoint best --json",
)


def parser() -> Parser:
    """The parser of this command."""
    made = Parser(called("evaluate"), SUMMARY, examples(EXAMPLES), "RUN DATA")
    made.add_argument("run", metavar="RUN", type=paths.READS_TEXT, help="run folder, checkpoint, or file of a saved model")
    made.add_argument("data", metavar="DATA", type=dataset, help="data set, as --dataset of nbcnn train: digits, folder:PATH, npz:PATH, …")
    group = made.add_argument_group("data")
    flag(group, "--split", one_of("test", "train"), "which images", "test")
    flag(group, "--limit", count(1), "only the first N of them", "all", "images")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with the data set's files", "data", metavar="DIR")
    group = made.add_argument_group("model")
    flag(group, "--checkpoint", one_of("best", "last"), "which one of a run folder; best: the lowest test loss", OWN_CHECKPOINT)
    inference_flags(made, "the file's, where this machine has it")
    group = made.add_argument_group("output")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    flag(group, "--quiet", bool, "no progress on stderr", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print. Exit 2 for data that does not fit the network, 3 for a missing or damaged run or data set."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _evaluate(flags))


def _evaluate(flags: SimpleNamespace) -> int:
    import numpy as np

    from nbcnn import datasets
    from nbcnn.datasets import own
    from nbcnn.model import files
    from nbcnn.train import pixels

    take_device(flags.device, flags.mode)
    with files.load(flags.run, mode=flags.mode or "auto", precision=flags.precision, checkpoint=flags.checkpoint) as model:
        net, shape = model.net, model.net.input_shape
        name = flags.data
        if len(shape) == 3 and own.is_own(name) and own.Own.parse(name).kind == "folder" and own.Own.parse(name).size is None:
            name = own.named(name, f"{shape[1]}x{shape[2]}")
        data = datasets.load(name, data_dir=flags.data_dir or datasets.DATA_DIR, limit=flags.limit, progress=not flags.quiet)
        of_pixels = net.takes_classes and bool(net.plane)
        images = data.test_images if flags.split != "train" else data.train_images
        labels = _labels(model, data, flags.split or "test", of_pixels) if net.takes_classes else None
        if not flags.quiet:
            to_stderr(f"{net.mode} {net.precision} on {net.device_name}; {counted(len(images), 'image')} of {data.name}")
        found: dict[str, Any] = {"run": str(flags.run), "dataset": data.name, "split": flags.split or "test", "images": len(images)}
        found |= model.evaluate(images, labels, batch_size=flags.batch or 256, channels_last=False)
        finite(np.asarray(found["loss"]), f"{data.name}, {found['split']}", weights(net.precision))
        lines: list[str] = []
        if labels is not None:
            classes = tuple(model.classes or (str(number) for number in range(net.classes)))
            predicted = model.predict_classes(images, batch_size=flags.batch or 256, channels_last=False)
            known = (labels >= 0) & (labels < net.classes) & (labels != (-1 if net.ignored is None else net.ignored))
            counts = pixels.counts_of(labels, predicted, net.classes, known)
            scores = pixels.by_class(counts)
            found["classes"] = {
                each: {what: _number(values[at]) for what, values in scores.items() if of_pixels or what != "iou"} for at, each in enumerate(classes)
            }
            found["confusion"] = counts.tolist()
            lines = ["", *pixels.class_lines(counts, classes, of_pixels)]
    if flags.json:
        to_stdout(json.dumps(found))
        return OK
    words = {"loss": f"loss {found['loss']:.5f}"} | {what: f"{what} {found[what]:.2%}" for what in ("accuracy", "iou") if what in found}
    to_stdout("\n".join([f"{data.name}, {found['split']}, {counted(len(images), 'image')}: {', '.join(words.values())}", *lines]))
    return OK


def _number(value: float) -> float | None:
    return None if value != value else float(value)


def _labels(model: Any, data: Any, split: str, of_pixels: bool) -> np.ndarray:
    """The labels of the split in the model's numbers: classes are compared by their names. Raises UsageError where they do not fit."""
    import numpy as np

    held = data.masks if of_pixels else data
    if held is None or held.classes is None:
        raise UsageError(f"{data.name} has no {'masks' if of_pixels else 'labels'}, and without them there is nothing to evaluate a classifier by")
    named = (held.train if split == "train" else held.test) if of_pixels else (held.train_labels if split == "train" else held.test_labels)
    known, own = list(model.classes or ()), list(held.classes)
    if not known and len(own) <= model.net.classes:
        return np.asarray(named)
    missing = [name for name in own if name not in known]
    if missing:
        raise UsageError(
            f"{data.name} has the class {quoted(missing[0])}, which the network does not know: it has {', '.join(known) or model.net.classes}"
        )
    table = np.arange(256, dtype=named.dtype) if of_pixels else np.arange(len(own), dtype=named.dtype)
    table[: len(own)] = [known.index(name) for name in own]
    return np.asarray(table[named])
