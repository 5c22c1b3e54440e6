"""This module defines the flags of train.py and those that a resumed run takes over; `recipes.py` has their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths, settings, train_loss
from nbcnn.cli.flags import ENGINES, MODES, OWN_PRECISION, Parser, count, device, flag, one_of, real
from nbcnn.cli.recipes import (
    ALL,
    BASE,
    DECOUPLED_DECAY,
    DEFAULTS,
    OF_SCHEDULE,
    ON_CPU,
    RECIPES,
)
from nbcnn.files import user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, quoted
from nbcnn.files.suggest import called, for_shell
from nbcnn.plan.names import DWCONV, MODELS, PRECISIONS

EXAMPLES = (
    "                                              the fastest mode here; CIFAR-10 if it can be had",
    "--dataset digits                              under a minute on a CPU, no internet",
    "--model mnist-cnn --dataset mnist             a classifier: accuracy, confusion matrix, mistakes",
    "--model resnet18 --dataset cifar10            the strongest classifier of small colour images, 16 epochs",
    "--model unet --dataset shapes                 the class of every pixel, learned from masks",
    "--model my_model.py:layers --config run.toml  a custom network, settings from a file",
    "--mode cudacore --batch 256 --explain         the plan as a table, without training",
)

FREE_ON_RESUME = frozenset(
    {
        "epochs",
        "data_dir",
        "strict",
        "nvtx",
        "log_every",
        "save_every",
        "json",
        "quiet",
        "verbose",
        "explain",
        "resume",
        "resident",
        "recompute",
        "patience",
        "callback",
        "device",
        "config",
    }
)
"""Flags that a resumed run may set anew: where it ends, where its data lie (their content must be the same), what it says and checks, and what memory
it takes (`recompute` can be set, not taken back)."""

UNBOUND_BY_DEFAULT = frozenset(
    {
        *("size", "test_share", "augment", "normalise", "freeze", "whiten", "noise", "mask", "sparse"),
        *("huber_delta", "label_smoothing", "class_weights", "ignore_index", "nesterov", *OF_SCHEDULE, "accumulate", "ema"),
    }
)
"""Flags that earlier versions did not have, and that a run's identity names only where they are set: its older checkpoints stay its own."""

RESOLVED = frozenset({"dataset", "mode", "precision"})
"""Flags that may leave to the machine what a resumed run must then keep: its checkpoint knows what was taken."""

ADDED_LATER = frozenset({"weights", "resident", "recompute", "patience", "callback", "device", *UNBOUND_BY_DEFAULT})
"""Flags that earlier versions did not have; their runs resume with the default."""

FILES = paths.PathArgument("images", str, recorded=True, parts=paths.of_dataset)
"""The path of the user's images or arrays, in --dataset."""
FUNCTION = paths.PathArgument("reads", str, recorded=True, parts=paths.of_function)
"""The files of functions, in --model and --augment."""
OUT = paths.PathArgument("folder", str, own=paths.RUN)
"""A run's folder, of which `train_run.start` says that it is taken."""


def own_or(*names: str, form: str, several: bool = False, path: paths.PathArgument = FUNCTION) -> Callable[[str], str]:
    """A converter to one of `names`, or to what a file of the user's defines, FILE.py:NAME; the file is run when the training starts.

    form     what an error says of a file without a name, such as "a custom network is FILE.py:FUNCTION".
    several  whether commas may separate several.
    path     what becomes of the file's path.
    """
    choose = one_of(*names, form.rpartition(" ")[2])

    def convert(text: str) -> str:
        for part in text.split(",") if several else [text]:
            try:
                own = user_code.names_function(part, form, only=not names)
            except UsageError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
            if not own:
                choose(part)
        return str(path(text))

    convert.path = path  # type: ignore[attr-defined]
    convert.metavar = choose.metavar if names else form.rpartition(" ")[2]  # type: ignore[attr-defined]
    return convert


