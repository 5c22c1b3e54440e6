"""Files of a model: one safetensors file with the network in its metadata, and what `Model.fit` writes into a run folder.

Every checkpoint of a training has the same note of its network, so that `load` takes them all: a saved model, a checkpoint, a run folder.
"""

from __future__ import annotations

import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn import __version__
from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn import description
from nbcnn.nn.description import DescriptionError
from nbcnn.nn.graphs import Graph
from nbcnn.nn.optim import Schedule
from nbcnn.nn.params import under
from nbcnn.plan.graph import ShapeError
from nbcnn.run.net import Net
from nbcnn.train import checkpoint, former
from nbcnn.train.checkpoint import ADVICE, CheckpointError, Saved
from nbcnn.train.runlog import OWN_MODEL, RunFolder
from nbcnn.train.saved_net import check, choice_of, described, fill, normalisation

if TYPE_CHECKING:
    from nbcnn.model.network import Model

FORMAT = "nbcnn-model-1"
CALLABLE = "a callable"
"""The name of data that a callable yields, whose examples nobody has together."""
ON_GPU = "GPU arrays"
"""The name of data that lies in GPU memory, of which no checksum is taken."""

COUNTERS = ".num_batches_tracked"
"""The end of the names of PyTorch's counters of batches, one for each BatchNorm, which nbcnn has no use for."""


@dataclass(frozen=True)
class Loaded:
    """What `load_weights` did, by the names of parameters.

    taken        those that the network now has of the file.
    missing      those of the network that the file lacks. unused  those of the file that the network lacks.
    other_shape  those that both have, in different shapes.
    Its text says the same. Raises nothing.

    Example, weights of a network with two classes for one with three:
        >>> import nbcnn
        >>> layers = [nbcnn.Conv2d(4, 3), nbcnn.Flatten()]
        >>> path = nbcnn.Model([*layers, nbcnn.Linear(2)], mode="cpu").build((1, 6, 6)).save("two.safetensors")
        >>> print(nbcnn.Model([*layers, nbcnn.Linear(3)], mode="cpu").build((1, 6, 6)).load_weights(path, partial=True))
        2 parameters taken
        of another shape: linear1.weight, linear1.bias
    """

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    other_shape: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} parameters taken"]
        parts = {"missing in the file": self.missing, "not of this network": self.unused, "of another shape": self.other_shape}
        return "\n".join(lines + [f"{what}: {', '.join(names)}" for what, names in parts.items() if names])


def note(model: Model) -> str:
    """The network of `model`, for the metadata of a file."""
    form, net = model.form or Form(model.net.input_shape), model.net
    more: dict[str, Any] = {"classes": list(model.classes) if model.classes else None}
    # Files of networks without frozen parameters stay what they were.
    more |= {"frozen": frozen} if (frozen := model.frozen()) else {}
    if isinstance(form, Forms):
        return description.dumps(net.layers, net.input_shape, precision=net.precision, **more, forms=[part.note() for part in form.parts])
    return description.dumps(net.layers, net.input_shape, precision=net.precision, **more, **form.note())


def _form(about: Mapping[str, Any]) -> Form | Forms:
    """The form of the examples that a file tells of. Raises DescriptionError where it has another number of them than its graph has inputs."""

    def form(shape: tuple[int, ...], told: Mapping[str, Any]) -> Form:
        try:
            return Form.noted(shape, told)
        except ValueError as error:
            raise DescriptionError(str(error)) from None

    layers = about["layers"]
    if not isinstance(layers, Graph) or len(layers.inputs) == 1:
        return form(about["input_shape"], about)
    told = about.get("forms") or [{}] * len(layers.inputs)
    if len(told) != len(layers.inputs):
        raise DescriptionError(f"the file has {len(told)} forms of examples for {len(layers.inputs)} inputs")
    return Forms(tuple(map(form, layers.inputs, told)))


