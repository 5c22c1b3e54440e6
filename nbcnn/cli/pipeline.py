"""nbcnn pipeline: train, extract and classify in one process and one folder; started again, it continues.

Features go from the encoder to the kernel matrix in memory. Pictures are drawn, and files hashed and written, beside the parts that follow.
Several ranks share their features through the files instead.

`pipeline.json` in the folder says how the pipeline was begun, which checkpoint ended its training, and at the end all results.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbcnn.cli import paths
from nbcnn.cli.classify import need_packages, on_gpu_of, steps
from nbcnn.cli.errors import DIVERGED, OK, USAGE, exit_code
from nbcnn.cli.flags import Parser, flag, one_of, some_of
from nbcnn.cli.part import Behind, Handed
from nbcnn.cli.phases import Phases
from nbcnn.cli.pipeline_job import INDEX, Job, classify_words, extract_words, read, settings, train_words
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.cli.together import together
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, quoted, word
from nbcnn.files.suggest import called, examples

if TYPE_CHECKING:
    from nbcnn.classify.kept import Opened
    from nbcnn.ranks.team import Team

STARTED = time.perf_counter()
SUMMARY = "Train, extract the features, and classify them, in one process and one folder. Run it again with the same --out to continue."
EXAMPLES = (
    "pipeline --dataset digits --limit 512 --epochs 3     a few minutes on a CPU, no internet",
    "pipeline --dataset cifar10 --mode tensorcore --out cifar",
    "pipeline --config run.toml --out mine --keep-features",
    "pipeline --dataset cifar10 --out cifar --mirror --baselines",
    "pipeline --resume cifar                             goes on where it ended",
    "launch --nproc 4 pipeline --dataset cifar10         four GPUs train and extract, the first one classifies",
)
OUT = paths.PathArgument("folder", own=paths.PIPELINE, recorded=True)
SHARED_WORK = (
    "pipeline: all ranks train and extract together; rank 0 alone writes the files and, where there is a GPU, trains the classifier "
    "(without one all ranks solve its pairs of classes)"
)


def parser() -> Parser:
    """The parser of this command's own flags; all others are those of train."""
    made = Parser(called("pipeline"), SUMMARY, examples(EXAMPLES), "[flags of train]")
    group = made.add_argument_group("features")
    flag(group, "--at", str, "layer whose output the features are (conv1, pool2, …)", "the code of a ready-made model", metavar="LAYER")
    flag(group, "--mirror", bool, "also use the features of the mirrored images: the kernel is then averaged over both", "off")
    flag(group, "--keep-features", bool, "write the features' files, too, as extract does; several ranks always do", "off")
    group = made.add_argument_group("classifier")
    flag(group, "--baselines", bool, "also classify raw pixels and the code of an untrained encoder", "off")
    flag(group, "--machine", one_of("svm", "ridge"), "svm: exact, one-against-one; ridge: least squares, one matrix", "svm")
    what = "tune these on a tenth of the training images, never on test images: gamma, C of svm, lambda of ridge"
    flag(group, "--search", some_of("C", "gamma", "lambda"), what, "off")
    flag(group, "--process", steps, "steps before the kernel, as in nbcnn classify: blur+sqrt+cw1+l2", "none")
    flag(group, "--portable", bool, "put the support vectors into the classifier's file, which then needs no features", "off")
    group = made.add_argument_group("output")
    what = "folder, with run/, features/ and features/classify/ in it; a pipeline that was begun there continues"
    flag(group, "--out", OUT, what, "pipelines/<date-time>", metavar="DIR")
    flag(
        group,
        "--resume",
        paths.recorded(paths.AMENDS),
        "continue the pipeline in this folder, with the flags that it was begun with",
        "a new one",
        metavar="DIR",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the three; ends with the exit code of the first that fails. Several ranks (`nbcnn launch`) run each of them together."""
    words = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    if unwritable := [word for word in words if not paths.is_text(word)]:
        made.error(f"{os.fsencode(unwritable[0])!r} is no UTF-8, and pipeline.json has the words of the command: name it otherwise")
    own, rest = made.parse_known_args(words)
    from nbcnn.cli import train_flags

    begun: list[str] = []
    if own.resume:
        if own.out:
            made.error("--out and --resume exclude each other: a resumed pipeline stays in its folder")
        try:
            begun = read(own.resume)["words"]
        except (OSError, ValueError) as error:
            to_stderr(f"nbcnn: error: {own.resume} holds no pipeline to resume ({brief(error)})")
            return getattr(error, "exit_code", 3)
        own, rest = made.parse_known_args([*begun, *words])
    given = train_flags.parse(rest)  # a mistake ends it here, in train's words
    made.check_paths((made, own), (train_flags.parser(), given))
    if given.explain:
        made.error("--explain is of train alone: give it to that")
    if begun:
        words = [*begun, *_without(words, "--resume")]
    job = Job(own, rest, given, _without(words, "--out"), own.resume or own.out or Path("pipelines") / time.strftime("%Y%m%d-%H%M%S"))
    return together(lambda team: _parts(team, job))


def _without(words: list[str], name: str) -> list[str]:
    """The words of a command line without a flag and its value."""
    left, at = [], 0
    while at < len(words):
        if words[at] == name:
            at += 2
            continue
        if not words[at].startswith(f"{name}="):
            left.append(words[at])
        at += 1
    return left


def _parts(team: Team, job: Job) -> int:
    """The three commands as the same team of ranks; the exit code of the first that fails."""
    # Each rank has its own clock: rank 0's names the folder. And rank 0 alone looks what is there.
    job.out = Path(team.broadcast(os.fsencode(job.out)).decode(errors="surrogateescape"))
    if team.leads and (job.out / INDEX).is_file():
        job.begun = read(job.out)
    job.begun = json.loads(team.broadcast(json.dumps(job.begun).encode()))
    job.leads, job.kept = team.leads, team.size > 1 or bool(job.own.keep_features)
    if team.size > 1 and team.leads and not job.quiet:
        to_stderr(SHARED_WORK)
    with _continues(job, team), job.held, ExitStack() as held, Behind() as behind:
        if team.leads and job.begun:
            job.claim()
        if team.size > 1:
            return _through_files(team, job, held)
        return _in_memory(team, job, held, behind)


@contextmanager
def _continues(job: Job, team: Team) -> Iterator[None]:
    """Within, what ends the pipeline before its end is followed by the command that continues it."""
    try:
        yield
    except BaseException as error:
        if team.leads and job.begun and not job.quiet and exit_code(error) not in (USAGE, DIVERGED):
            to_stderr(f"nbcnn: the pipeline has not ended; continue with\n  {job.command()}")
        raise


def _refuse(job: Job) -> None:
    """Raise UsageError for flags, and PackageMissing for a package, of which a later part would say so."""
    from nbcnn.cli import recipes
    from nbcnn.nn import models
    from nbcnn.train.saved_net import cut

    model = recipes.fill(SimpleNamespace(**vars(job.given))).model
    layer = cut(model, job.own.at)
    if job.own.baselines and layer != models.CODES.get(model):
        raise UsageError(f"--baselines are of the code of a ready-made model; layer {quoted(layer)} of {model} is none")
    machine = job.own.machine or "svm"
    penalty = {"svm": "C", "ridge": "lambda"}[machine]
    if wrong := [name for name in job.own.search or () if name not in (penalty, "gamma")]:
        raise UsageError(f"--search {word(wrong[0])} is not of --machine {machine}, which has {penalty} and gamma")
    need_packages(machine, on_gpu_of("cpu" if job.on_cpu else "auto")[0])


def _accepted(job: Job, data: Any) -> None:
    """The training is about to begin on `data`: refuse what could not be finished, and write down what was begun."""
    from nbcnn.datasets import DataMissing

    _refuse(job)
    if getattr(data.data, "classes", None) is None:
        words = f"{data.name} has no labels, so there would be nothing to classify by"
        raise DataMissing(f"{words}; --dataset digits and cifar10 have some, and train and extract need none")
    if job.leads:
        job.keep()


def _finished(job: Job, held: ExitStack, leads: bool) -> bool:
    """The training has ended and its checkpoint is the one that ended it. Raises UsageError for flags that are not those of the run."""
    from nbcnn.cli import train_flags, train_run
    from nbcnn.train import checkpoint
    from nbcnn.train.runlog import RunFolder

    run = RunFolder(job.run)
    if "checkpoint_sha256" not in job.begun or not run.last.is_file():
        return False
    start = train_run.start(train_flags.parse(train_words(job)), held, leads)
    ended = start.flags.epochs == start.config["flags"]["epochs"] and checkpoint.read(run.last).sha256 == job.begun["checkpoint_sha256"]
    if not ended:
        held.close()  # the training holds the folder itself
    return ended


def _train(team: Team, job: Job, held: ExitStack, part: Handed) -> int:
    """The training, if it has not ended before; its exit code."""
    from nbcnn.cli import train, train_flags
    from nbcnn.train import checkpoint
    from nbcnn.train.runlog import RunFolder

    if _finished(job, held, team.leads):
        part.found = dict(job.begun.get("train", {}))
        _refuse(job)
        part.phases.mark("nothing to train")
        _say(job, f"1 of 3: {job.run} is trained already")
        return OK
    _say(job, "1 of 3: training")
    code = train.train(train_flags.parse(train_words(job)), team, held, part)
    if team.leads and not code:
        job.begun.pop("report", None)
        job.keep(checkpoint_sha256=checkpoint.read(RunFolder(job.run).last).sha256, train=part.found)
    return code


def _compile_ahead(job: Job, compiling: Behind, net: Any, data: Any, compiled: int) -> None:
    """Compile what the next parts launch beside the training, where the training itself had to compile: the store has next to nothing then.

    The kernels are those that these parts would compile, so no bit changes.
    """
    if net.mode == "cpu" or not compiled:
        return

    def compile_all() -> None:
        from nbcnn.classify import ahead
        from nbcnn.cli.ready_models import extracting
        from nbcnn.gpu import compile_pool
        from nbcnn.lab.measure.plans import Absent
        from nbcnn.nn import models
        from nbcnn.run.net import Net
        from nbcnn.run.rows import Choice
        from nbcnn.train.saved_net import cut

        model = recipes.fill(SimpleNamespace(**vars(job.given))).model
        # Planned for this GPU, in host memory that is never touched.
        place = Absent(net.device.target)
        layers = models.encoder(data.layers, cut(model, job.own.at))
        encoder = Net(layers, data.shape, choice=Choice(net.row, net.why), device=place, normalisation=net.normalisation)
        launches = list(extracting(encoder, len(data.train), len(data.test), data.train.dtype.name))
        classes = np.bincount(data.labels).tolist()
        launches += ahead.launches(place.capability, classes, mirrored=bool(job.own.mirror), ridge=job.own.machine == "ridge")
        with suppress(Exception):  # what does not compile fails again where it is needed, and has a place there
            compile_pool.compile_all(launches)

    import numpy as np

    from nbcnn.cli import recipes

    compiling.do(compile_all)


def _in_memory(team: Team, job: Job, held: ExitStack, behind: Behind) -> int:
    """The parts in this process: features stay in memory, and files are written beside what follows."""
    from nbcnn.cli import classify, extract

    parts, compiling = {"train": Handed(behind, Phases(STARTED))}, Behind()
    parts["train"].check, parts["train"].ready = partial(_accepted, job), partial(_compile_ahead, job, compiling)
    if code := _train(team, job, held, parts["train"]):
        return _ended_early(job, parts, behind, code)
    gc.collect()  # the memory of the training goes before that of the features is planned
    compiling.wait()
    parts["train"].phases.mark("waiting for kernels")
    if (report := job.begun.get("report")) and report["settings"] == settings(job):
        _tell(job, report)
        return OK
    parts["features"] = Handed(behind, Phases(time.perf_counter(), whole=False))
    given = _there(job, parts["features"])
    if given is None:
        _say(job, "2 of 3: features")
        flags = extract.parser().parse_args(extract_words(job))
        extract.remember(flags, held, parts["features"], parts["train"].kept, job.kept)
        given = parts["features"].kept.opened()
        gc.collect()
    parts["train"].kept = None
    _say(job, "3 of 3: classifier")
    parts["classify"] = Handed(behind, Phases(time.perf_counter(), whole=False))
    classify.run(classify.add_parser().parse_args(classify_words(job)), team, parts["classify"], given)
    parts["features"].found["sha256"] = parts["classify"].found["features_sha256"]
    behind.wait()
    parts["classify"].phases.mark("pictures")
    _finish(job, parts)
    return OK


def _through_files(team: Team, job: Job, held: ExitStack) -> int:
    """The parts of several ranks, which share the features through their files."""
    from nbcnn.cli import classify, extract
    from nbcnn.ranks.team import LONG

    at_once = Behind()
    parts = {"train": Handed(at_once, Phases(STARTED))}
    parts["train"].check = partial(_accepted, job)
    if code := _train(team, job, held, parts["train"]):
        return _ended_early(job, parts, at_once, code) if team.leads else code
    at_once.wait()
    # What the next part reads is there when rank 0 comes here.
    team.barrier(LONG)
    parts["train"].kept = None
    parts["features"] = Handed(at_once, Phases(time.perf_counter(), whole=False))
    there = team.leads and _there(job, parts["features"]) is not None
    if not json.loads(team.broadcast(json.dumps(there).encode(), LONG)):
        _say(job, "2 of 3: features")
        extract.extract(extract.parser().parse_args(extract_words(job)), team, parts["features"])
    parts["features"].phases.mark("features")
    team.barrier(LONG)
    _say(job, "3 of 3: classifier")
    parts["classify"] = Handed(at_once, Phases(time.perf_counter(), whole=False))
    code = classify.run(classify.add_parser().parse_args(classify_words(job)), team, parts["classify"])
    at_once.wait()
    team.barrier(LONG)
    if team.leads:
        _finish(job, parts)
    return code


def _there(job: Job, part: Handed) -> Opened | None:
    """The features that are in the folder already, if they are those of this checkpoint and these flags and every byte of them is as it was."""
    from nbcnn.classify import kept
    from nbcnn.classify.features import INDEX as FEATURES
    from nbcnn.classify.features import read_features
    from nbcnn.datasets import DataError
    from nbcnn.files import lock

    if not (job.features / FEATURES).is_file():
        return None
    with lock.writing(job.features):
        pass  # which removes what an extraction left that was killed when all was written
    try:
        found = read_features(job.features, verify=False)
        origin, mirrored = found.origin, found.train_mirrored is not None
        wanted = (job.begun["checkpoint_sha256"], job.own.at, bool(job.own.mirror))
        if (origin.checkpoint_sha256, origin.layer, mirrored) != wanted or found.train_labels is None:
            return None
        found = read_features(job.features)
    except DataError as error:
        to_stderr(f"nbcnn: warning: {error}: they are extracted again")
        return None
    part.phases.mark("hashing")
    _say(job, f"2 of 3: the features in {job.features} are those of this checkpoint")
    images, width = len(found.train) + len(found.test), found.train.shape[1]
    part.found = {"features": str(job.features), "images": images, "mirrored": mirrored, "width": width, "precision": origin.precision}
    job.kept = True
    return kept.opened(found)


# -- what is said


def _say(job: Job, text: str) -> None:
    if job.leads and not job.quiet:
        to_stderr(text)


def _report(job: Job, parts: dict[str, Handed]) -> dict[str, Any]:
    seconds = {name: round(part.phases.total, 3) for name, part in parts.items()}
    seconds["total"] = round(sum(seconds.values()), 3)
    return {"pipeline": str(job.out), **{name: part.found for name, part in parts.items()}, "seconds": seconds}


def _finish(job: Job, parts: dict[str, Handed]) -> None:
    """Write the results down, and tell them."""
    report = _report(job, parts) | {"settings": settings(job), "text": parts["classify"].text, "kept": job.kept}
    job.keep(report=report)
    if job.given.verbose and not job.quiet:
        to_stderr(_times(parts))
    _tell(job, report)


def _times(parts: dict[str, Handed]) -> str:
    """Where the time of each part went."""
    return "\n".join(["where the time went", *(part.phases.text(name) for name, part in parts.items())])


def _tell(job: Job, report: dict[str, Any]) -> None:
    """Print the one report of all parts."""
    if job.given.json:
        to_stdout(json.dumps({name: value for name, value in report.items() if name not in ("settings", "text", "kept")}))
        return
    train, features, seconds = report["train"], report["features"], report["seconds"]
    lines = []
    if train.get("test_loss") is not None:
        lines.append(
            f"trained   {train['dataset']}, {train['mode']} {train['precision']}: {train['epochs']} epochs, "
            f"test loss {train['test_loss']:.5f}, in {job.run} ({seconds['train']:.1f} s)"
        )
    mirrored = ", and as many of the mirrored images" if features["mirrored"] else ""
    where = f", in {job.features}" if report["kept"] else ", not kept on disk"
    lines.append(f"features  {features['images']:,} images × {features['width']:,}{mirrored}{where} ({seconds['features']:.1f} s)")
    lines += ["", report["text"], "", f"{job.out / INDEX}: all results; {seconds['total']:.1f} s in all"]
    if not report["kept"] and not job.own.portable:
        extracted = called("extract", job.run, "--out", job.features, *job.named("at", "mirror"))
        lines.append(f"the classifier reads its support vectors from the features; to write those: {extracted}")
    lines.append(f"next: {called('report', job.run, '--features', job.features)}")
    to_stdout("\n".join(lines))


def _ended_early(job: Job, parts: dict[str, Handed], behind: Behind, code: int) -> int:
    """Tell of a training that was interrupted."""
    behind.wait()
    if job.given.json:
        to_stdout(json.dumps(_report(job, parts)))
    else:
        to_stdout(f"stopped at training step {parts['train'].found.get('step', 0):,} and saved; continue with\n  {job.command()}")
    return code
