"""`python -m nbcnn classify FEATURES` trains an exact RBF support vector machine on extracted features and reports its accuracy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbcnn.cli import paths
from nbcnn.cli.baselines import PIXELS, baselines, data_dir_of, same_images, untrained_encoder
from nbcnn.cli.errors import OK
from nbcnn.cli.flags import Parser, count, flag, one_of, real, some_of
from nbcnn.cli.saying import to_stderr
from nbcnn.cli.together import together
from nbcnn.files.quote import brief, word

if TYPE_CHECKING:
    import numpy as np

    from nbcnn.classify.features import Origin
    from nbcnn.classify.kept import Opened
    from nbcnn.classify.pipeline import Load, Outcome, Report
    from nbcnn.cli.part import Part
    from nbcnn.ranks.team import Team

SUMMARY = "Train an exact RBF SVM on extracted features; accuracies and confusion matrix."
EXAMPLES = (
    "python -m nbcnn classify features/cifar10                    all images, the GPU if there is one",
    "python -m nbcnn classify features/digits --baselines         beside raw pixels and an untrained encoder",
    "python -m nbcnn classify features/cifar10 --search C,gamma   settings by a validation split",
    "python -m nbcnn classify features/cifar10 --machine ridge --search lambda,gamma",
    "python -m nbcnn classify features/cifar10 --process blur+sqrt+cw1+l2   maps blurred, rooted, whitened, of unit length",
    "python -m nbcnn classify features/cifar10 --limit 5000 --device cpu --json",
)
KERNELS = ("rbf", "mirrored")
ENCODER = "encoder"


OUT = paths.PathArgument("folder", own=paths.CLASSIFIER, recorded=True)


def add_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("python -m nbcnn classify", SUMMARY, EXAMPLES, "FEATURES")
    parser.add_argument("features", metavar="FEATURES", type=paths.recorded(paths.READS), help="folder that extract_features.py wrote")
    data = parser.add_argument_group("data")
    flag(data, "--limit", count(1), "use the first N training and the first N test images", "all", "images")
    flag(data, "--baselines", bool, "also classify raw pixels and the code of an untrained encoder", "off")
    flag(data, "--data-dir", paths.DATA, "where the images are, for --baselines and --pictures", "the run's", metavar="DIR")
    model = parser.add_argument_group("model")
    flag(model, "--machine", one_of("svm", "ridge"), "svm: exact, one-against-one; ridge: least squares, one matrix", "svm")
    flag(model, "--lambda", real(0, exclusive=True), "of ridge: what is added to the kernel's diagonal", 0.1)
    flag(model, "--c", real(0, exclusive=True), "penalty of a margin violation", 10)
    flag(model, "--gamma", _gamma, "width of the RBF kernel; scale is 1 / (features · variance of the training set)", "scale")
    flag(model, "--process", steps, "steps before the kernel, joined by +: blur, sqrt, cw1 (or another number), std, l2", "none")
    scaling = "subtract each feature's mean and divide by its standard deviation, or not"
    flag(model, "--scale", one_of("standard", "none"), scaling, "standard; none behind --process")
    flag(
        model,
        "--kernel",
        one_of(*KERNELS),
        "rbf: on the images alone; mirrored: averaged over them and their mirror images (extract --mirror)",
        "mirrored where the features have both, else rbf",
    )
    what = "tune these on a tenth of the training images, never on test images: gamma, C of svm, lambda of ridge"
    flag(model, "--search", some_of("C", "gamma", "lambda"), what, "off")
    output = parser.add_argument_group("output")
    flag(output, "--out", OUT, "folder for classify.json, confusion.png and classifier.safetensors", "FEATURES/classify", metavar="DIR")
    flag(output, "--pictures", bool, "draw filters.png, neighbours.png and map.png of the features, too", "off")
    flag(output, "--portable", bool, "put the support vectors into the classifier's file, which then needs no features", "off")
    flag(output, "--json", bool, "print one line of JSON instead of tables", "off")
    flag(output, "--quiet", bool, "print no header and no progress", "off")
    system = parser.add_argument_group("system")
    flag(system, "--device", one_of("auto", "cpu", "gpu"), "where the machine is trained", "auto")
    flag(system, "--jobs", count(1), "without a GPU: processes that train pairs of classes", "as many as cores and 8 GiB of memory allow")
    flag(
        system,
        "--scratch",
        paths.KEEPS,
        "without a GPU: folder for the kernel matrix; 7.5 GB for CIFAR-10",
        "the --out folder",
        metavar="DIR",
    )
    return parser


def _gamma(text: str) -> float | None:
    return None if text == "scale" else real(0, exclusive=True)(text)


_gamma.metavar = "{scale,X}"  # type: ignore[attr-defined]


def steps(text: str) -> str:
    """A converter that takes names of processing steps joined by +, or none."""
    from nbcnn.classify.processing import names_of
    from nbcnn.files.errors import UsageError

    try:
        names_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


steps.metavar = "STEPS"  # type: ignore[attr-defined]


def main(argv: list[str]) -> int:
    """Run the command with `argv`, the words after "classify"; return the exit code."""
    args = add_parser().parse_args(argv)
    return together(lambda team: run(args, team), without_gpu="--device cpu (or --device auto, which takes the CPU by itself)")


def run(args: Any, team: Team, part: Part | None = None, given: Opened | None = None) -> int:
    """Classify as `args` say, this rank of `team` its part; returns the exit code.

    `part` takes the results where this is one of several; `given` are features in memory, which args.features names for the results only.
    Rank 0 holds the folder of the results meanwhile. Raises `lock.Held` if another process writes in it.
    """
    with ExitStack() as held:
        return _run(args, team, part, given, held)


def _run(args: Any, team: Team, part: Part | None, given: Opened | None, held_folder: ExitStack) -> int:
    from nbcnn.classify import MACHINES, classifier, pipeline, report
    from nbcnn.classify.processing import parse
    from nbcnn.cli.part import Part
    from nbcnn.datasets.own import short
    from nbcnn.files import extras, lock
    from nbcnn.files.atomic import make_folder
    from nbcnn.files.errors import UsageError

    part = part or Part()
    part.phases.mark("imports")
    out = args.out or args.features / "classify"
    ridge, penalty = args.machine == "ridge", "lambda" if args.machine == "ridge" else "C"
    if wrong := [name for name in args.search or () if name not in (penalty, "gamma")]:
        raise UsageError(
            f"--search {word(wrong[0])} is of --machine {'svm' if ridge else 'ridge'}; --machine {args.machine or 'svm'} has {penalty} and gamma"
        )
    on_gpu, why = on_gpu_of(args.device or "auto")
    need_packages(args.machine or "svm", on_gpu)
    draws = extras.installed("matplotlib")
    if args.pictures:
        extras.need("matplotlib", "--pictures needs")
        extras.need("sklearn", "--pictures needs")
    team.agree({"device": str(on_gpu).encode()})
    given = given or _open(args.features, args.limit, args.kernel, verify=team.leads, beside=on_gpu)
    held, train_labels, test_labels, origin, sha256, verified = given
    mirrored = len(held[0]) > 2
    portable = held[0][::2] if args.portable else ()
    process = parse(args.process or "none", origin.code_shape)
    team.agree({"features": f"{sha256} {args.limit} {mirrored}".encode()})
    make_folder(out, "--out")
    if team.leads:
        held_folder.enter_context(lock.writing(out))
    scratch = args.scratch or out
    make_folder(scratch, "--scratch")
    if not team.leads:
        # On a GPU the pairs are solved in less time than they could be sent.
        for _ in range(0 if on_gpu or ridge else 3 if args.baselines else 1):
            settings = pipeline.Settings(args.c or 10.0)
            pipeline.assist(train_labels, len(test_labels), settings=settings, scratch=scratch, team=team, jobs=args.jobs)
        return OK
    names = origin.classes or ()
    scaling = (args.scale or ("none" if process else "standard")) == "standard"
    settings = pipeline.Settings(args.c or 10.0, args.gamma, scaling, vars(args)["lambda"] or 0.1, process)
    if not args.quiet:
        _header(args.features, origin, len(train_labels), len(test_labels), settings, on_gpu, why, scratch, ridge, mirrored)

    host = {"scratch": scratch, "jobs": args.jobs}

    def trained(load: Load, labels: np.ndarray, settings: pipeline.Settings, **more: Any) -> pipeline.Outcome:
        if ridge:
            from nbcnn.classify.ridge import classify
            from nbcnn.gpu.device import Gpu

            return classify(load, labels, settings=settings, device=Gpu() if on_gpu else None, report=more["report"])
        if on_gpu:
            from nbcnn.classify import gpu

            return gpu.classify(load, labels, settings=settings, report=more["report"])
        return pipeline.classify(load, labels, settings=settings, **host, **more)

    tried: list[dict[str, float]] = []
    if args.search:
        with _bars(args.quiet) as bars:
            settings, tried = pipeline.search(
                held[0][::2], train_labels, settings, args.search, lambda *trial: trained(*trial, report=bars("search")), penalty
            )
        if not args.quiet:
            best, chosen = max(each["accuracy"] for each in tried), getattr(settings, pipeline.PENALTIES[penalty])
            gamma = "scale" if settings.gamma is None else f"{settings.gamma:g}"
            words = f"{len(tried)} settings tried: {penalty} = {chosen:g}, gamma = {gamma}, {best:.2%} of the held-out images"
            to_stderr(f"search    {words}")

    sources: dict[str, Load] = {ENCODER: held.pop}
    if args.baselines:
        # The data set is looked for now, so that a missing one is reported at once and not after minutes.
        mode = "cpu" if args.device == "cpu" else "auto"
        layers, note = untrained_encoder(origin)
        if note and not args.quiet:
            to_stderr(f"note      {note}")
        sources |= baselines(origin, args.data_dir or data_dir_of(origin), layers, mode, train_labels, test_labels, mirrored)

    result: dict[str, Any] = {
        "dataset": origin.dataset,
        "source": origin.source,
        "classes": names,
        "run": origin.run,
        "checkpoint_sha256": origin.checkpoint_sha256,
        "features": str(args.features),
        "features_sha256": sha256,
        "process": process.name if process else None,
        "scale": "standard" if settings.scale else "none",
        "machine": "ridge" if ridge else "svm",
        "kernel": KERNELS[mirrored],
        "lambda": settings.ridge if ridge else None,
        "model": str(out / classifier.NAME),
        "confusion_matrix": str(out / "confusion.png"),
        "classifiers": {},
        "search": tried,
    }
    rows = result["classifiers"]
    tables: dict[str, str] = {}
    with _bars(args.quiet) as bars:
        for name, load in sources.items():
            # The maps of pixels are the images themselves.
            own = replace(settings, process=parse(process.name, origin.image_shape)) if process and name == PIXELS else settings
            try:
                outcome = trained(load, train_labels, own, report=bars(name), **({} if on_gpu else {"team": team}))
            finally:
                part.phases.mark("the classifier" if name == ENCODER else name)
                # Damaged features explain what may have been raised; and nothing is written that was made of them.
                result["features_sha256"] = sha256 = verified()
                part.phases.mark("hashing")
            if not args.quiet:
                for note in outcome.notes:
                    to_stderr(f"note      {name}: {note}")
            scores = report.score(outcome, train_labels, test_labels, len(names))
            rows[name], tables[name] = report.summary(outcome, scores), report.class_table(scores, names)
            if name == ENCODER:
                title = f"{short(origin.dataset)}: {MACHINES[result['machine']]} on {outcome.width:,} features"
                title += f", {scores.test:.2%} of {len(test_labels):,} test images"
                if draws:
                    from nbcnn.train.plots import confusion

                    part.behind(confusion, out / "confusion.png", scores.confusion, names, title)
                classifier.save(out / classifier.NAME, outcome, origin, args.features, sha256, *portable)
                if args.pictures:
                    result["pictures"] = _pictures(out, args.features, outcome, args.data_dir or data_dir_of(origin))
            report.save_json(out / "classify.json", result)
            part.phases.mark("results")

    lines = [f"{origin.dataset}, {len(train_labels):,} training and {len(test_labels):,} test images\n"]
    lines += [
        report.table(rows),
        "",
        tables[ENCODER],
        "",
        str(out / "classify.json"),
        str(out / "confusion.png") if draws else f"no confusion.png ({extras.missing('matplotlib')})",
        str(out / classifier.NAME),
    ]
    part.results(result, "\n".join(lines), args.json)
    return OK


def _pictures(out: Path, folder: Path, outcome: Outcome, data_dir: Path) -> dict[str, str]:
    """Draw what the encoder learned into `out`; the pictures' paths by name. Raises DataMissing if the images of the features are not found."""
    from nbcnn import datasets
    from nbcnn.classify import pictures
    from nbcnn.classify.features import read_features
    from nbcnn.nn.params import under
    from nbcnn.train import checkpoint

    features = read_features(folder, verify=False)
    origin = features.origin
    found = datasets.load(origin.dataset, data_dir=data_dir)
    same_images(origin, found.source, found.train_images, found.train_labels, features.train_labels)
    same_images(origin, found.source, found.test_images, found.test_labels, features.test_labels)
    saved = Path(origin.run) / origin.checkpoint
    weights = under("param.", checkpoint.read(saved).tensors) if saved.is_file() else {}  # without the run there are no filters to show
    return pictures.draw(out, weights, found, outcome.process, features.train, features.test, f"{origin.dataset}, {origin.model or 'encoder'}")


