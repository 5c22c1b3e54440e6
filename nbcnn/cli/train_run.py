"""This module prepares a run of train.py: its folder, the checkpoint that it resumes from, and the description that it writes down."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn import __version__, datasets
from nbcnn.cli import own_model, recipes, train_flags
from nbcnn.cli.env import version
from nbcnn.datasets.arrays import seen
from nbcnn.files import document
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import for_shell
from nbcnn.nn import description
from nbcnn.nn.optim import (
    FROZEN,
    OPTIMIZERS,
    SGD,
    Constant,
    Cosine,
    Factor,
    OneCycle,
    Optimizer,
    Piecewise,
    Schedule,
    StepDecay,
    matching,
    points_of,
)
from nbcnn.nn.params import ParameterError, under
from nbcnn.nn.whitening import prepared
from nbcnn.plan.graph import named
from nbcnn.run import blas
from nbcnn.train import checkpoint, runlog
from nbcnn.train.former import FORMAT
from nbcnn.train.runlog import OWN_MODEL, RunError, RunFolder

if TYPE_CHECKING:
    from nbcnn.cli.train_data import Material

BLAS = "blas_threads"
"""Under this name a checkpoint that was trained on a CPU has the number of BLAS's threads."""
_UNSAVED = frozenset({"given", "explain", "json", "quiet", "verbose", "out", "resume", "config", "device"})


@dataclass(frozen=True)
class Start:
    """Where a run begins: its flags, its folder (None until it has a name), for a resumed run its checkpoint with its metadata, and the config.json
    of a run that goes on or starts again."""

    flags: SimpleNamespace
    folder: RunFolder | None = None
    checkpoint: Path | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def tiles(self, mode: str, precision: str, device: str) -> dict[str, Any]:
        """The tiles of the resumed checkpoint if all three are still the same, else none: choose anew. Another GPU may lack what they need."""
        same = tuple(self.notes.get(name) for name in ("mode", "precision", "device")) == (mode, precision, device)
        if not same or "tiles" not in self.notes:
            return {}
        tiles = document.parse(self.notes["tiles"], f"{self.checkpoint}: its note of tiles")
        document.fits(tiles, {str: {str: int}}, f"{self.checkpoint}: tiles")
        return dict(tiles)


def start(given: SimpleNamespace, held: ExitStack, leads: bool) -> Start:
    """Fill in the flags and check the run folder, before anything slow. The rank that leads holds a run that is there already, until `held` ends.

    Raises UsageError, CheckpointError or RunError for a run that cannot be resumed, OSError if the folder cannot be written.
    """
    if given.resume:
        if given.out:
            raise UsageError("--out and --resume exclude each other: a resumed run stays in its folder")
        return _resumed(given, held, leads)
    flags = recipes.fill(given)
    folder = RunFolder(flags.out) if flags.out else None
    if folder and folder.is_taken():
        raise _taken(folder)
    if not flags.explain:
        (folder or RunFolder("runs")).check_writable()
    return Start(flags, folder)


def _taken(folder: RunFolder) -> UsageError:
    return UsageError(f"--out {folder.path} is there already; choose a new folder, or continue that run with --resume {for_shell(folder.path)}")


