"""`study features` compares what classifiers make of trained encoders, of controls, and of few labels, and draws what was learned."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import MODE_CPU, OK, guarded
from nbcnn.cli.flags import MODES, Parser, count, flag, one_of, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest

EXAMPLES = (
    "python -m nbcnn study features --data-dir data --seeds 5 --save",
    "python -m nbcnn study features --only random-whitened,features --machines ridge --pictures pictures",
    "python -m nbcnn study features --dataset digits --mode cpu --limit 300 --epochs 1 --labels 100",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn study features", "Accuracy on features of trained encoders and of controls, by number of labels.", EXAMPLES)
    group = made.add_argument_group("data")
    flag(group, "--dataset", paths.DATASET_TEXT, "labelled images", "cifar10")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with the data set's files", "data", metavar="DIR")
    flag(group, "--limit", count(1), "use only the first N images of each split", "all", "images")
    group = made.add_argument_group("study")
    rows = "pixels, random, plain, plain-processed, random-whitened, features, patches, patches2"
    flag(group, "--only", str, f"these rows, with commas between: {rows}", "all", metavar="ROW,…")
    flag(group, "--seeds", count(1), "runs of the headline rows; the others are run once", 1)
    flag(group, "--machines", some_of("svm", "ridge"), "classifiers", "svm,ridge")
    flag(group, "--kernel", one_of("rbf", "mirrored"), "of the images alone, or its mean over them and their mirrored images", "mirrored")
    flag(group, "--labels", str, "numbers of labels beside all of them, with commas between", "100,1000,10000", metavar="N,…")
    flag(group, "--search-images", count(20), "training images by which C or lambda, and gamma, are chosen", 20_000, "images")
    flag(group, "--epochs", count(1), "passes of every training", "the recipe's")
    flag(group, "--mode", one_of("auto", *MODES), "how layers are computed", "auto")
    flag(group, "--scratch", paths.FOLDER, "new folder for the runs, which are kept there", "a temporary one", metavar="DIR")
    output = made.add_argument_group("output")
    flag(
        output,
        "--pictures",
        paths.FOLDER,
        "draw filters, nearest neighbours and a map of every row into subfolders of this one",
        "none",
        metavar="DIR",
    )
    results_flags(output)
    return made


def main(argv: Sequence[str]) -> int:
    """Train, classify, draw and print; returns 0. Exit 3 without the data, 4 without a GPU (unless --mode cpu)."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu=MODE_CPU)


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn import datasets
    from nbcnn.cli import recipes
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import features
    from nbcnn.run.rows import choose_mode

    try:
        labels = tuple(map(numerals.whole, flags.labels.split(","))) if flags.labels else tuple(features.LABELS)
    except ValueError:
        raise UsageError(f"--labels takes whole numbers with commas between, got {quoted(flags.labels)}") from None
    known = {case.key: case for case in features.CASES}
    wanted = [each.strip() for each in flags.only.split(",")] if flags.only else list(known)
    if wrong := [each for each in wanted if each not in known]:
        raise UsageError(f"--only: no row {quoted(wrong[0])}{nearest(wrong[0], list(known))}; the rows are {', '.join(known)}")
    cases = [known[each] for each in dict.fromkeys(wanted)]
    on_gpu = choose_mode(flags.mode or "auto", None).row.device == "gpu"
    device = Gpu() if on_gpu else None
    name, data_dir = flags.dataset or "cifar10", flags.data_dir or "data"
    data = datasets.load(name, data_dir=data_dir, limit=flags.limit, progress=False)
    if data.train_labels is None:
        raise UsageError(f"{name} has no labels: the study compares classifiers")
    words = ("--dataset", name, "--data-dir", str(Path(data_dir).resolve()), *(("--limit", str(flags.limit)) if flags.limit else ()))
    more = ("--epochs", str(flags.epochs)) if flags.epochs else ()

    def say(text: str) -> None:
        to_stderr(text)

    with (
        tempfile.TemporaryDirectory(prefix="nbcnn-features-") as temporary,
        results.keeping("features", device.device_name if device else "CPU", flags.results, wanted=bool(flags.save)) as rows,
    ):
        scratch = (flags.scratch or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        plan = features.Plan(
            data,
            words,
            scratch,
            more,
            tuple(range(flags.seeds or 1)),
            flags.machines or tuple(features.MACHINES),
            labels,
            flags.search_images or 20_000,
            flags.kernel != "rbf",
            device,
            flags.mode or "auto",
            tuple(recipes.RECIPES),
            say,
        )
        rows.extend(features.study(plan, cases))
        for case in cases if flags.pictures else ():
            if not features.missing(plan, case):
                features.pictures(plan, case, flags.pictures / case.key)
        to_stdout(json.dumps(rows) if flags.json else "\n".join(features.summary(rows)))
    return OK