def _open(folder: Path, limit: int | None, kernel: str | None, verify: bool = True, beside: bool = False) -> Opened:
    """The first `limit` features in a list of one, to be taken out and freed; their labels, origin and hash; what waits until they are verified
    and gives the hash again.

    Those of the mirrored images follow if `kernel` is "mirrored", or None and the folder has them. They are verified before, or `beside` what
    is done with them.
    """
    from nbcnn.classify.features import Verification, read_features
    from nbcnn.datasets import DataMissing

    features = read_features(folder, verify=verify and not beside)
    verification = Verification(folder, features) if verify and beside else None

    def verified() -> str:
        if verification:
            verification.finish()
        return features.sha256

    if features.train_labels is None or features.test_labels is None:
        raise DataMissing(f"{folder} holds features of {brief(features.origin.dataset)}, which has no labels; --dataset digits and cifar10 have")
    train_labels, test_labels = features.train_labels[:limit], features.test_labels[:limit]
    for split, labels, least in (("training", train_labels, 2), ("test", test_labels, 1)):
        if len(set(labels.tolist())) < least:
            raise DataMissing(f"{folder} holds {len(labels)} {split} images of {len(set(labels.tolist()))} classes; at least {least} are needed")
    sets: tuple[np.ndarray, ...] = (features.train, features.test)
    if features.train_mirrored is not None and features.test_mirrored is not None and kernel != "rbf":
        sets += (features.train_mirrored, features.test_mirrored)
    elif kernel == "mirrored":
        raise DataMissing(f"{folder} has no features of mirrored images, which --kernel mirrored takes; nbcnn extract RUN --mirror stores them")
    return [tuple(each[:limit] for each in sets)], train_labels, test_labels, features.origin, features.sha256, verified


