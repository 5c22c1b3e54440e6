"""Recipes: the defaults of train.py's flags by model, and those of a run on the CPU or on digits."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import train_loss
from nbcnn.files import user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import counted
from nbcnn.plan.names import FITTED

BASE: dict[str, Any] = {
    "epochs": 15,
    "batch": 64,
    "optimizer": "sgd",
    "lr": None,
    "momentum": 0.9,
    "schedule": "cosine",
    "warmup": 1.0,
    "weight_decay": 0.0,
    "clip_value": 0.0,
    "clip_norm": 0.0,
    "init": "torch",
}
"""What every recipe sets. A learning rate of None means the optimizer's own, in LEARNING_RATES."""

_ADAM = {"optimizer": "adam", "momentum": 0.0, "warmup": 0.0}
_HARDER_TASK = {"flip": True, "whiten": True, "noise": 1.0, "sparse": 16}
_SGD_OF_ONE = {"epochs": 20, "batch": 1, "lr": 0.001, "momentum": 0.0, "schedule": "constant", "warmup": 0.0, "clip_value": 5.0, "init": "he"}
_ONE_CYCLE = {"lr": 0.4, "nesterov": True, "schedule": "one-cycle", "rise": 0.25, "warmup": 0.0}
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "default": {},
    "small": _ADAM | {"epochs": 10, "batch": 16, "lr": 0.003},
    "per-image": _SGD_OF_ONE,
    "classifier": _ADAM | {"epochs": 10, "batch": 128, "init": "he"},
    "forecast": _ADAM | {"epochs": 10, "batch": 1024, "lr": 0.004, "warmup": 1.0, "clip_norm": 0.5},
    "features": _ADAM | _HARDER_TASK | {"epochs": 23, "batch": 256, "lr": 0.0002, "warmup": 0.5, "init": "kmeans"},
    "resnet": _ONE_CYCLE | {"epochs": 16, "batch": 512, "weight_decay": 5e-4, "label_smoothing": 0.1, "augment": "flip,crop:4", "normalise": True},
    "unet": _ADAM | {"epochs": 15, "batch": 32, "warmup": 1.0, "init": "he"},
    "plain": {},
}
RECIPES = {name: BASE | difference for name, difference in _DIFFERENCES.items()}
"""The settings of a run where no flag says otherwise, by the name of a recipe."""

MODEL_RECIPES = {"small-autoencoder": "small", "mnist-cnn": "classifier", "mnist-cnn-b0": "classifier", "s4convd": "forecast"} | {
    "resnet18": "resnet",
    "mobilenet": "resnet",
    "unet": "unet",
}
"""The recipe of a model that has one of its own, where --recipe does not say otherwise."""

LEARNING_RATES = {"sgd": 0.1, "adam": 0.001, "adamw": 0.001}
DECOUPLED_DECAY = 0.01
"""The weight decay of adamw where no flag says another."""
OF_SCHEDULE = {"step_epochs": "step", "gamma": "step", "rise": "one-cycle", "points": "piecewise"}
"""Flags of one schedule alone."""

HARDER = ("whiten", "noise", "mask", "sparse")
"""Flags that put layers into a network of images."""

TRAINED = (*BASE, "recipe", "weights", "freeze", "patience", "callback", "flip", "augment", *HARDER)
"""Flags that say how a network is trained by gradients, which those of `nbcnn.nn.models.FITTED` are not."""

FOR_SERIES = ("width", "blocks", "kernel_init")
"""Flags that only s4convd has."""

SMALL = "small-autoencoder"
"""The network of a run on the CPU, or on digits instead of CIFAR-10, that names neither a network nor a recipe."""

SMALL_RUN = RECIPES["small"] | {"model": SMALL, "recipe": "small"}
"""The flags of such a run."""

ON_CPU: dict[str, Any] = {"epochs": 3, "limit": 1024}
"""The small recipe of a run on the CPU, for what no flag says; the epochs of `SMALL` are those of its recipe."""

ALL = "all"
"""The --limit that takes every image, on a CPU, too."""

ON_CPU_BY_RECIPE: dict[str, dict[str, Any]] = {"resnet": {"batch": 32, "lr": 0.05}, "unet": {"batch": 16}}
"""Further flags of such a run: 1,024 images are two batches of 512, in which nothing is learned."""