def parser() -> Parser:
    """The parser of train.py; a flag that is not given parses as None."""
    examples = [f"{called('train')} {example}" for example in EXAMPLES]
    made = Parser(called("train"), "Train a convolutional network on this machine's GPU, or on its CPU.", examples)
    base = BASE

    group = made.add_argument_group("data")
    flag(
        group,
        "--dataset",
        dataset,
        "data set; auto: CIFAR-10 if it is there or can be had quickly, else digits; energy for s4convd; folder:PATH for your own images, "
        "one subfolder per class; npz:PATH for arrays; FILE.py:FUNCTION for what a function returns",
        "auto",
    )
    flag(group, "--size", size, "scale the images of folder:PATH to this many pixels: 64, or 48x64 (rows×columns)", "as they are", metavar="N")
    flag(group, "--test-share", real(0, below=1, exclusive=True), "part of the images set aside for tests, where there is no test/", 0.1)
    flag(group, "--data-dir", paths.recorded(paths.DATA_TEXT), "folder with the data set's files; downloads go there", "data", metavar="DIR")
    flag(group, "--limit", limit, "use only the first N images of each split", f"all; on a CPU {ON_CPU['limit']:,}", "images")
    flag(group, "--flip", bool, "mirror each training image with probability 1/2", "off")
    flag(
        group,
        "--augment",
        augment,
        "change training images at random: flip, flip:alternate, crop:4 (shift up to 4 pixels), cutout:8, your own class of nbcnn.augmentation, "
        "FILE.py:NAME",
        "off",
    )
    flag(
        group, "--normalise", bool, "subtract each channel's mean and divide by its standard deviation, both of the training images", "divide by 255"
    )
    flag(
        group,
        "--whiten",
        bool,
        "whiten the images, by a convolution fitted to the training images; an autoencoder then reconstructs the whitened ones",
        "off",
    )
    flag(group, "--noise", real(0), "in training add Gaussian noise of this standard deviation to the network's input; the target stays clean", "off")
    flag(group, "--mask", real(0, below=1), "in training mask this share of the squares of 4×4 pixels; the target stays whole", "off")
    flag(
        group,
        "--resident",
        one_of("auto", "yes", "no"),
        "keep images in the GPU's memory; no: stream them from the host, with the same results; auto: keep them if they fit",
        "auto",
    )

    group = made.add_argument_group("model")
    flag(
        group,
        "--model",
        own_or(*MODELS, form="a custom network is FILE.py:FUNCTION"),
        "network; small-autoencoder: 32 and 4 channels inside, not 256 and 128; "
        "mnist-cnn classifies, with EvoNorm-S0 or B0; resnet18 and mobilenet classify small colour images; unet finds the class of every pixel of "
        "images with masks (shapes, folder:PATH), and denoises others; patches and patches2: dictionaries of patches, fitted by k-means in "
        "one pass instead of being trained; s4convd forecasts; or a custom one: file.py:function, package.module:function",
        "autoencoder, on a CPU small-autoencoder; s4convd for energy",
    )
    flag(group, "--width", count(1), "channels inside s4convd", DEFAULTS["width"])
    flag(group, "--blocks", count(1), "blocks of s4convd", DEFAULTS["blocks"])
    flag(
        group,
        "--loss",
        one_of(*train_loss.OF_SERIES, *train_loss.OF_IMAGES),
        "what is minimised; log-mse and rmsle: for s4convd; cross-entropy: for networks that classify; mse, l1, huber, bce: for networks that make "
        "images",
        f"{DEFAULTS['loss']} of s4convd, else the network's own",
    )
    flag(group, "--huber-delta", real(0, exclusive=True), "difference from which --loss huber is linear", 1)
    flag(group, "--label-smoothing", real(0, below=1), "cross-entropy: share of each label spread over all classes", 0)
    flag(group, "--class-weights", class_weights, "cross-entropy: weight of each class, separated by commas", "1 each")
    flag(group, "--ignore-index", count(-(2**31) + 1, 2**31), "cross-entropy: label to leave out of the loss", "none")
    flag(group, "--kernel-init", one_of("s4d-lin", "repo"), "initial filters of s4convd; repo: one frequency for all states", DEFAULTS["kernel_init"])
    inits = "initial weights; torch: U(±1/√fan_in), he: N(0, 2/fan_in); kmeans: atoms of the images' patches, layer by layer, the decoder as torch"
    flag(group, "--init", one_of("torch", "he", "kmeans"), inits, base["init"])
    flag(
        group,
        "--weights",
        paths.recorded(paths.READS_TEXT),
        "start from the weights of this run, or of this checkpoint of a run, of the same network",
        "--init",
        metavar="RUN",
    )
    flag(group, "--freeze", str, "do not train these parameters: conv1, conv*, *.bias; separate several with commas", "none", metavar="PATTERN")
    flag(group, "--sparse", count(1), "keep only the N largest channels of each pixel's code for the decoder", "all", "channels")
    flag(group, "--seed", count(0, 2**63), "seed of the initial weights, the order of images, and flips", 0)

    group = made.add_argument_group("optimisation")
    flag(
        group,
        "--recipe",
        one_of(*RECIPES),
        "set of defaults; plain: another name of the default, minimises reconstruction error; features: features for classification, from whitened "
        "images, a k-means start, then k-sparse denoising, batch 256, adam, 23 epochs; small: batch 16, adam, lr 0.003, 10 epochs; per-image: batch "
        "1, lr 0.001, He init, clip-value 5, 20 epochs; "
        "classifier: batch 128, adam, He init, 10 epochs; resnet: crops and flips of normalised images, batch 512, sgd with Nesterov's momentum, "
        "one-cycle to lr 0.4, weight-decay 0.0005, label-smoothing 0.1, 16 epochs; unet: batch 32, adam, He init, 15 epochs",
        "that of the model: small for small-autoencoder, classifier for mnist-cnn, resnet for resnet18 and mobilenet, unet for unet, else default",
    )
    flag(
        group,
        "--epochs",
        count(1),
        "passes over the training images",
        f"{base['epochs']}; on a CPU {RECIPES['small']['epochs']} of {ON_CPU['limit']:,} images",
    )
    flag(group, "--batch", count(1), "images per training step, of all ranks together", base["batch"], "images")
    flag(
        group,
        "--sync-stats",
        bool,
        "several ranks: statistics of a batch (BatchNorm2d, EvoNormB0) over all of them, not over each rank's part",
        "off",
    )
    flag(
        group,
        "--patience",
        count(1),
        "end when the test loss has not fallen for N epochs; predict, evaluate, extract, export and --weights then take the best epoch's weights",
        "off",
        "epochs",
    )
    flag(
        group,
        "--callback",
        own_or(form="a custom callback is FILE.py:NAME", several=True),
        "report losses and epochs to these subclasses of nbcnn.Callback; separate several with commas",
        "none",
    )
    flag(
        group,
        "--accumulate",
        count(1),
        "sum the gradients of N batches before one update: N × the effective batch at the memory cost of one",
        1,
        "batches",
    )
    flag(group, "--recompute", bool, "recompute outputs of norms in the backward pass instead of keeping them: less memory, the same bits", "off")
    flag(group, "--ema", real(0, below=1), "evaluate and save an exponential moving average of the weights with this decay, such as 0.999; 0: off", 0)
    flag(
        group,
        "--optimizer",
        own_or("sgd", "adam", "adamw", form="a custom optimizer is FILE.py:NAME"),
        "update rule: sgd, adam, adamw (adam with decoupled weight decay), or your own class of nbcnn.optimizer, FILE.py:NAME",
        base["optimizer"],
    )
    flag(group, "--lr", real(0, exclusive=True), "peak learning rate", "0.1 for sgd, 0.001 for adam and adamw")
    flag(group, "--momentum", real(0, below=1), "momentum of sgd", base["momentum"])
    flag(group, "--nesterov", bool, "Nesterov's momentum", "off")
    flag(
        group,
        "--schedule",
        one_of("cosine", "constant", "step", "one-cycle", "piecewise"),
        "learning rate over the run; cosine falls to 0, step falls by --gamma every --step-epochs, one-cycle rises and falls to nearly 0, "
        "piecewise follows --points",
        base["schedule"],
    )
    flag(group, "--step-epochs", real(0, exclusive=True), "schedule step: epochs between two falls", 10, "epochs")
    flag(group, "--gamma", real(0, below=1 + 1e-12, exclusive=True), "schedule step: what the rate is multiplied by", 0.1)
    flag(group, "--rise", real(0, below=1, exclusive=True), "schedule one-cycle: the part of the run in which the rate rises", 0.3)
    flag(group, "--points", points, "schedule piecewise: EPOCH:FACTOR of --lr, with commas; straight lines between them", "none")
    flag(
        group,
        "--warmup",
        real(0),
        "the learning rate rises to its value over this many epochs",
        f"{base['warmup']}; 0 for one-cycle and piecewise",
        "epochs",
    )
    flag(
        group,
        "--weight-decay",
        real(0),
        "L2 penalty on weights and biases, not on norms, skips and state spaces; of adamw the decay itself",
        f"{base['weight_decay']}, {DECOUPLED_DECAY} for adamw",
    )
    flag(group, "--clip-value", real(0), "clip gradient elements to ±X, after --clip-norm; 0: off", base["clip_value"])
    flag(
        group,
        "--clip-norm",
        real(0),
        "scale a gradient whose Euclidean norm is larger down to this one, before --clip-value; 0: off",
        base["clip_norm"],
    )

    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of("auto", *MODES), "how layers are computed; auto: the fastest that this machine has", "auto")
    flag(group, "--precision", one_of(*PRECISIONS), "precision that multiplications round to", OWN_PRECISION)
    flag(group, "--engine", one_of(*ENGINES), "tensorcore's kernels: wgmma (Hopper) or mma (Ampere and later, fp16 Turing)", "auto")
    flag(group, "--dwconv", one_of("auto", *DWCONV), "kernels of depthwise convolutions of series", "auto: the mode's own")
    flag(group, "--no-fuse", bool, "run every layer by itself", "off")
    flag(group, "--tune", bool, "choose tiles by measuring; kept for the next run, which may differ in its last bits from an untuned one", "off")
    flag(group, "--strict", bool, "refuse if any step would run in another mode", "off")
    flag(group, "--nvtx", bool, "NVTX ranges around the plan's steps, in the one training step of an epoch that runs launch by launch", "off")
    flag(group, "--explain", bool, "print the layers, the planned memory and the plan, then stop", "off")

    group = made.add_argument_group("output")
    flag(group, "--out", OUT, "new folder for the run", "runs/<date-time>-<dataset>-<mode>", metavar="DIR")
    flag(group, "--resume", paths.AMENDS_TEXT, "continue the run in this folder, or from this checkpoint of a run", "a new run", metavar="RUN")
    flag(group, "--log-every", count(0), "read and print the loss every N training steps; 0: about once a second", 0, "steps")
    flag(group, "--save-every", count(0), "save within an epoch every N training steps; 0: after each epoch", 0, "steps")

    group = made.add_argument_group("system")
    flag(
        group,
        "--config",
        paths.READS_TEXT,
        "settings from this TOML file: flags by their names; the command line takes precedence",
        "none",
        metavar="FILE",
    )
    device(group)
    flag(group, "--json", bool, "print the summary as one line of JSON", "off")
    flag(group, "--quiet", bool, "no header and no progress on stderr", "off")
    flag(group, "--verbose", bool, "print where the start's time went, and after every epoch where a training step's went", "off")
    return made


