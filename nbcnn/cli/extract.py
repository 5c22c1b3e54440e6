"""nbcnn extract RUN: run a trained encoder over its data set, or over your own images, and write the features."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbcnn.cli import paths
from nbcnn.cli.finite import files_of, finite, weights
from nbcnn.cli.flags import OWN_CHECKPOINT, Parser, count, flag, inference_flags, one_of, take_device
from nbcnn.cli.part import Part
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.cli.together import together
from nbcnn.files import user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import counted
from nbcnn.files.suggest import called, examples, for_shell

if TYPE_CHECKING:
    from nbcnn.classify.features import Origin
    from nbcnn.ranks.team import Team
    from nbcnn.train.checkpoint import Saved
    from nbcnn.train.runlog import RunFolder

EXAMPLES = (
    "extract runs/20260101-120000-cifar10-cudacore",
    "extract RUN --checkpoint best --out features-best",
    "extract RUN --limit 1000 --format csv --mode cpu",
    "extract RUN --mirror                          also of the mirrored images, which classify then uses, too",
    "extract RUN --images photographs --out features/mine",
)
IMAGES = paths.PathArgument("images", str, parts=paths.with_commas)
OUT = paths.PathArgument("folder", str, own=paths.FEATURES)
LINE_SECONDS = 10.0
"""Without a terminal, a progress line at most this often."""


def parser() -> Parser:
    """The parser; a flag that is not given parses as None."""
    summary = "Write the encoder's features of the run's training and test images, or of other images."
    made = Parser(called("extract"), summary, examples(EXAMPLES), "RUN")
    made.add_argument("run", metavar="RUN", type=paths.READS_TEXT, help="run folder")
    group = made.add_argument_group("data")
    flag(group, "--checkpoint", one_of("best", "last"), "whose weights; best: the lowest test loss", OWN_CHECKPOINT)
    flag(group, "--images", IMAGES, "image files or folders of them, separated by commas, instead of the data set", "the run's", metavar="PATH")
    flag(group, "--at", str, "layer whose output the features are (conv1, pool2, …)", "the code of a ready-made model", metavar="LAYER")
    flag(group, "--mirror", bool, "also store the features of the mirrored images, for the mirrored kernel of classify", "off")
    flag(group, "--data-dir", paths.DATA_TEXT, "folder with the data set's files", "the run's", metavar="DIR")
    flag(group, "--limit", count(1), "only the first N images of each split", "as many as the run took", "images")
    inference_flags(made, "the run's, where this machine has it")
    group = made.add_argument_group("output")
    flag(
        group,
        "--out",
        OUT,
        "folder for the features; features in it are replaced when the new ones are complete",
        "features/<dataset>; features/<dataset>-<run> where that holds another run's",
        metavar="DIR",
    )
    flag(group, "--format", one_of("npy", "csv"), "npy: memory-mapped arrays; csv: large and slow, but text", "npy")
    flag(group, "--json", bool, "print the summary as one line of JSON", "off")
    flag(group, "--quiet", bool, "no progress on stderr", "off")
    return made


@dataclass(frozen=True)
class Job:
    """What is extracted: `sets` of images of `data` by the encoder `net`, `batch` at a time, `width` features of each.

    `ready` says that the features are the code of a ready-made model, for which `classify` has controls.
    """

    net: Any
    data: Any
    sets: list[Any]
    batch: int
    width: int
    out: Path
    origin: Origin
    ready: bool

    def found(self, computing: float, started: float, sha256: str) -> dict[str, Any]:
        """The results, for --json. `computing` are the seconds of that, `started` is when it began."""
        return {
            "features": str(self.out),
            "dataset": self.data.name,
            "labels": self.data.classes is not None,
            "mode": self.net.mode,
            "precision": self.net.precision,
            "images": len(self.data.train_images) + len(self.data.test_images),
            "mirrored": len(self.sets) > 2,
            "width": self.width,
            "compute_seconds": computing,
            "total_seconds": time.perf_counter() - started,
            "sha256": sha256,
        }


def extract(flags: SimpleNamespace, team: Team, part: Part | None = None) -> int:
    """Write the features that the flags describe, each rank of `team` a part of the rows; returns the exit code.

    `part` takes the results where this is one of several.
    """
    run, config, saved = opened(flags, team)
    if flags.images:
        return extract_files(flags, run, config, saved, team, say_of(flags))
    job = prepared(flags, team, run, config, saved)
    from nbcnn.classify.feature_writer import publish
    from nbcnn.ranks.team import LONG

    started, computing = time.perf_counter(), 0.0
    with writers(team, job.out, job.data, job.width, flags.format or "npy", job.batch, len(job.sets)) as made:
        for writer, images in zip(made, job.sets, strict=True):
            computing += write_split(job.net, writer, images[rows_of(team, len(images), job.batch)], job.batch, flags.quiet)
        computing = -team.all_min(-computing)
        if team.leads:
            team.barrier(LONG)
            for writer, images in zip(made, job.sets, strict=True):
                writer.adopt(len(images))
            identifier = publish(job.out, job.origin, made[0], made[1], (made[2], made[3]) if flags.mirror else None)
    if team.leads:
        found = job.found(computing, started, identifier)
        (part or Part()).results(found, summary(found, baselines=job.ready), flags.json)
    return 0


def remember(flags: SimpleNamespace, held: ExitStack, part: Part, data: Any = None, files: bool = False) -> int:
    """Keep the features that the flags describe in memory, for the next part (`classify.kept.Kept`), by one process; returns the exit code.

    They are hashed beside what follows, and with `files` written, too; both is done when `held` ends. `data` is the data set, where it is in
    memory already.
    """
    from nbcnn.classify.kept import Kept, Rows
    from nbcnn.ranks.team import ALONE

    run, config, saved = opened(flags, ALONE)
    job = prepared(flags, ALONE, run, config, saved, data)
    part.phases.mark("the encoder")
    started, computing = time.perf_counter(), 0.0
    whole = sum(-(-len(images) // job.batch) for images in job.sets)
    written = held.enter_context(writers(ALONE, job.out, job.data, job.width, "npy", job.batch, len(job.sets), whole)) if files else []
    named = ("train", "test", "train, mirrored", "test, mirrored")
    rows = [
        Rows(name, len(images), job.width, writer) for name, images, writer in zip(named, job.sets, written or [None] * len(job.sets), strict=False)
    ]
    kept = held.enter_context(Kept(job.origin, (job.data.train_labels, job.data.test_labels), rows, written))
    for each, images in zip(rows, job.sets, strict=True):
        computing += write_split(job.net, each, images, job.batch, flags.quiet)
    kept.publish(job.out)
    job.net.close()
    part.phases.mark("features")
    part.results(job.found(computing, started, ""), "", True, kept)
    return 0


def say_of(flags: SimpleNamespace) -> Callable[[str], None]:
    """What says a line on stderr, unless --quiet."""

    def say(text: str) -> None:
        if text and not flags.quiet:
            to_stderr(text)

    return say


def opened(flags: SimpleNamespace, team: Team) -> tuple[RunFolder, dict[str, Any], Saved]:
    """The run that the flags name, its config.json and its checkpoint. The GPU is being opened meanwhile."""
    from nbcnn.gpu import driver

    if flags.device and team.size > 1:
        raise UsageError("--device is for one process: of several ranks each takes the GPU of its number")
    take_device(flags.device, flags.mode)
    if flags.mode != "cpu" and flags.device != "cpu":
        driver.open_ahead()  # beside the imports below
    from nbcnn.train import checkpoint
    from nbcnn.train.runlog import RunFolder

    if team.size > 1 and flags.format == "csv":
        raise UsageError("--format csv is one file of lines, written in order: several ranks cannot share it; use npy, or one process")
    if flags.mirror and (flags.format == "csv" or flags.images):
        raise UsageError("--mirror is for a run's data set, stored as npy: leave --images and --format csv out")
    flags.quiet = flags.quiet or not team.leads
    run = RunFolder(flags.run)
    config = run.read_config()
    # Read once, and hashed as it was read: a training may put a newer one in its place at any time.
    return run, config, checkpoint.read(run.checkpoint(flags.checkpoint))


def prepared(flags: SimpleNamespace, team: Team, run: RunFolder, config: dict[str, Any], saved: Saved, data: Any = None) -> Job:
    """The images that the flags name, or `data`, and the encoder, which has computed its first batch. Every rank must call it."""
    from nbcnn import datasets
    from nbcnn.cli import loading, train_run
    from nbcnn.datasets import own

    train_run.check(run, config, saved.path, saved.metadata)
    if not paths.is_text(flags.run):
        raise UsageError(
            f"{os.fsencode(flags.run)!r} is no UTF-8, as features.json is, which names the run for classify and predict --classifier: "
            "rename the run, or name a link to it"
        )
    name, data_dir, limit = config["data"]["name"], flags.data_dir or config["flags"]["data_dir"], flags.limit or config["flags"].get("limit")

    def read() -> Any:
        return data or datasets.load(name, data_dir=data_dir, limit=limit, progress=not flags.quiet)

    if team.size == 1 and data is None:
        read = loading.ahead_if_here(name, Path(data_dir), read)  # beside the imports below
    from nbcnn.classify.features import Origin, place_of
    from nbcnn.cli import describe
    from nbcnn.nn import models
    from nbcnn.plan.shapes import numel
    from nbcnn.train import saved_net

    say = say_of(flags)
    layer = saved_net.cut(config["flags"]["model"], flags.at)  # a model without a code is refused before its data is loaded
    with team.first_on_machine():
        data = read()
    net = saved_net.encoder(saved, layer, flags.mode or "auto", flags.precision, noted_precision(saved, config), data.train_images.shape[1:])

    say(describe.compiling(net))
    started = time.perf_counter()
    batch = min(flags.batch or 256, len(data.train_images))
    code = next(net.predict_batches(data.train_images[:batch], batch)).shape[1:]
    say(f"{net.mode} {net.precision} on {net.device_name}, {data.name}, {saved.path}; ready in {time.perf_counter() - started:.2f} s")

    out = Path(flags.out) if flags.out else _free(place_of(run.path, own.short(data.name)))
    same = [saved.sha256, data.source, len(data.train_images), net.mode, net.precision, str(out), layer, bool(flags.mirror)]
    team.agree(user_code.hashes() | {"checkpoint, data or mode": json.dumps(same).encode()})
    gpu = None if net.mode == "cpu" else net.device_name
    where = (data.name, data.source, data.classes, data.train_images.shape[1:], code, net.mode, gpu, net.precision)
    origin = Origin(str(run.path), saved.path.name, saved.sha256, *where, model=config["flags"]["model"], layer=flags.at)
    sets = [data.train_images, data.test_images]
    if flags.mirror:
        sets += [images[..., ::-1] for images in sets]
    ready = config["flags"]["model"] in models.CODES and flags.at in (None, models.CODES[config["flags"]["model"]])
    return Job(net, data, sets, batch, numel(code), out, origin, ready)


def _free(place: Path | None) -> Path:
    """The place for features, where there is one. Raises UsageError."""
    if place is None:
        raise UsageError(
            "the folders in features/ for this data set hold the features of other runs: --out DIR names one, whose features are replaced"
        )
    return place


def noted_precision(saved: Saved, config: dict[str, Any]) -> str | None:
    """The precision that the checkpoint, or else its run, was trained in: a run resumed by an earlier version may have changed it."""
    return saved.metadata.get("precision", config.get("precision"))


def rows_of(team: Team, images: int, batch: int) -> slice:
    """Which of so many images this rank computes: whole batches, so that an image has the same neighbours, and bits, on any number of ranks."""
    share = team.share(-(-images // batch))
    return slice(min(images, share.first * batch), min(images, (share.first + share.count) * batch))


@contextmanager
def writers(team: Team, out: Path, data: Any, width: int, storage: str, batch: int, sets: int = 2, ahead: int | None = None) -> Iterator[list[Any]]:
    """What writes this rank's part of so many `sets` of features: training, test, and of four the same of the mirrored images.

    `ahead` is that of `FeatureWriter`, None its default.

    Each set is one file; when the context closes, all ranks have written.
    Rank 0 holds the folder meanwhile. Raises `lock.Held` if another process writes in it.
    """
    from nbcnn.classify.feature_writer import AHEAD, FeaturePart, FeatureWriter
    from nbcnn.files import lock
    from nbcnn.files.atomic import make_folder
    from nbcnn.ranks.team import LONG

    splits = [("train", data.train_images, data.train_labels), ("test", data.test_images, data.test_labels)]
    kinds = [(split, len(images), None if at >= 2 else labels, at >= 2) for at, (split, images, labels) in enumerate((splits * 2)[:sets])]
    with ExitStack() as whole:
        if team.leads:
            make_folder(out, "--out")
            whole.enter_context(lock.writing(out))
            made = [
                whole.enter_context(FeatureWriter(out, split, n, width, labels=labels, storage=storage, mirrored=mirrored, ahead=ahead or AHEAD))
                for split, n, labels, mirrored in kinds
            ]
            team.broadcast(json.dumps([writer.partial.name for writer in made]).encode())
            yield made
            return
        names = json.loads(team.broadcast(b""))
        with ExitStack() as parts:
            yield [
                parts.enter_context(FeaturePart(out / name, split, rows_of(team, n, batch).start, width))
                for name, (split, n, *_) in zip(names, kinds, strict=True)
            ]
        team.barrier(LONG)


def extract_files(flags: SimpleNamespace, run: Any, config: dict[str, Any], saved: Saved, team: Team, say: Callable[[str], None]) -> int:
    """Write the features of image files: OUT/features.npy (or .csv), a row for each file of OUT/images.txt. Exit 3 if one cannot be read."""
    import io

    import numpy as np

    from nbcnn.cli import describe
    from nbcnn.cli.errors import DATA
    from nbcnn.files import atomic, lock
    from nbcnn.model import pictures
    from nbcnn.train import saved_net

    if team.size > 1:
        raise UsageError("--images is for one process: files are read one after the other")
    out = Path(flags.out or "features/images")
    if not flags.out and (out / "images.txt").exists():
        raise UsageError(f"{out} holds the features of other images: --out {for_shell(out)} replaces them, --out features/NAME keeps them")
    paths = pictures.files_in(flags.images.split(","))[: flags.limit]
    layer = saved_net.cut(config["flags"]["model"], flags.at)
    net = saved_net.encoder(saved, layer, flags.mode or "auto", flags.precision, noted_precision(saved, config))
    if len(net.input_shape) != 3:
        raise UsageError(f"{run.path} takes examples of {net.input_shape}, which are no images")
    say(describe.compiling(net))
    say(f"{net.mode} {net.precision} on {net.device_name}, {counted(len(paths), 'file')}, {saved.path}")
    problems: list[str] = []
    found, started = list(pictures.read_all(paths, net.input_shape, problems)), time.perf_counter()
    for problem in problems:
        to_stderr(f"nbcnn: error: {problem}")
    if not found:
        return DATA
    features = net.predict(np.stack([image for _, image in found]), flags.batch or 256).reshape(len(found), -1)
    finite(features, files_of([path for path, _ in found]), weights(net.precision))
    seconds = time.perf_counter() - started
    atomic.make_folder(out, "--out")
    with lock.writing(out):
        content: Any = io.BytesIO()
        if flags.format == "csv":
            np.savetxt(content, features, fmt="%.9g", delimiter=",")
        else:
            np.save(content, features)
        file = out / f"features.{flags.format or 'npy'}"
        atomic.replace_bytes(out / "images.txt", "".join(f"{path}\n" for path, _ in found).encode(errors="surrogateescape"))
        atomic.replace_bytes(file, content.getvalue())
    told = {"features": str(file), "images": len(found), "width": features.shape[1], "compute_seconds": seconds, "problems": problems}
    to_stdout(
        json.dumps(told)
        if flags.json
        else f"{counted(len(found), 'image')} × {counted(features.shape[1], 'feature')} in {file}; images.txt names the rows"
    )
    return DATA if problems else 0


def write_split(net: Any, writer: Any, images: Any, batch: int, quiet: bool | None) -> float:
    """Write the features of `images`; returns the seconds of computing, disk excluded.

    Progress goes to stderr: a bar on a terminal, a line in ten seconds elsewhere.
    """
    from tqdm import tqdm

    computing, at, told = 0.0, 0, time.perf_counter()
    first = writer.rows
    blocks = net.predict_batches(images, batch)
    with tqdm(total=len(images), desc=writer.split, unit=" images", leave=False, file=sys.stderr, disable=True if quiet else None) as bar:
        while at < len(images):
            started = time.perf_counter()
            block = finite(next(blocks), f"the images of {writer.split} from {first + at:,} on", weights(net.precision))
            computing += time.perf_counter() - started
            writer.write(first + at, block.reshape(len(block), -1))
            at += len(block)
            bar.update(len(block))
            if bar.disable and not quiet and time.perf_counter() - told > LINE_SECONDS:
                told = time.perf_counter()
                to_stderr(f"{writer.split}: {at:,} of {counted(len(images), 'image')}")
    return computing


def summary(found: dict[str, Any], baselines: bool = False) -> str:
    """What was written, how fast, and what can be done with it: with the controls where `classify` has them. Seconds exclude compiling."""
    command = called("classify", found["features"], *(["--baselines"] if baselines else []))
    images, computing, total = found["images"], found["compute_seconds"], found["total_seconds"]
    return "\n".join(
        (
            f"{found['dataset']}, {found['mode']}: {counted(images, 'image')} × {counted(found['width'], 'feature')} in {found['features']}"
            + (", and as many of the mirrored images" if found["mirrored"] else ""),
            f"{computing:.2f} s without writing to disk ({images / computing:,.0f} images/s), {total:.2f} s with it ({images / total:,.0f} images/s)",
            f"next: {command}" if found["labels"] else f"{found['dataset']} has no labels to classify by",
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Parse `argv` and extract; returns the exit code."""
    flags = parser().parse_args(argv)
    return together(lambda team: extract(flags, team))