OF_GRAPHS = ("resnet", "unet")
"""Recipes that `on_images` fits to the images."""
DENOISED = 0.1
"""The deviation of the noise that `unet` learns to take off where neither masks nor --noise say otherwise: 25 of 255, as in arXiv:1608.03981."""
FIGURES = ("digits", "mnist")
"""Data sets whose images mean something else when they are mirrored, so that recipes mirror them not."""

FORECAST_ON_CPU = {"epochs": 3, "limit": 65536, "batch": 128, "width": 32, "blocks": 2, "lr": 0.012}
"""The same for s4convd."""

DEFAULTS: dict[str, Any] = {
    "dataset": "auto",
    "data_dir": "data",
    "limit": None,
    "model": "autoencoder",
    "width": 128,
    "blocks": 4,
    "loss": "log-mse",
    "huber_delta": None,
    "label_smoothing": 0.0,
    "class_weights": None,
    "ignore_index": None,
    "nesterov": False,
    "step_epochs": None,
    "gamma": None,
    "rise": None,
    "points": None,
    "accumulate": 1,
    "ema": 0.0,
    "recompute": False,
    "kernel_init": "s4d-lin",
    "flip": False,
    "size": None,
    "test_share": None,
    "augment": None,
    "normalise": False,
    "whiten": False,
    "noise": 0.0,
    "mask": 0.0,
    "sparse": None,
    "resident": "auto",
    "sync_stats": False,
    "seed": 0,
    "mode": "auto",
    "precision": None,
    "engine": "auto",
    "dwconv": "auto",
    "no_fuse": False,
    "tune": False,
    "strict": False,
    "nvtx": False,
    "explain": False,
    "weights": None,
    "freeze": None,
    "patience": None,
    "callback": None,
    "device": None,
    "config": None,
    "out": None,
    "resume": None,
    "log_every": 0,
    "save_every": 0,
    "json": False,
    "quiet": False,
    "verbose": False,
}


def own_optimizer(name: str) -> Any:
    """The class that `--optimizer FILE.py:NAME` means; the file is run. Raises UsageError for another thing than a class of `nbcnn.optimizer`."""
    from nbcnn.nn.optim import Optimizer

    found = user_code.function_of(name, "--optimizer")
    if not isinstance(found, type) or not issubclass(found, Optimizer):
        raise UsageError(f"--optimizer: {name} is no optimizer: nbcnn.optimizer makes the class of one")
    return found


def own_callbacks(names: str | None) -> list[Any]:
    """The callbacks that `--callback FILE.py:NAME,…` means, each made by NAME(); the files are run.

    Raises UsageError where NAME() raises or gives another thing than a `nbcnn.Callback`.
    """
    from nbcnn.train.events import Callback

    made = []
    for name in names.split(",") if names else ():
        make = user_code.function_of(name, "--callback")
        try:
            made.append(make())
        except Exception as error:
            raise UsageError(f"--callback: {name}() cannot be made without arguments: {type(error).__name__}: {error}") from error
        if not isinstance(made[-1], Callback):
            raise UsageError(f"--callback: {name} is no callback: write `class {name.rpartition(':')[2]}(nbcnn.Callback)`")
    return made


def _own_rate(optimizer: str) -> float:
    """The learning rate where none is given."""
    return float(own_optimizer(optimizer).own_lr) if ":" in optimizer else LEARNING_RATES[optimizer]


