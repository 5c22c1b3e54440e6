"""The network that a checkpoint holds: its layers, how they are computed here, its weights; and its encoder, which features are made by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, quoted
from nbcnn.nn import description, models
from nbcnn.nn.description import DescriptionError
from nbcnn.nn.layer import parameters, sized, states
from nbcnn.nn.params import ParameterError, under
from nbcnn.plan.graph import ShapeError, named
from nbcnn.run import rows
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice
from nbcnn.train.checkpoint import CheckpointError, Saved
from nbcnn.train.runlog import RunFolder


def described(saved: Saved, more: Sequence[type] = ()) -> dict[str, Any]:
    """The network that a file holds, as `description.loads` gives it: its own note, or for a checkpoint of an earlier version what the
    config.json beside it says. Raises CheckpointError, DescriptionError or RunError.
    """
    if description.KEY in saved.metadata:
        return description.loads(saved.metadata[description.KEY], f"{saved.path}: its note of the network", more)
    config = RunFolder(saved.path.parent).read_config()
    shape = config["data"].get("image_shape")
    if config["flags"]["model"] not in models.MODELS or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape) or len(shape) != 3:
        raise CheckpointError(f"{saved.path.parent}/config.json does not say which network the checkpoint is of")
    return {"layers": models.MODELS[config["flags"]["model"]](*shape), "input_shape": tuple(shape), "precision": saved.metadata.get("precision")}


def check(layers: Any, shape: tuple[int, ...], saved: Saved) -> None:
    """Raise DescriptionError or CheckpointError unless `layers`, for examples of `shape`, make a network of which `saved` has all parameters.

    Nothing is made before: a file of a few kilobytes may describe gigabytes of parameters.
    """
    try:
        made = sized(layers, shape)
        wanted = parameters(made) | states(made)
    except (ShapeError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        raise DescriptionError(f"{saved.path}: its note of the network: {brief(error)}") from error
    held = under("param.", saved.tensors)
    for name, param in wanted.items():
        if name not in held:
            raise CheckpointError(f"{saved.path} does not fit this network: parameter {quoted(name)} is missing")
        if held[name].shape != param.shape:
            shapes = f"{quoted(held[name].shape)}, this network needs {quoted(param.shape)}"
            raise CheckpointError(f"{saved.path} does not fit this network: parameter {quoted(name)} is {shapes}")


def normalisation(saved: Saved) -> Normalisation | None:
    """The normalisation that a file tells of. Raises CheckpointError if it is none."""
    try:
        return Normalisation.noted(saved.metadata)
    except UsageError as error:
        raise CheckpointError(f"{saved.path}: {error}") from None


def choice_of(mode: str, precision: str | None, noted: str | None) -> Choice:
    """The row for `mode` and `precision`; None takes the file's precision, or the mode's own where it does not have that one.

    Mode auto takes fp16 only where it is asked for or noted: its largest number is 65,504, and weights of other trainings may make larger results.
    """
    try:
        choice = rows.choose_mode(mode, precision or noted)
    except UsageError:
        if precision is not None:
            raise
        choice = rows.choose_mode(mode, None)
    if mode == "auto" and choice.row.scales_loss and choice.row.precision != (precision or noted):
        why = f"the file's precision is {noted or 'not noted'}, and of the tensor cores this GPU has fp16 alone"
        return rows.choose_mode("cudacore", None)._replace(why=why)
    return choice


def fill(net: Net, saved: Saved) -> None:
    """Give `net` the weights of a file. Raises CheckpointError if one does not fit."""
    known = set(net.params.names)
    try:
        net.params.load_dict({name: tensor for name, tensor in under("param.", saved.tensors).items() if name in known})
    except ParameterError as error:
        raise CheckpointError(f"{saved.path} does not fit this network: {error}") from error


def cut(model: str, at: str | None) -> str:
    """The layer whose output the features are: `at`, or the code of a ready-made model. Raises UsageError where neither is known."""
    if at is None and model not in models.CODES:
        raise UsageError(f"which layer of model {quoted(model)} makes a code is not known: name it by --at, for instance --at pool1")
    return at or models.code(model)


def encoder(saved: Saved, code: str, mode: str, precision: str | None, noted: str | None, shape: tuple[int, ...] | None = None) -> Net:
    """The network of the checkpoint `saved` up to the layer `code`, with its weights, for images of `shape` (None: the checkpoint's).

    `precision` None takes the one that is `noted`, or the mode's own where the mode does not have that one.
    Raises CheckpointError if the weights do not fit.
    """
    about, choice = described(saved), choice_of(mode, precision, noted)
    layers, normal = models.encoder(about["layers"], code), normalisation(saved)
    check(layers, shape or about["input_shape"], saved)
    net = Net(layers, shape or about["input_shape"], choice=choice, normalisation=normal)
    fill(net, saved)
    return net


def forget(net: Net, seed: int) -> None:
    """Give the layers of `net` first weights of `seed`, as if it had never been trained: the control of what training is worth.

    Layers that prepare images (`prepares`), such as a whitening, stay as they were fitted: the control gets the same images.
    """
    first = tuple(f"{name}." for name, layer in named(net.layers) if getattr(layer, "prepares", False))
    kept = {name: array for name, array in net.params.as_dict().items() if first and name.startswith(first)}
    net.params.initialise(seed, "torch")
    net.params.load_dict(net.params.as_dict() | kept)
