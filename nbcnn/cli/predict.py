"""nbcnn predict RUN IMAGES…: apply a trained network to image files: classes and probabilities, or reconstructions."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbcnn.cli.errors import DATA, OK, guarded
from nbcnn.cli.flags import Parser, count, flag, inference_flags, one_of
from nbcnn.files.suggest import called

if TYPE_CHECKING:
    import numpy as np

SUMMARY = "Apply a trained network to image files; they are scaled until they cover the size that it takes, and cut at the centre."
EXAMPLES = (
    "predict runs/digits seven.png photographs",
    "predict net.safetensors photographs --csv found.csv --top 3",
    "predict RUN photographs --checkpoint best --json --mode cpu",
    "predict RUN photographs --picture found.png         of an autoencoder its reconstructions",
    "predict RUN photographs --classifier features/digits/classify/classifier.safetensors",
)
SHOWN = 32
"""Images in a picture."""


def parser() -> Parser:
    """The parser of this command."""
    made = Parser(called("predict"), SUMMARY, [called(*example.split(" ", 1)) for example in EXAMPLES], "RUN IMAGES…")
    made.add_argument("run", metavar="RUN", help="run folder, checkpoint, or file of a saved model")
    made.add_argument("images", metavar="IMAGES", nargs="+", help="image files, or folders of them")
    group = made.add_argument_group("model")
    flag(group, "--checkpoint", one_of("best", "last"), "of a run folder; best: lowest test loss", "last, or the one that --classifier is of")
    flag(group, "--classifier", Path, "classify by this file of nbcnn classify, on the features of RUN's encoder", "none", metavar="FILE")
    inference_flags(made, "the file's, where this machine has it")
    group = made.add_argument_group("output")
    flag(group, "--top", count(1), "of a classifier: so many classes for each image", 1, "classes")
    flag(group, "--csv", Path, "also write the results into this file", "none", metavar="FILE")
    flag(group, "--picture", Path, f"draw the first {SHOWN} images with their results, as PNG", "none", metavar="FILE")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    flag(group, "--quiet", bool, "no progress on stderr", "off")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print what the network makes of the images. Exit 3 if one cannot be read (the others are still done), or the run is damaged."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _predict(flags))


def _predict(flags: SimpleNamespace) -> int:
    from nbcnn.files.errors import UsageError
    from nbcnn.gpu.select import use_device
    from nbcnn.model import files, pictures
    from nbcnn.run.colours import in_colours

    if flags.device:
        use_device(flags.device)
    paths = pictures.files_in(flags.images)
    if flags.classifier:
        return _classify(flags, paths)
    with files.load(flags.run, mode=flags.mode or "auto", precision=flags.precision, checkpoint=flags.checkpoint or "last") as model:
        shape = model.net.input_shape
        if len(shape) != 3:
            raise UsageError(f"{flags.run} takes examples of {shape}, which are no images")
        if not flags.quiet:
            print(f"{model.net.mode} {model.net.precision} on {model.net.device_name}; {len(paths):,} files", file=sys.stderr, flush=True)

        def found(named: list[Path], images: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
            outputs = model.net.predict(images, len(images))
            if outputs.shape == images.shape:
                outputs = in_colours(model.net, outputs, images)
            return outputs, _rows(model, named, images, outputs, flags.top or 1)

        return _told(flags, paths, shape, found, f"{flags.run}, {model.net.mode} {model.net.precision}")


def _classify(flags: SimpleNamespace, paths: list[Path]) -> int:
    """Print the classes that the classifier's file gives the images, by the encoder of the run."""
    from nbcnn.classify import classifier as classifiers
    from nbcnn.model import files

    classifier = classifiers.load(flags.classifier)
    # A run folder has several checkpoints, and the file knows which one made its features.
    run, which = Path(flags.run), classifier.origin.checkpoint
    path = run / Path(which).name if run.is_dir() and not flags.checkpoint else files.found(run, flags.checkpoint or "last")
    net = classifier.encoder(path, flags.mode or "auto", flags.precision)
    if not flags.quiet:
        print(f"{net.mode} {net.precision} on {net.device_name}, {flags.classifier}; {len(paths):,} files", file=sys.stderr, flush=True)
    names = classifier.origin.classes

    def found(named: list[Path], images: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
        decisions = classifier.decisions(*classifier.features_of(net, images, len(images)))
        margins, voted = classifier.margins(decisions), classifier.voted(decisions)
        rows = []
        for at, path in enumerate(named):
            # What the votes say comes first: of a cycle of pairs no class has all votes, and another one may have the larger margin.
            order = sorted(range(len(classifier.classes)), key=lambda c: (classifier.classes[c] != voted[at], -margins[at, c]))
            best = [{"class": _name(names, classifier.classes[c]), "margin": round(float(margins[at, c]), 6)} for c in order[: flags.top or 1]]
            rows.append({"image": str(path), "classes": best})
        return margins, rows

    return _told(flags, paths, classifier.origin.image_shape, found, f"{flags.classifier}, {net.mode} {net.precision}")


def _name(names: tuple[str, ...] | None, number: Any) -> str:
    return names[int(number)] if names else str(int(number))


def _told(
    flags: SimpleNamespace,
    paths: list[Path],
    shape: tuple[int, ...],
    found: Callable[[list[Path], np.ndarray], tuple[np.ndarray, list[dict[str, Any]]]],
    title: str,
) -> int:
    """Read the images in batches, print and write what `found` says of each batch (outputs for a picture, and rows); returns the exit code."""
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
        if len(kept) == (flags.batch or 256):
            flush()
    flush()
    if rows and flags.picture:
        _draw(flags.picture, rows, shown, title)
    if rows and flags.csv:
        _write_csv(flags.csv, rows)
    if flags.json:
        print(json.dumps({"run": str(flags.run), "images": rows, "problems": problems}))
    else:
        for row in rows:
            print(_line(row))
    for problem in problems:
        print(f"nbcnn: error: {problem}", file=sys.stderr)
    return DATA if problems else OK


def _rows(model: Any, paths: list[Path], images: np.ndarray, outputs: np.ndarray, top: int) -> list[dict[str, Any]]:
    """One dict for each image: its classes with their probabilities, the error of its reconstruction, or the output as it is."""
    from nbcnn.model.evaluation import softmax

    if model.net.takes_classes:
        names = model.classes or [str(number) for number in range(outputs.shape[1])]
        chances = softmax(outputs)
        order = (-chances).argsort(1, kind="stable")[:, :top]
        return [
            {"image": str(path), "classes": [{"class": names[at], "probability": round(float(chances[row, at]), 6)} for at in order[row]]}
            for row, path in enumerate(paths)
        ]
    if outputs.shape == images.shape:
        errors = ((outputs - images / 255.0) ** 2).reshape(len(images), -1).mean(1)
        return [{"image": str(path), "error": float(error)} for path, error in zip(paths, errors, strict=True)]
    return [{"image": str(path), "output": output.reshape(-1).tolist()} for path, output in zip(paths, outputs, strict=True)]


def _line(row: dict[str, Any]) -> str:
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
    elif "error" in rows[0]:
        writer.writerow(["image", "error"])
        writer.writerows([row["image"], row["error"]] for row in rows)
    else:
        writer.writerow(["image", *(f"output_{number}" for number in range(len(rows[0]["output"])))])
        writer.writerows([row["image"], *row["output"]] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_bytes(path, text.getvalue().encode())


def _draw(path: Path, rows: list[dict[str, Any]], shown: list[tuple[np.ndarray, np.ndarray]], title: str) -> None:
    import numpy as np

    from nbcnn.train import plots

    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.stack([image for image, _ in shown])
    if "error" in rows[0]:
        plots.reconstructions(path, images[:8], np.stack([output for _, output in shown[:8]]), title)
    else:
        plots.captioned(path, images, [_line(row).split("  ", 1)[1] for row in rows[: len(images)]], title)