def _resumed(given: SimpleNamespace, held: ExitStack, leads: bool) -> Start:
    path = Path(given.resume)
    folder = RunFolder(path.parent if path.is_file() else path)
    config = folder.read_config()
    if not given.explain:
        folder.check_writable()
        if leads:
            held.enter_context(folder.held())
            config = folder.read_config()  # read again, because the folder's last writer may have finished since
    _check_data_is_kept(folder, config)
    absent = sorted(
        vars(recipes.fill(train_flags.parse([]))).keys()
        - _UNSAVED
        - (train_flags.FREE_ON_RESUME - {"epochs"})
        - train_flags.ADDED_LATER
        - config["flags"].keys()
    )
    if absent:
        raise RunError(f"{folder.config_path} is damaged or of another version: {quoted(absent[0])} is missing in its 'flags'")
    begun = path.is_file() or folder.has_checkpoint()
    saved = path if path.is_file() else _latest(folder)
    notes = checkpoint.load(saved)[1] if begun else {}
    new_epochs = frozenset({"epochs"}) if given.epochs else frozenset()
    check(folder, config, saved, notes, free=new_epochs)
    if not begun and len(folder.rows()) > 1:
        raise RunError(f"{folder.path} has the metrics of {len(folder.rows())} epochs, but no checkpoint: they were moved away or deleted")
    resolved = {"dataset": config["data"]["name"]} | {flag: notes[flag] for flag in ("mode", "precision") if flag in notes}
    flags = train_flags.from_run(given, config["flags"], folder.path, resolved)
    return Start(flags, folder, saved if begun else None, notes, config)


def _latest(folder: RunFolder) -> Path:
    """The checkpoint that a run is continued from: the last one, or the best one where only that of the last epoch is there.

    After an epoch the best one is saved first: a process that is killed in its first epoch between the two leaves that alone.
    """
    if not folder.last.exists() and folder.best.exists():
        with suppress(checkpoint.CheckpointError):  # of which `checkpoint.load` of the last one tells
            if checkpoint.load(folder.best)[1].get("epochs_done") == str(len(folder.rows())):
                return folder.best
    return folder.last


def check(folder: RunFolder, config: Mapping[str, Any], saved: Path, notes: Mapping[str, str], free: frozenset[str] = frozenset()) -> None:
    """Raise RunError unless config.json describes a run, and that of the checkpoint `saved` with the metadata `notes`, but for the flags `free`."""
    runlog.agree(folder, config, saved, notes, free)
    _check_data_is_kept(folder, config)
    try:
        train_flags.check(config["flags"])
        if not datasets.is_known(config["data"]["name"]):
            raise ValueError(f"there is no data set {quoted(config['data']['name'])}")
    except ValueError as error:
        raise RunError(f"{folder.config_path} is no description of a run: {error}") from None


def _check_data_is_kept(folder: RunFolder, config: Mapping[str, Any]) -> None:
    if config["flags"]["model"] == OWN_MODEL:
        raise RunError(f"{folder.path} was made by Model.fit with arrays, which are not kept: go on with nbcnn.load({str(folder.path)!r}).fit(…)")


def claimed(start: Start, data: Material, mode: str, held: ExitStack) -> RunFolder:
    """The run's folder, held until `held` ends: that of the flags, or a new runs/<date-time>-<dataset>-<mode>, with a number if that is taken.

    Raises UsageError if another process has taken it since `start`.
    """
    folder = start.folder
    if folder is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{data.short}-{mode}"
        folder = next(filter(_made, (RunFolder(Path("runs") / (name + (f"-{number}" if number > 1 else ""))) for number in range(1, 1000))))
    held.enter_context(folder.held())
    if not start.config and folder.is_taken():
        raise _taken(folder)
    return folder


def _made(folder: RunFolder) -> bool:
    """Make a new folder; False if there is one already, perhaps since a moment ago."""
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        return False
    return True


def take_weights(net: Any, start: Start) -> str:
    """Give `net` the weights that --weights names; the SHA-256 of their file, empty without the flag or where a checkpoint has all of it.

    Raises CheckpointError if they do not fit, or are others than those that a run which starts again began with.
    """
    if not start.flags.weights or start.checkpoint:
        return ""
    path = Path(start.flags.weights)
    path = path if path.is_file() else RunFolder(path).checkpoint()
    saved = checkpoint.read(path)
    if start.config.get("weights_sha256", saved.sha256) != saved.sha256:
        raise checkpoint.CheckpointError(f"{path} has changed since the run that is to start again began with its weights: start a new run")
    try:
        net.params.load_dict(under("param.", saved.tensors))
    except ParameterError as error:
        own = saved.metadata.get("model")
        of = f"; it is of --model {own}" if own and own != start.flags.model else ""
        raise checkpoint.CheckpointError(f"{path} is of another network than --model {start.flags.model}{of}: {error}") from error
    return saved.sha256


