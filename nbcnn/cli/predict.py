"""nbcnn predict RUN IMAGES…: apply a trained network to image files: classes and probabilities, masks of classes, or reconstructions."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbcnn.cli import paths
from nbcnn.cli.errors import DATA, OK, guarded
from nbcnn.cli.finite import files_of, finite, weights
from nbcnn.cli.flags import OWN_CHECKPOINT, Parser, count, flag, inference_flags, one_of, take_device
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.quote import counted
from nbcnn.files.suggest import called, examples

if TYPE_CHECKING:
    import numpy as np

SUMMARY = "Apply a trained network to image files. Each is scaled to cover the network's input size, and cropped at the centre."
EXAMPLES = (
    "predict runs/digits seven.png photographs",
    "predict net.safetensors photographs --csv found.csv --top 3",
    "predict RUN photographs --checkpoint best --json --mode cpu",
    "predict RUN photographs --picture found.png         reconstructions, if RUN is an autoencoder",
    "predict RUN photographs --masks found               one mask per image, if RUN classifies pixels",
    "predict RUN photographs --classifier features/digits/classify/classifier.safetensors",
)
SHOWN = 32
"""Images in a picture."""


def parser() -> Parser:
    """The parser of this command."""
    made = Parser(called("predict"), SUMMARY, examples(EXAMPLES), "RUN IMAGES…")
    made.add_argument("run", metavar="RUN", type=paths.READS_TEXT, help="run folder, checkpoint, or file of a saved model")
    made.add_argument("images", metavar="IMAGES", nargs="+", type=paths.IMAGE_FILES, help="image files, or folders of them")
    group = made.add_argument_group("model")
    own = f"{OWN_CHECKPOINT}; the one that --classifier is of"
    flag(group, "--checkpoint", one_of("best", "last"), "which one of a run folder; best: the lowest test loss", own)
    flag(
        group,
        "--classifier",
        paths.READS,
        "classify the features of RUN's encoder with this file, which nbcnn classify wrote",
        "none",
        metavar="FILE",
    )
    inference_flags(made, "the file's, where this machine has it")
    group = made.add_argument_group("output")
    flag(group, "--top", count(1), "of a classifier: how many classes to list per image", "1; of pixels all that are found", "classes")
    flag(
        group,
        "--masks",
        paths.FOLDER,
        "of a network that classifies pixels: write one mask per image, NAME.png, into this folder",
        "none",
        metavar="DIR",
    )
    flag(group, "--csv", paths.WRITES, "also write the results into this file", "none", metavar="FILE")
    flag(
        group,
        "--picture",
        paths.WRITES,
        f"draw the first {SHOWN} images with their results as PNG, of reconstructions and masks the first 8",
        "none",
        metavar="FILE",
    )
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    flag(group, "--quiet", bool, "no progress on stderr, and beside --csv no table", "off")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print what the network makes of the images. Exit 3 if one cannot be read (the others are still done), or the run is damaged."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _predict(flags))


def _predict(flags: SimpleNamespace) -> int:
    from nbcnn.datasets.arrays import Form
    from nbcnn.files import extras
    from nbcnn.files.errors import UsageError
    from nbcnn.model import files, pictures
    from nbcnn.run.colours import in_colours

    take_device(flags.device, flags.mode)
    if flags.picture:
        extras.need("matplotlib", "--picture needs")
    paths = pictures.files_in(flags.images)
    if flags.classifier:
        return _classify(flags, paths)
    with files.load(flags.run, mode=flags.mode or "auto", precision=flags.precision, checkpoint=flags.checkpoint) as model:
        shape = model.net.input_shape
        if len(shape) != 3 or not isinstance(form := model.form, Form):
            raise UsageError(f"{flags.run} takes examples of {shape}, which are no images")
        if not flags.quiet:
            to_stderr(f"{model.net.mode} {model.net.precision} on {model.net.device_name}; {counted(len(paths), 'file')}")

        of_pixels = model.net.takes_classes and bool(model.net.plane)
        if flags.masks:
            _check_masks(flags, paths, of_pixels)

        def found(named: list[Path], images: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
            taken = form.take(images, False, "the images")
            outputs = finite(model.net.predict(taken, len(images)), files_of(named), weights(model.net.precision))
            if of_pixels:
                return (masks := outputs.argmax(1).astype("uint8")), _segmented(flags, model, named, masks)
            if outputs.shape == images.shape:
                outputs = in_colours(model.net, outputs, taken)
            return outputs, _rows(model, named, taken, outputs, flags.top or 1)

        # Logits of every pixel: a batch of them takes at most 256 MiB of host memory.
        most = max(1, min(256, 2**26 // math.prod(model.net.output_shape)))
        return _told(flags, paths, shape, found, f"{flags.run}, {model.net.mode} {model.net.precision}", most, _names(model))


def _check_masks(flags: SimpleNamespace, paths: list[Path], of_pixels: bool) -> None:
    """Raise UsageError unless the network makes masks, and each of its own name."""
    from nbcnn.files.errors import UsageError

    if not of_pixels:
        raise UsageError(
            f"--masks is for networks that classify pixels, such as nbcnn train --model unet makes on images with masks; {flags.run} does not"
        )
    twice = [name for name, count in Counter(path.stem for path in paths).items() if count > 1]
    if twice:
        raise UsageError(f"--masks calls a mask as its image, and several images are called {twice[0]}: predict them into several folders")


def _segmented(flags: SimpleNamespace, model: Any, paths: list[Path], masks: np.ndarray) -> list[dict[str, Any]]:
    """One dict for each image: the share of its pixels that each class has, and the path of its mask, where masks are written."""
    import numpy as np

    from nbcnn.datasets import image_files
    from nbcnn.datasets import masks as mask_files

    count, names = model.net.output_shape[0], _names(model)
    rows: list[dict[str, Any]] = []
    for path, mask in zip(paths, masks, strict=True):
        shares = np.bincount(mask.reshape(-1), minlength=count) / mask.size
        order = [at for at in np.argsort(-shares, kind="stable") if shares[at]][: flags.top]
        rows.append({"image": str(path), "pixels": {names[at]: round(float(shares[at]), 6) for at in order}})
        if flags.masks:
            where = flags.masks / f"{path.stem}.png"
            mask_files.write(where, mask, image_files.header(path).size)
            rows[-1]["mask"] = str(where)
    return rows


def _classify(flags: SimpleNamespace, paths: list[Path]) -> int:
    """Print the classes that the classifier's file gives the images, by the encoder of the run."""
    from nbcnn.classify import classifier as classifiers
    from nbcnn.model import files

    classifier = classifiers.load(flags.classifier)
    # A run folder has several checkpoints, and the file knows which one made its features.
    run, which = Path(flags.run), classifier.origin.checkpoint
    path = run / Path(which).name if run.is_dir() and not flags.checkpoint else files.found(run, flags.checkpoint)
    net = classifier.encoder(path, flags.mode or "auto", flags.precision)
    if not flags.quiet:
        to_stderr(f"{net.mode} {net.precision} on {net.device_name}, {flags.classifier}; {counted(len(paths), 'file')}")
    names = classifier.origin.classes

    def found(named: list[Path], images: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
        features = [finite(each, files_of(named), weights(net.precision)) for each in classifier.features_of(net, images, len(images))]
        decisions, why = classifier.decisions(*features), "the features are finite, so numbers in the classifier's file are too large"
        margins = finite(classifier.margins(decisions), files_of(named), why, f"the classifier {flags.classifier}")
        voted = classifier.voted(decisions)
        rows = []
        for at, path in enumerate(named):
            # What the votes say comes first: of a cycle of pairs no class has all votes, and another one may have the larger margin.
            order = sorted(range(len(classifier.classes)), key=lambda c: (classifier.classes[c] != voted[at], -margins[at, c]))
            best = [{"class": _name(names, classifier.classes[c]), "margin": round(float(margins[at, c]), 6)} for c in order[: flags.top or 1]]
            rows.append({"image": str(path), "classes": best})
        return margins, rows

    return _told(flags, paths, classifier.origin.image_shape, found, f"{flags.classifier}, {net.mode} {net.precision}")


def _names(model: Any) -> Sequence[str]:
    """The names of the classes that a model tells apart, else their numbers."""
    return model.classes or [str(number) for number in range(model.net.output_shape[0])]


def _name(names: tuple[str, ...] | None, number: Any) -> str:
    return names[int(number)] if names else str(int(number))


def _told(
    flags: SimpleNamespace,
    paths: list[Path],
    shape: tuple[int, ...],
    found: Callable[[list[Path], np.ndarray], tuple[np.ndarray, list[dict[str, Any]]]],
    title: str,
    most: int = 256,
    names: Sequence[str] = (),
) -> int:
    """Read the images in batches, print and write what `found` says of each batch (outputs for a picture, and rows); returns the exit code.

    most  images of a batch where no flag says otherwise. names  of the classes, where pixels have some.
    """
    import numpy as np

    from nbcnn.model import pictures

    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    shown: list[tuple[np.ndarray, np.ndarray]] = []
    kept: list[tuple[Path, np.ndarray]] = []

    def flush() -> None:
        if not kept:
            return
        images = np.stack([image for _, image in kept])
        outputs, more = found([path for path, _ in kept], images)
        rows.extend(more)
        shown.extend(list(zip(images, outputs, strict=True))[: SHOWN - len(shown)])
        kept.clear()

    for item in pictures.read_all(paths, shape, problems):
        kept.append(item)
        if len(kept) == (flags.batch or most):
            flush()
    flush()
    if rows and flags.picture:
        _draw(flags.picture, rows, shown, title, names)
    if rows and flags.csv:
        _write_csv(flags.csv, rows)
    if flags.json:
        to_stdout(json.dumps({"run": str(flags.run), "images": rows, "problems": problems}))
    elif not (flags.quiet and flags.csv):
        for row in rows:
            to_stdout(_line(row))
    for problem in problems:
        to_stderr(f"nbcnn: error: {problem}")
    return DATA if problems else OK


def _rows(model: Any, paths: list[Path], images: np.ndarray, outputs: np.ndarray, top: int) -> list[dict[str, Any]]:
    """One dict for each image: its classes with their probabilities, the error of its reconstruction, or the output as it is."""
    from nbcnn.datasets.arrays import seen
    from nbcnn.model.evaluation import probabilities

    if model.net.takes_classes:
        names = _names(model)
        chances = probabilities(model.net, outputs)
        order = (-chances).argsort(1, kind="stable")[:, :top]
        return [
            {"image": str(path), "classes": [{"class": names[at], "probability": round(float(chances[row, at]), 6)} for at in order[row]]}
            for row, path in enumerate(paths)
        ]
    if outputs.shape == images.shape:
        errors = ((outputs - seen(images)) ** 2).reshape(len(images), -1).mean(1)
        return [{"image": str(path), "error": float(error)} for path, error in zip(paths, errors, strict=True)]
    return [{"image": str(path), "output": output.reshape(-1).tolist()} for path, output in zip(paths, outputs, strict=True)]


def _line(row: dict[str, Any]) -> str:
    if "pixels" in row:
        return f"{row['image']}  " + "  ".join(f"{name} {share:.2%}" for name, share in row["pixels"].items())
    if "classes" in row:
        return f"{row['image']}  " + "  ".join(f"{each['class']} {_surely(each)}" for each in row["classes"])
    if "error" in row:
        return f"{row['image']}  mean squared error {row['error']:.5f}"
    return f"{row['image']}  " + " ".join(f"{value:.4g}" for value in row["output"])


def _surely(found: dict[str, Any]) -> str:
    return f"{found['probability']:.2%}" if "probability" in found else f"margin {found['margin']:.3f}"


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    import io

    from nbcnn.files import atomic

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if "classes" in rows[0]:
        writer.writerow(["image", *(f"{word}_{number}" for number, each in enumerate(rows[0]["classes"], 1) for word in each)])
        writer.writerows([row["image"], *(value for each in row["classes"] for value in each.values())] for row in rows)
    elif "pixels" in rows[0]:
        names = sorted({name for row in rows for name in row["pixels"]})
        writer.writerow(["image", *names])
        writer.writerows([row["image"], *(row["pixels"].get(name, 0.0) for name in names)] for row in rows)
    elif "error" in rows[0]:
        writer.writerow(["image", "error"])
        writer.writerows([row["image"], row["error"]] for row in rows)
    else:
        writer.writerow(["image", *(f"output_{number}" for number in range(len(rows[0]["output"])))])
        writer.writerows([row["image"], *row["output"]] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_bytes(path, text.getvalue().encode(errors="surrogateescape"))  # names are bytes as on the disk


def _draw(path: Path, rows: list[dict[str, Any]], shown: list[tuple[np.ndarray, np.ndarray]], title: str, names: Sequence[str]) -> None:
    import numpy as np

    from nbcnn.train import plots

    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.stack([image for image, _ in shown])
    outputs = np.stack([output for _, output in shown[:8]])
    if "error" in rows[0]:
        plots.reconstructions(path, images[:8], outputs, title)
    elif "pixels" in rows[0]:
        plots.segmentation(path, images[:8], None, outputs, names, title)
    else:
        plots.captioned(path, images, [_line(row).split("  ", 1)[1] for row in rows[: len(images)]], title)