def fill(given: SimpleNamespace) -> SimpleNamespace:
    """The flags with the defaults of the recipe; `given` lists the names that the user set."""
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    network = _network(chosen)
    recipe = chosen.get("recipe", MODEL_RECIPES.get(network["model"], "default"))
    values = {"recipe": recipe, **DEFAULTS, **RECIPES[recipe], **chosen, **network}
    if values["limit"] == ALL:
        values["limit"] = None
    if values["lr"] is None:
        values["lr"] = _own_rate(values["optimizer"])
    if values["optimizer"] != "sgd":
        for name in ("momentum", "nesterov"):
            if name in chosen:
                raise UsageError(f"--{name} belongs to --optimizer sgd; {values['optimizer']} has its own numbers")
        values |= {"momentum": 0.0, "nesterov": False}
    if (values["optimizer"] == "sgd") != (RECIPES[recipe]["optimizer"] == "sgd"):
        # The recipe's learning rate and momentum are those of the other optimizer.
        other = {"lr": _own_rate(values["optimizer"])} | ({"momentum": BASE["momentum"]} if values["optimizer"] == "sgd" else {})
        values |= {name: value for name, value in other.items() if name not in chosen}
    if values["nesterov"] and not values["momentum"]:
        raise UsageError("--nesterov needs a --momentum above 0")
    if values["optimizer"] == "adamw" and "weight_decay" not in chosen:
        values["weight_decay"] = values["weight_decay"] or DECOUPLED_DECAY
    for name, schedule in OF_SCHEDULE.items():
        if name in chosen and values["schedule"] != schedule:
            raise UsageError(f"--{name.replace('_', '-')} belongs to --schedule {schedule}, this is {values['schedule']}")
    if values["schedule"] == "piecewise" and not values["points"]:
        raise UsageError("--schedule piecewise needs --points EPOCH:FACTOR,… such as 0:0.1,2:1,10:0")
    if values["schedule"] in ("one-cycle", "piecewise") and "warmup" not in chosen:
        values["warmup"] = 0.0
    return SimpleNamespace(**values, given=sorted(chosen))