DATASETS = ("auto", "cifar10", "mnist", "fashion-mnist", "photos", "digits", "shapes", "energy")


def dataset(text: str) -> str:
    """A converter to the name of a data set; folder:PATH, npz:PATH and FILE.py:FUNCTION are looked for later."""
    from nbcnn.datasets import own

    if own.is_own(text):
        return str(FILES(text))
    if text.endswith((".npz", ".npy")) and not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no file {quoted(text)}; arrays in a file are npz:PATH")
    if text not in DATASETS and (kind := own.kind_of(text)):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is a {'folder' if kind == 'folder' else 'file'} here: that data set is {kind}:{text}")
    return own_or(*DATASETS, *own.FORMS[:-1], form="a custom data set is FILE.py:FUNCTION", path=FILES)(text)


dataset.path = FILES  # type: ignore[attr-defined]
dataset.metavar = "{" + ",".join((*DATASETS, "folder:PATH", "npz:PATH", "FILE.py:FUNCTION")) + "}"  # type: ignore[attr-defined]


def limit(text: str) -> int | str:
    """A converter to a number of images, or to `ALL`."""
    return ALL if text == ALL else count(1)(text)


limit.metavar = "N|all"  # type: ignore[attr-defined]


def size(text: str) -> str:
    """A converter to a size of images, in the words that were given."""
    return _valid("nbcnn.datasets.own", "size_of", text)