FOREIGN = dict.fromkeys((".h5", ".hdf5", ".keras", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".npy", ".bin", ".pb", ".tflite", ".json"), "")
FOREIGN |= {".onnx": "call onnx.save(nbcnn.onnx.to_onnx(model), path)"}
FOREIGN |= dict.fromkeys((".pt", ".pth"), "call torch.save(nbcnn.torch.state_dict(model), path)")
"""Suffixes of other programs' files, which a name for a saved model must not have, and how such a file is written, where it can be."""


def save(model: Model, path: Path) -> Path:
    """Write `model` to `path`; see `Model.save`."""
    if (other := path.suffix.lower()) in FOREIGN:
        line = f"; for a file of {other} {FOREIGN[other]}" if FOREIGN[other] else ""
        name = path.with_suffix(".safetensors").name
        raise UsageError(f"a model is saved as a safetensors file, and {quoted(path.name)} names another format: save({quoted(name)}){line}")
    if path.suffix != ".safetensors":
        path = path.with_name(f"{path.name}.safetensors")
    tensors = {f"param.{name}": tensor for name, tensor in model.net.params.as_dict().items()}
    versions = {"nbcnn": __version__, "numpy": np.__version__, "python": platform.python_version()}
    path.parent.mkdir(parents=True, exist_ok=True)
    normal = {"normalisation": model.normalisation.text()} if model.normalisation else {}
    checkpoint.save(path, tensors, {"format": FORMAT, description.KEY: note(model), "mode": model.net.mode, **normal, **versions})
    return path


def found(path: Path, which: str | None = None) -> Path:
    """The file that `path` means: itself, or the checkpoint "last" or "best" of a run folder, None the run's own (`RunFolder.checkpoint`).

    Raises UsageError for another name.
    """
    if which not in (None, "last", "best"):
        raise UsageError(f"checkpoint is last or best, got {quoted(which)}")
    return RunFolder(path).checkpoint(which) if path.is_dir() else path


def load(path: Path | str, *, layers: Sequence[type] = (), mode: str = "auto", precision: str | None = None, checkpoint: str | None = None) -> Model:
    """The model in a file: one that `Model.save` wrote, a checkpoint of a training, or a run folder.

    path        the file or folder.
    layers      custom layer classes that the network has.
    mode        how it is computed here; auto is the fastest that this machine has. precision  None is the file's where the mode has it.
    checkpoint  "last" or "best", of a run folder; None is the last one, or the best of a training with --patience or EarlyStopping.
    Raises CheckpointError or DescriptionError (exit code 3) for a file that is missing, damaged or of an unknown layer, GpuUnavailable.

    Images that the loaded model takes have the shape and dtype of those it was trained on, uint8 or floats.

    Example:
        >>> import numpy as np, nbcnn
        >>> path = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu").build((3,)).save("net.safetensors")
        >>> nbcnn.load(path, mode="cpu").predict(np.zeros((5, 3), np.uint8)).shape
        (5, 2)
    """
    from nbcnn.model.network import Model

    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no file or run folder {path}: {ADVICE}")
    saved = read(found(path, checkpoint))
    about = described(saved, layers)
    choice = choice_of(mode, precision, about.get("precision"))
    normal = normalisation(saved)
    check(about["layers"], about["input_shape"], saved)
    try:
        model = Model(about["layers"], mode=choice.row.mode, precision=choice.row.precision, classes=about.get("classes"), normalisation=normal)
        model.learn(_form(about))
        net = model.build(about["input_shape"]).net
    except (UsageError, ShapeError, DescriptionError) as error:
        raise DescriptionError(f"{path}: its note of the network: {error}") from error
    fill(net, saved)
    try:
        for name in about.get("frozen", ()):
            model.freeze(name)
    except UsageError as error:
        raise DescriptionError(f"{path}: its note of the network: {error}") from None
    return model


def read(path: Path) -> Saved:
    """A checkpoint or saved model."""
    return checkpoint.read(path)


def load_weights(net: Net, path: Path, partial: bool) -> Loaded:
    """See `Model.load_weights`."""
    saved = read(found(path))
    # A file of another program has the names of the parameters alone.
    given = under("param.", saved.tensors) or saved.tensors
    return take(net, given, partial, str(saved.path))