def _network(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Model and data set: each says what the other is by default. Raises UsageError if they do not go together."""
    series = chosen.get("dataset") == "energy"
    model = chosen.get("model", "s4convd" if series else "autoencoder")
    dataset = chosen.get("dataset", "energy" if model == "s4convd" else DEFAULTS["dataset"])
    if dataset == "auto" and model == "s4convd":
        dataset = "energy"
    if (model == "s4convd") != (dataset == "energy"):
        raise UsageError(f"--model {model} does not go with --dataset {dataset}: s4convd forecasts energy, the others take images")
    for_images = [name for name in ("flip", "recipe", "size", "test_share", "augment", "normalise", *HARDER) if name in chosen]
    if model == "s4convd" and for_images:
        raise UsageError(f"--{for_images[0].replace('_', '-')} is for images, s4convd forecasts series")
    if ("size" in chosen or "test_share" in chosen) and ":" not in dataset:
        name = "size" if "size" in chosen else "test-share"
        raise UsageError(f"--{name} is for a custom --dataset (folder:PATH, npz:PATH, FILE.py:FUNCTION), this is {dataset}")
    trained = [name for name in TRAINED if name in chosen and model in FITTED]
    if trained:
        raise UsageError(f"--{trained[0].replace('_', '-')} is for networks that are trained; --model {model} is fitted to the images in one pass")
    alien = [name for name in FOR_SERIES if name in chosen and model != "s4convd"]
    if alien:
        raise UsageError(f"--{alien[0].replace('_', '-')} belongs to --model s4convd, this is {model}")
    train_loss.check(chosen, model)
    return {"model": model, "dataset": dataset}


def on_cpu(flags: SimpleNamespace) -> str:
    """Apply the small recipe to every flag that the user did not give; return the notice, empty where nothing is left to it.

    Who gives neither a network nor a recipe gets the small network. Call it before anything reads the flags in another thread.
    """
    if flags.resume:
        return ""
    if flags.model in FITTED:
        small, noun = {"limit": ON_CPU["limit"]}, "images"
    elif flags.model == "s4convd":
        small, noun = FORECAST_ON_CPU, "windows"
    elif takes_small(flags):
        small, noun = small_run(flags) | {"limit": ON_CPU["limit"]}, "images"
    else:
        own = {"limit": ON_CPU["limit"]} if flags.model == SMALL else ON_CPU
        small, noun = own | ON_CPU_BY_RECIPE.get(flags.recipe, {}), "images"
    left = {name: value for name, value in small.items() if name not in flags.given}
    vars(flags).update(left)
    if not left.keys() & {"model", "epochs", "limit"}:
        return ""
    what = f" {SMALL}," if flags.model == SMALL else ""
    amount = f"up to {flags.limit:,}" if flags.limit else "all"
    if flags.model in FITTED:
        return f"NOTE: this runs on the CPU, so it is fitted to {amount} images; --limit N takes another number, --limit all every image."
    return (
        f"NOTE: this runs on the CPU, so it is a small run:{what} {counted(flags.epochs, 'epoch')} of {amount} {noun}.\n"
        f"      --model, --epochs and --limit (N or all) change that; the full recipe can take hours on a CPU, minutes on a GPU."
    )


def on_digits(flags: SimpleNamespace) -> str:
    """Apply the small network and its recipe where digits stand in for CIFAR-10, unless the user chose; return the notice, empty if nothing changed.

    The large network learns less of 1,437 digits than a random encoder has: the features of the small one are worth more.
    """
    if flags.resume or flags.dataset != "auto" or not takes_small(flags):
        return ""
    vars(flags).update({name: value for name, value in small_run(flags).items() if name not in flags.given})
    return f"NOTE: digits stand in for CIFAR-10, so {SMALL} learns them: {flags.epochs} epochs; --model and --epochs change that."


def on_images(flags: SimpleNamespace, name: str, count: int, segmented: bool) -> str:
    """Apply what a recipe leaves to the images, unless the user chose; return what to say, or nothing. A batch has at most all images.

    The `count` training images are those of the data set `name`. `segmented`: the network is to classify pixels.
    """
    if flags.resume:
        return ""
    graph = flags.recipe in OF_GRAPHS
    notes, most = [], max(min(count, 8), count // 8) if graph and "batch" not in flags.given else count
    if flags.batch > most and "batch" in flags.given:
        notes.append(f"NOTE: the training set has {counted(count, 'image')}, so a batch has {most}, not the {flags.batch} of --batch.")
        flags.batch = most
    elif flags.batch > most:
        if flags.optimizer == "sgd" and "lr" not in flags.given:
            flags.lr *= most / flags.batch
        flags.batch = most
        notes.append(
            f"NOTE: the training set has {counted(count, 'image')}, so a batch has {most}, with lr {flags.lr:.3g}; --batch and --lr set others."
        )
    if not graph:
        return "\n".join(notes)
    if flags.model == "unet" and segmented:
        notes.append(f"NOTE: {name} has masks, so unet learns the class of every pixel; --loss mse has it denoise images instead.")
    elif flags.model == "unet" and not flags.noise and "noise" not in flags.given:
        flags.noise = DENOISED
        notes.append(
            f"NOTE: unet learns to denoise images (standard deviation {DENOISED}; --noise chooses another). On images with masks it learns these."
        )
    if name in FIGURES and flags.augment and "augment" not in flags.given and "flip" in flags.augment:
        flags.augment = "crop:4"
        notes.append(f"NOTE: {name} are not mirrored: --augment flip,crop:4 would.")
    return "\n".join(notes)


SMALLER = 4
"""From how many times fewer images in a batch on a learning rate of the recipe is worth a word."""


def of_batch(flags: SimpleNamespace) -> str:
    """What to say of a --batch much smaller than the one that the recipe's learning rate of sgd is for; mostly nothing."""
    if flags.resume or flags.optimizer != "sgd" or "batch" not in flags.given or "lr" in flags.given:
        return ""
    base = {"lr": LEARNING_RATES["sgd"]} | {name: value for name, value in RECIPES[flags.recipe].items() if value is not None}
    batch = next((each["batch"] for each in (base, ON_CPU_BY_RECIPE.get(flags.recipe, {})) if each.get("lr") == flags.lr), 0)
    if flags.batch * SMALLER > batch:
        return ""
    return (
        f"NOTE: lr {flags.lr:g} is for batches of {batch}, and with {flags.batch} training may diverge; "
        f"in proportion it is --lr {flags.lr * flags.batch / batch:.2g}."
    )


def takes_small(flags: SimpleNamespace) -> bool:
    """The user named neither a network nor a recipe, so a CPU or digits get the small network. Flags of the optimiser alone do not change that."""
    return flags.model == DEFAULTS["model"] and not {"model", "recipe"} & set(flags.given)


def small_run(flags: SimpleNamespace) -> dict[str, Any]:
    """The flags of the small network's recipe, filled up around what the user gave."""
    chosen = {name: vars(flags)[name] for name in flags.given}
    filled = vars(fill(SimpleNamespace(**chosen, model=SMALL)))
    return {name: filled[name] for name in (*SMALL_RUN, "nesterov")}