def augment(text: str) -> str:
    """A converter to an augmentation, in the words that were given; a file of the user's is run when the training starts."""
    return str(FUNCTION(_valid("nbcnn.datasets.augment", "check", text)))


augment.path = FUNCTION  # type: ignore[attr-defined]
augment.metavar = "NAME,…"  # type: ignore[attr-defined]


def class_weights(text: str) -> str:
    """A converter to weights of classes, in the words that were given."""
    try:
        train_loss.weights(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(brief(error)) from None
    return text


class_weights.metavar = "W,W,…"  # type: ignore[attr-defined]


def points(text: str) -> str:
    """A converter to points of a schedule, in the words that were given."""
    return _valid("nbcnn.nn.optim", "points_of", text)


points.metavar = "EPOCH:FACTOR,…"  # type: ignore[attr-defined]


def _valid(module: str, function: str, text: str) -> str:
    """`text`, if a function of a module that is imported only when it is needed takes it."""
    try:
        getattr(import_module(module), function)(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse(argv: Sequence[str] | None = None) -> SimpleNamespace:
    """The flags given on the command line: every name, None where not given. Exits 2 with a suggestion on a mistake."""
    made = parser()
    given = made.parse_args(argv)
    if given.config:
        settings.merge(made, given, given.config)
        made.check_paths((made, given))
    return SimpleNamespace(**vars(given))


def from_run(given: SimpleNamespace, saved: Mapping[str, Any], run: Path, resolved: Mapping[str, str]) -> SimpleNamespace:
    """The `saved` flags of the run in the folder `run`, less those in FREE_ON_RESUME that the user set anew.

    `resolved` is what the run took where flags of RESOLVED left it to the machine. Raises UsageError if the user asks for something that changes
    what the run computes: it would no longer be the same run.
    """
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    saved = {name: value for name, value in saved.items() if name in {*DEFAULTS, *BASE, "recipe"}}
    values = {**DEFAULTS, **saved, **resolved, "explain": False, "json": False, "quiet": False, "verbose": False}
    for name, value in chosen.items():
        value = None if (name, value) == ("limit", ALL) else value
        if name not in FREE_ON_RESUME and value not in (values[name], saved.get(name)):
            words = [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
            raise UsageError(
                f"{for_shell(*words)} cannot change in a resumed run ({run} has {brief(values[name])}); "
                "leave it out, or start a new run from its weights:\n"
                f"  {called('train', '--weights', run, *words)} …"
            )
    values.update({name: value for name, value in chosen.items() if name in FREE_ON_RESUME})
    return SimpleNamespace(**values, given=sorted(chosen))


def check(saved: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the flag, unless every one of `saved` could have been given on a command line."""
    for action in parser()._actions:
        name, value = action.dest, saved.get(action.dest)
        if name not in saved or (value is None and (name in DEFAULTS and DEFAULTS[name] is None)):
            continue
        if not callable(action.type):  # a flag without a value
            good = isinstance(value, bool)
        else:
            try:
                good = type(value) in (int, float, str) and action.type(str(value)) == value
            except (ValueError, argparse.ArgumentTypeError):
                good = False
        if not good:
            raise ValueError(f"{quoted(name)} is {quoted(value)}")