def _single(name: str, tensor: np.ndarray, source: str) -> np.ndarray:
    """A tensor of float64 as float32; others as they are. Raises CheckpointError for a number that is too large."""
    if tensor.dtype != np.float64:
        return tensor
    with np.errstate(over="ignore"):
        made = tensor.astype(np.float32)
    if not np.isfinite(made).all():
        raise CheckpointError(f"{source}: {quoted(name)} is float64 and holds a number that is no finite float32")
    return made


def take(net: Net, tensors: Mapping[str, np.ndarray], partial: bool, source: str) -> Loaded:
    """Give `net` the tensors that fit; `source` says where they are from. Raises CheckpointError as `Model.load_weights`."""
    given, own = {name: _single(name, tensor, source) for name, tensor in tensors.items() if not name.endswith(COUNTERS)}, net.params.as_dict()
    other = tuple(name for name in own if name in given and (given[name].shape != own[name].shape or given[name].dtype != own[name].dtype))
    taken = tuple(name for name in own if name in given and name not in other)
    result = Loaded(taken, tuple(name for name in own if name not in given), tuple(name for name in given if name not in own), other)
    if not partial and (result.missing or result.unused or result.other_shape):
        raise CheckpointError(f"{source} is not of this network; partial=True takes what fits:\n{result}")
    if not taken:
        raise CheckpointError(f"nothing of {source} fits this network:\n{result}")
    net.params.load_dict(own | {name: given[name] for name in taken})
    return result


def words(model: Model, session: Any, optimizer: Any, images: Any, epochs: int, batch: int, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Which training this is, and how it was computed, for its checkpoints."""
    net = model.net
    identity = {
        "format": former.FORMAT,
        "model": OWN_MODEL,
        "data": f"{name}, {len(images)} examples" + (f", CRC-32 {zlib.crc32(images.data):08x}" if name not in (CALLABLE, ON_GPU) else ""),
        "batch": str(batch),
        "optimizer": type(optimizer).__name__.lower(),
        "mode": net.mode,
        "precision": net.precision,
    }
    return identity, {"device": net.device_name, "nbcnn": __version__, description.KEY: note(model)}


def config(
    model: Model, session: Any, optimizer: Any, images: Any, test_images: np.ndarray | None, epochs: int, batch: int, name: str
) -> Mapping[str, Any]:
    """The content of a run's config.json."""
    net, rate = model.net, optimizer.lr if optimizer.lr is not None else optimizer.own_lr
    schedule = rate if isinstance(rate, Schedule) else None
    numbers = {key: value for key, value in vars(optimizer).items() if key != "lr"}
    flags = {
        "model": OWN_MODEL,
        "dataset": name,
        "data_dir": "data",
        "epochs": epochs,
        "batch": batch,
        "optimizer": type(optimizer).__name__.lower(),
        "lr": float(schedule.lr if schedule else rate),
        "schedule": schedule.name if schedule else "constant",
        "warmup": float(schedule.warmup if schedule else 0.0),
        **({key: value for key, value in vars(schedule).items() if key not in ("lr", "warmup")} if schedule else {}),
        "momentum": 0.0,
        **numbers,
        "init": model.init,
        "seed": model.seed,
    }
    return {
        "flags": flags,
        "data": {
            "name": name,
            "source": f"{name} given to Model.fit" if name in ("arrays", CALLABLE, ON_GPU) else name,
            "training_images": len(images),
            "test_images": 0 if test_images is None else len(test_images),
            "image_shape": list(net.input_shape),
        },
        "format": former.FORMAT,
        "mode": net.mode,
        "precision": net.precision,
        "device": net.device_name,
        "ranks": 1,
        "parameters": net.params.count,
        "planned_bytes": session.planned_bytes,
        "tiles": session.tiles(),
        "versions": {"nbcnn": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "command": sys.argv,
    }