def optimizer(flags: SimpleNamespace) -> Optimizer:
    """The optimizer that the flags describe. Raises UsageError for a class of the user's that is none."""
    shared = {"weight_decay": flags.weight_decay, "clip_value": flags.clip_value, "clip_norm": flags.clip_norm}
    if flags.optimizer == "sgd":
        return SGD(momentum=flags.momentum, nesterov=flags.nesterov, **shared)
    if ":" in flags.optimizer:
        return recipes.own_optimizer(flags.optimizer)(**shared)
    return OPTIMIZERS[flags.optimizer](**shared)


def no_better(flags: SimpleNamespace, data: Material, net: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """What to say of a training that taught nothing (`evaluation.no_better`); "" also of series, and of images that layers prepare."""
    from nbcnn.model.evaluation import no_better

    if data.noun != "images" or (not net.takes_classes and prepared(named(net.layers))[0]):
        return ""
    size, rate = optimizer(flags).other_rate(flags.lr)
    adam = "--optimizer adam or " if flags.optimizer == "sgd" else ""
    advice = size, f"{flags.optimizer}, lr {flags.lr:g}: try {adam}--lr {rate:g}"
    if net.takes_classes:
        return no_better(net, rows, data.labels, None, advice)
    return no_better(net, rows, data.data.train_images, data.normalisation.done if data.normalisation else seen, advice)


def schedule(flags: SimpleNamespace) -> Schedule:
    """The schedule that the flags describe."""
    given: dict[str, Any] = {"lr": flags.lr, "warmup": flags.warmup}
    if flags.schedule == "step":
        own = {"every": flags.step_epochs, "gamma": flags.gamma}
        return StepDecay(**given, **{name: value for name, value in own.items() if value is not None})
    if flags.schedule == "one-cycle":
        return OneCycle(**given, **({} if flags.rise is None else {"rise": flags.rise}))
    if flags.schedule == "piecewise":
        return Piecewise(**given, points=points_of(flags.points))
    return (Cosine if flags.schedule == "cosine" else Constant)(**given)


def rates(flags: SimpleNamespace, images: int) -> np.ndarray:
    """The learning rate of every training step of the run, float32, for a training set of so many images or windows."""
    per_epoch = -(-images // (flags.batch * flags.accumulate))
    return schedule(flags).rates(flags.epochs * per_epoch, per_epoch)


def identity(flags: SimpleNamespace, data: Material, row: Any) -> dict[str, str]:
    """The strings that identify this run in its checkpoints; a resumed run must agree in all of them."""
    free = _UNSAVED | train_flags.FREE_ON_RESUME | train_flags.RESOLVED
    free |= {name for name in train_flags.UNBOUND_BY_DEFAULT if getattr(flags, name) == recipes.DEFAULTS[name]}
    return {
        "format": FORMAT,
        "model": flags.model,
        "data": f"{data.name}, {data.checksum}",
        "labels and test data": f"CRC-32 {data.others:08x}",
        "batch": str(flags.batch),
        "optimizer": flags.optimizer,
        "mode": row.mode,
        "precision": row.precision,
        "flags": json.dumps({name: value for name, value in sorted(vars(flags).items()) if name not in free}),
        **({"layers": own_model.digest(data.layers)} if own_model.is_own(flags.model) else {}),
    }


def factors(flags: SimpleNamespace, net: Any) -> dict[str, Factor]:
    """The parameters that --freeze leaves as they are. Raises UsageError for a pattern that matches none."""
    patterns = [word.strip() for word in (flags.freeze or "").split(",") if word.strip()]
    return {name: FROZEN for pattern in patterns for name in matching(pattern, net.params.layout.names)}


def notes(net: Any, session: Any, data: Material) -> dict[str, str]:
    """The strings that tell, in the run's checkpoints, how it was computed and of which network the weights are."""
    about = {"precision": net.precision, "classes": list(data.classes) if data.classes else None}
    network = {"normalisation": net.normalisation.text()} if net.normalisation else {}
    with suppress(TypeError):  # custom layers whose fields are no JSON: the weights are kept all the same
        network[description.KEY] = description.dumps(net.layers, net.input_shape, **about)
    on_cpu = {BLAS: str(blas.threads())} if net.mode == "cpu" else {}
    return {
        "device": net.device_name,
        "tiles": json.dumps(session.tiles()),
        "compilers": json.dumps(compilers()),
        "nbcnn": __version__,
        **on_cpu,
        **network,
    }


def compilers() -> list[dict[str, str]]:
    """The versions that compiled the kernels which are loaded, one entry where all have the same; nothing on a CPU. Equal versions, GPUs and
    tiles give equal bits."""
    from nbcnn.gpu.kernel_store import compilers_used

    return compilers_used()


def other_compilers(start: Start, device: str) -> list[str]:
    """What to say of a resumed run whose kernels were compiled by other versions than these on the same device: mostly nothing."""
    if start.notes.get("device") != device or "compilers" not in start.notes:
        return []
    before = document.parse(start.notes["compilers"], f"{start.checkpoint}: its note of compilers")
    document.fits(before, [{str: str}], f"{start.checkpoint}: compilers")
    now = compilers()
    if before == now:
        return []
    was, here = (sorted({f"{package} {version}" for each in all_of for package, version in each.items()}) for all_of in (before, now))
    gone, new = (", ".join(item for item in one if item not in other) or "the same" for one, other in ((was, here), (here, was)))
    return [f"{start.checkpoint} was trained with kernels compiled by {gone}, these are compiled by {new}: the last bits may differ"]


def other_threads(start: Start, mode: str) -> list[str]:
    """What to say of a resumed run on a CPU whose products were summed by another number of threads: mostly nothing."""
    before, now = start.notes.get(BLAS), str(blas.threads()) if mode == "cpu" else None
    if before is None or now is None or before == now:
        return []
    words = f"{start.checkpoint} was trained with {quoted(before)} threads of BLAS, here it has {now}: the last bits may differ"
    return [words + (f"; OPENBLAS_NUM_THREADS={before} has them again" if before.isdecimal() else "")]


def config(flags: SimpleNamespace, data: Material, net: Any, session: Any, weights: str) -> dict[str, Any]:
    """The content of config.json: every flag, the data, how it runs, and all versions."""
    return {
        "flags": {name: value for name, value in vars(flags).items() if name not in _UNSAVED},
        "data": {
            "name": data.name,
            "source": data.source,
            f"training_{data.noun}": data.count,
            f"{data.test_noun.replace(' ', '_')}": data.test_count,
            "shape" if data.noun == "windows" else "image_shape": list(data.shape),
        },
        "format": FORMAT,
        "mode": net.mode,
        "precision": net.precision,
        "device": net.device_name,
        **({"weights_sha256": weights} if weights else {}),
        **({"normalisation": json.loads(net.normalisation.text())} if net.normalisation else {}),
        **({"classes": list(data.classes)} if data.classes else {}),
        "ranks": session.team.size,
        "parameters": net.params.count,
        "planned_bytes": session.planned_bytes,
        "tiles": session.tiles(),
        "compilers": compilers(),
        "versions": {"nbcnn": __version__, "python": platform.python_version()} | {name: version(name) for name in ("numpy", "numba", "numba-cuda")},
        "command": sys.argv,
    }


def record_memory(run: RunFolder, net: Any) -> None:
    """Add the bytes of memory that the run took to its config.json, beside the planned ones."""
    run.amend_config(lambda config: config | {"used_bytes": net.device.used_bytes()})