def need_packages(machine: str, on_gpu: bool) -> None:
    """Raise PackageMissing unless what trains this machine is installed."""
    from nbcnn.files import extras

    if machine == "ridge" or not on_gpu:
        extras.need("sklearn", f"--machine {machine}{'' if machine == 'ridge' else ' without a GPU'} needs")


def on_gpu_of(device: str) -> tuple[bool, str]:
    """Whether the machine is trained on a GPU, and why. Raises GpuUnavailable if `device` is "gpu" and there is none."""
    from nbcnn.gpu.device import gpu_missing, unavailable
    from nbcnn.gpu.language import SIMULATOR

    # Imported here, so that a run on the CPU does not pay for the compiler's import.
    missing = None if device == "cpu" else gpu_missing()
    if device == "gpu" and missing:
        raise unavailable(missing)
    if device == "auto":
        why = "no usable GPU here" if missing else "the simulator is no GPU" if SIMULATOR else ""
        return not why, why or "a GPU is there"
    return device == "gpu", "as asked"


def _header(
    folder: Path, origin: Origin, train: int, test: int, settings: Any, on_gpu: bool, why: str, scratch: Path, ridge: bool, mirrored: bool
) -> None:
    gamma = "scale" if settings.gamma is None else f"{settings.gamma:g}"
    scaling = " ".join([*([settings.process.name] if settings.process else []), "standardised" if settings.scale else "centred"])
    what = f"kernel ridge, lambda = {settings.ridge:g}" if ridge else f"one-against-one RBF SVM, C = {settings.C:g}"
    kernel = f"GPU ({why})" if on_gpu else f"BLAS ({why}), kept in {scratch} while it is needed"
    lines = (
        f"features  {folder} ({scaling}), from {origin.checkpoint}",
        f"data      {origin.dataset} ({origin.source}): {train:,} training, {test:,} test images, {len(origin.classes or ())} classes",
        f"model     {what}, gamma = {gamma}{', kernel: mean over mirrored images' if mirrored else ''}",
        f"kernel    {kernel}",
    )
    to_stderr("\n".join(lines))


@contextmanager
def _bars(quiet: bool) -> Iterator[Callable[[str], Report]]:
    """A function from a classifier's name to its `Report`: one progress bar after the other on stderr, if that is a terminal."""
    from tqdm import tqdm

    opened: list[Any] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def named(name: str) -> Report:
        def report(what: str, total: int) -> Callable[[int], None]:
            close()
            opened.append(tqdm(total=total, desc=f"{name}: {what}", unit_scale=True, file=sys.stderr, disable=True if quiet else None))
            return opened[-1].update

        return report

    try:
        yield named
    finally:
        close()
