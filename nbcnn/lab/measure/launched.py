"""This module finds out who launches which kernel: it plans and binds every use in `USERS` for every GPU row of MODES, without a GPU.

A kernel is a function that `jit` makes one of, named by its module and its qualified name, whatever tiles and types are frozen into it. One that no
user launches is dead. Users are the ready models, what `train.py` does with them on demand, public layers at shapes of their own, and the kernel
matrices of the classifiers. Forcing an engine (`--engine`) leaves choices out and adds none, so it is no user of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn import ops as package
from nbcnn.lab.measure.kernels import as_if_on, capability_of
from nbcnn.lab.measure.plans import H200
from nbcnn.modes import MODES, Row, with_dwconv
from nbcnn.nn import activations, corruption, joins, norms, resampling, series_layers, whitening
from nbcnn.nn import layers as plain_layers
from nbcnn.nn.activations import GELU, HardSwish, PReLU, ReLU, ReLU6, Sigmoid, Swish
from nbcnn.nn.fuse import fuse_nodes
from nbcnn.nn.graphs import Graph, Input, unpack, wired
from nbcnn.nn.joins import Concat, Losses
from nbcnn.nn.layer import parameters, sized
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear, Residual
from nbcnn.nn.losses import L1, MSE, BCEWithLogits, ForecastMSE, Huber, SoftmaxCrossEntropy
from nbcnn.nn.maps import LinearMap, Permute
from nbcnn.nn.models import MODELS, s4convd
from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0, GroupNorm
from nbcnn.nn.optim import SGD, Adam, AdamW
from nbcnn.nn.params import ParameterLayout
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
from nbcnn.nn.series_layers import DepthwiseConv1d, LastStep, PointwiseConv1d
from nbcnn.ops.conv import hopper_ladder
from nbcnn.ops.conv.frame.correlation import pack
from nbcnn.ops.images import draw
from nbcnn.ops.kernel.call import Call, Impl, bare_call
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.gram_wgmma import launch_gram
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.products.rbf import launch_rbf
from nbcnn.ops.products.winners import launch_keep_winner
from nbcnn.ops.series.dwconv1d import VARIANTS as DWCONV
from nbcnn.ops.svm import mirror, process, rows, smo
from nbcnn.plan.graph import Buf, Planned, Resolution, Step, Sync, Tape, Wired, drop_dead, named, trace, trace_nodes
from nbcnn.plan.lowering import lower
from nbcnn.plan.merging import merge
from nbcnn.plan.names import FITTED
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import numpy_dtype
from nbcnn.run.resolve import resolver

ARCHITECTURES = ("75", "80", "90a")
"""What is planned for: the lowest that a row runs on, sm_80 where it wants tensor cores, and Hopper's, whose TMA and wgmma no other has."""
BATCHES = (256, 1, 4096)
MOMENTUM = SGD()
COLOUR, DIGITS, HOURS, SMALL, LARGE = (3, 32, 32), (1, 28, 28), (4, 48), (3, 16, 16), (3, 256, 256)

Kernel = tuple[str, str]
"""Module and qualified name of a kernel's function."""


@dataclass(frozen=True)
class User:
    """A network and how it is run.

    name, why  what the page calls it, and why it stands here.
    layers     makes the network, which ends in a loss; None where products of matrices are launched beside networks.
    shape      of an input: (C, H, W), or (F, L) for series.
    batches    images or series of a step.
    ranks      processes that train together and share the statistics of a batch.
    gathered   False: the caller hands in floats of its own, as to `Net.gradients`, instead of a resident data set.
    trained    False: it is only applied.
    dwconv     the variant of depthwise convolution that is asked for.
    ema        the decay of an average of the weights, 0 without one. parts: of a step's batch, whose gradients are added up.
    """

    name: str
    why: str
    layers: Callable[[], Sequence[Any]] | None = None
    shape: tuple[int, ...] = COLOUR
    batches: tuple[int, ...] = BATCHES[:1]
    optimizer: Any = MOMENTUM
    ranks: int = 1
    gathered: bool = True
    trained: bool = True
    dwconv: str = "auto"
    ema: float = 0.0
    parts: int = 1


@dataclass(frozen=True)
class Use:
    """A launch that a user makes: of which op, in which row, on which architecture."""

    user: User
    row: Row
    arch: str
    op: str
    launch: Any

    @property
    def kernel(self) -> Kernel:
        function = getattr(self.launch.kernel, "py_func", self.launch.kernel)
        return function.__module__, function.__qualname__


def _model(name: str) -> User:
    shape = DIGITS if "mnist" in name else COLOUR
    return User(name, "ready-made", lambda: MODELS[name](*shape), shape, BATCHES, Adam() if "mnist" in name else MOMENTUM)


_LARGE = [name for name in MODELS if name not in ("small-autoencoder", "resnet18", "mobilenet", "unet") and name not in FITTED]

READY = (*map(_model, _LARGE), User("s4convd", "ready-made", s4convd, HOURS, BATCHES, Adam(clip_norm=0.5)))
"""The ready models with the update of their recipe, but for the small autoencoder, whose layers are the large one's, and the three graphs, whose
layers stand below at sizes that are planned in a second."""


def _classifier(*body: Any) -> Callable[[], list[Any]]:
    """`body` with a linear layer behind it, for ten classes of SMALL images."""

    def made() -> list[Any]:
        y, _ = trace(Tape(training=True), named(sized(body, SMALL)), Buf("x", (1, *SMALL)))
        flat = [Flatten()] if len(y.shape) == 4 else []
        return [*body, *flat, Linear(10), SoftmaxCrossEntropy()]

    return made


def _behind_conv(*layers: Any) -> Callable[[], list[Any]]:
    return _classifier(Conv2d(16, 3, padding=1), *layers)


def _between_convs(layer: Any) -> Callable[[], list[Any]]:
    return lambda: [Conv2d(16, 3, padding=1), layer, Conv2d(3, 3, padding=1), MSE()]


def _forecast(*body: Any) -> Callable[[], list[Any]]:
    return lambda: [*body, LastStep(), Linear(1), ForecastMSE()]


def _graph() -> Graph:
    """Two inputs, a shared layer, a sum with its ReLU, a product, a concatenation, a factor for each of its channels, and two outputs."""
    a, b = Input((3, 16, 16)), Input((3, 16, 16))
    conv = Conv2d(16, 3, padding=1)
    p, q = conv(a), conv(b)
    r = Concat()([ReLU()(p + q), p * Sigmoid()(q)])
    r = r * Sigmoid()(GlobalAvgPool2d()(r))
    first, second = (Linear(10)(Flatten()(MaxPool2d(2)(Conv2d(16, 3, padding=1)(r)))) for _ in range(2))
    return Graph.of([a, b], [first, second], Losses((SoftmaxCrossEntropy(), SoftmaxCrossEntropy())))


def _upwards() -> Graph:
    """A value beside what was halved and doubled again, as a U-Net joins them."""
    x = Input(SMALL)
    y = Conv2d(16, 3, padding=1)(x)
    joined = Concat()([y, ConvTranspose2d(8, 2, stride=2)(MaxPool2d(2)(y))])
    return Graph.of([x], [Linear(10)(Flatten()(joined))], SoftmaxCrossEntropy())


def _kinds(layers: Sequence[Any]) -> Iterator[type]:
    """The classes of layers, and of those inside them."""
    for layer in layers:
        yield type(layer)
        yield from _kinds(getattr(layer, "body", ()))


def _others() -> list[User]:
    """A network for every public layer that no ready model has and that wants no sizes: activations, pooling."""
    ready = {kind for user in READY if user.layers for kind in _kinds(user.layers())}
    return [
        User(name, "layer", _behind_conv(layer()), SMALL)
        for module in (plain_layers, norms, series_layers, activations, resampling, whitening, corruption, joins)
        for name, layer in vars(module).items()
        if isinstance(layer, type) and layer.__module__ == module.__name__ and hasattr(layer, "build") and not hasattr(layer, "needs_labels")
        if hasattr(layer, "kind")  # what several layers inherit from has none
        if not name.startswith("_") and layer not in ready and not hasattr(layer, "prepares") and not getattr(layer, "joins", False)
        if all(p.default is not Parameter.empty for p in signature(layer).parameters.values())
    ]


def _trained_for(loss: Any, optimizer: Any = MOMENTUM, ema: float = 0.0) -> User:
    """A small network trained for `loss`; a loss of classes is that of a classifier, another one compares images."""
    body = [Conv2d(16, 3, padding=1), *([Flatten(), Linear(10)] if loss.needs_labels else [Conv2d(3, 3, padding=1)]), loss]
    return User(type(loss).__name__, "loss", lambda: body, SMALL, optimizer=optimizer, ema=ema)


LOSSES_AND_UPDATES = (
    _trained_for(L1()),
    _trained_for(Huber(), SGD(momentum=0.9, nesterov=True)),
    _trained_for(BCEWithLogits(), AdamW(clip_norm=1.0), ema=0.999),
    replace(_trained_for(SoftmaxCrossEntropy(label_smoothing=0.1)), name="SoftmaxCrossEntropy (smoothed)", parts=3),
)
"""Networks for the losses, optimizers and averages of weights that no ready model has; `parts`: gradients are added up."""


def _features() -> list[Any]:
    layers = MODELS["autoencoder"](*COLOUR)
    return [whitening.Whiten(), corruption.Noise(), corruption.MaskSquares(), *layers[:6], corruption.KSparse(), *layers[6:]]


def _dictionary(name: str) -> list[Any]:
    return [*MODELS[name](*COLOUR), Flatten(), Linear(10), SoftmaxCrossEntropy()]


_GROUPED = (Conv2d(16, 3, padding=1, groups=2), Conv2d(16, 3, padding=1, stride=(1, 2), groups=2))
USERS = (
    *READY,
    User("s4convd (rmsle)", "ready-made, trained for its other loss", lambda: s4convd(loss="rmsle"), HOURS),
    *(User(f"s4convd --dwconv {name}", "teaching", s4convd, HOURS, dwconv=name) for name in DWCONV if name != "best"),
    User("mnist-cnn-b0 --sync-stats", "several ranks, each with a part of the batch", lambda: MODELS["mnist-cnn-b0"](*DIGITS), DIGITS, ranks=2),
    User("Net.gradients", "a network on the caller's own floats", lambda: MODELS["autoencoder"](*COLOUR), gathered=False),
    *_others(),
    *LOSSES_AND_UPDATES,
    User("PReLU (channels)", "layer, a slope for every channel", _behind_conv(PReLU(16)), SMALL),
    User("GELU (tanh)", "layer", _behind_conv(GELU(approximate="tanh")), SMALL),
    User("MaxPool2d, AvgPool2d (padded)", "layers", _behind_conv(MaxPool2d(3, 2, 1), AvgPool2d((2, 3), (2, 1))), SMALL),
    User("Resize (bilinear, per axis)", "layers", _behind_conv(Resize(mode="bilinear"), Resize((1, 2))), SMALL),
    User("Linear + Sigmoid", "layers that become one op", _classifier(Flatten(), Linear(64), Sigmoid()), SMALL),
    User("Linear + Swish", "layers that become one op", _classifier(Flatten(), Linear(64), Swish()), SMALL),
    User("Upsample2d + Conv2d", "layers that become one op", _behind_conv(Upsample2d(2), Conv2d(16, 3, padding=1)), SMALL),
    User("MaxPool2d + AvgPool2d", "layers, windows that overlap", _behind_conv(MaxPool2d(3, 2), AvgPool2d(3, 2)), SMALL),
    User("Conv2d + BatchNorm2d + ReLU", "layers that become one op", _behind_conv(BatchNorm2d(), ReLU()), SMALL),
    *(
        User(f"Conv2d + BatchNorm2d + {type(layer).__name__}", "layers that become one op", _behind_conv(BatchNorm2d(), layer), SMALL)
        for layer in (GELU(), ReLU6(), HardSwish(), Swish())
    ),
    User(
        "Residual + ReLU",
        "layers that become one op, a BatchNorm2d at the end of the residual's body",
        _behind_conv(Residual(Conv2d(16, 3, padding=1), BatchNorm2d()), ReLU()),
        SMALL,
    ),
    User(
        "Residual between ReLUs",
        "layers whose gradients are added and masked in one pass",
        _behind_conv(ReLU(), Residual(Conv2d(16, 3, padding=1)), ReLU()),
        SMALL,
    ),
    User("Concat behind ConvTranspose2d", "layers of which one copy adds a bias", _upwards, SMALL),
    User("BatchNorm2d --sync-stats", "several ranks, each with a part of the batch", _behind_conv(BatchNorm2d()), SMALL, ranks=2),
    User("GroupNorm", "layer", _behind_conv(GroupNorm(4)), SMALL),
    User("EvoNormS0 (large)", "layer, images that no block holds", _between_convs(EvoNormS0(8)), LARGE),
    User("EvoNormB0 (large)", "layer, images that no block holds", _between_convs(EvoNormB0()), LARGE),
    User(
        "DepthwiseConv1d (long)",
        "layer, series of a thousand hours",
        _forecast(PointwiseConv1d(64), DepthwiseConv1d(33)),
        (4, 1024),
    ),
    User("autoencoder --recipe features", "ready-made, on whitened images, spoiled in every way", _features),
    *(User(name, "ready-made, fitted by k-means", partial(_dictionary, name), trained=False) for name in FITTED),
    User("Conv2d (depthwise)", "layer, one channel a group", _behind_conv(Conv2d(16, 3, padding=1, groups=16)), SMALL),
    User("Conv2d (groups)", "layer, several channels a group, and groups with strides that differ", _behind_conv(*_GROUPED), SMALL),
    User("ConvTranspose2d", "layer, doubles height and width", _behind_conv(ConvTranspose2d(8, 2, stride=2)), SMALL),
    User("ConvTranspose2d (groups)", "layer, with groups and a stride for each axis", _behind_conv(ConvTranspose2d(8, 3, (2, 1), groups=4)), SMALL),
    User("LinearMap, Permute", "layers, which imported networks have", _behind_conv(LinearMap(3, 16, ((0, 1), (2,))), Permute((1, 0, 2))), SMALL),
    User("Graph", "layers that join values; several inputs and outputs", _graph, (2 * 3 * 16 * 16,)),
    User("gemm", "products of matrices, an op of every row; of kernel matrices only im2col's so far"),
    User("classify", "support vector machines, kernel ridge"),
    User("k-means", "dictionaries and first weights"),
    User("ladder --hopper", "teaching: one convolution in six kernels on the tensors of tensorcore bf16; nothing trains by them"),
)


class _Array:
    """A stand-in for a 1-D array without memory, with the attributes that `bind` reads."""

    ndim = 1

    def __init__(self, size: int, dtype: Any) -> None:
        self.size, self.dtype = size, np.dtype(dtype)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> _Array:
        return _Array(len(range(*part.indices(self.size))), self.dtype)

    def view(self, dtype: Any) -> _Array:
        return _Array(self.size * self.dtype.itemsize // np.dtype(dtype).itemsize, dtype)


def _record(user: User, batch: int, training: bool, fused: Sequence[str]) -> tuple[list[Step], Buf]:
    """The steps of a training step, or of an evaluation, and all weights; `fused`: the ops that layers may be put together for."""
    assert user.layers is not None
    shape = user.shape
    made = sized(user.layers(), shape)
    *body, last = fuse_nodes(wired(made), fused).nodes
    loss, several = last.layer, isinstance(made, Graph) and len(made.inputs) > 1
    tape = Tape(training, Sync(0, user.ranks, batch, 1 / user.ranks) if user.ranks > 1 else None)
    state, order = Buf("state", (8,), "int64", "state"), Buf("order", (batch,), "int32", "io")
    tape.examples = (order, state) if user.gathered else None
    x, y = tape.temp("batch", (batch, *shape)), tape.temp("batch labels", (batch,), getattr(loss, "label_dtype", "int32"))
    if not user.gathered:
        x = Buf("x", x.shape, home="io")
    elif len(shape) == 2:
        rows, targets, starts = Buf("rows", (2**20,), home="io"), Buf("targets", (2**16,), home="io"), Buf("starts", (2**16,), "int32", "io")
        tape.emit("gather_windows", [rows, targets, starts, order, state], [x, y], "input")
    else:
        tape.emit("gather", [Buf("images", (batch, *shape), "uint8", "io"), order, state], [x], "input", flip=False)
        if isinstance(loss, Losses):
            y = tape.temp("batch labels", (batch, len(loss.parts), 1), "int32")
        tape.emit("gather_labels", [Buf("labels", y.shape, "int32", "io"), order, state], [y], "input")
    inputs = unpack(tape, x, made.inputs, "inputs") if several else [x]
    outs, backward = trace_nodes(tape, Wired(tuple(body), last.reads, len(inputs)), inputs)
    value, dys = loss.build(tape, outs if len(outs) > 1 else outs[0], y if loss.needs_labels else tape.prepared or x, loss.kind)
    layout = ParameterLayout(parameters(made))
    weights, grads = Buf("all weights", (layout.size,), home="param"), Buf("all gradients", (layout.size,), home="grad")
    if training:
        backward(dys if len(outs) > 1 else [dys])
        total, average = (Buf(name, (layout.size,), home="state") for name in ("accumulated gradients", "average of the weights"))
        for part in range(1, user.parts + 1) if user.parts > 1 else ():
            result = grads if part == user.parts else total
            tape.emit("accumulate", [grads, total], [result], "update", weight=1 / user.parts, first=part == 1)
        moments = [Buf(f"optim.{name}", (layout.size,), home="state") for name in user.optimizer.moments]
        user.optimizer.record(tape, weights, grads, moments, Buf("rates", (1,), home="io"), state, layout.decayed)
        if user.ema:
            tape.emit("ema", [average, weights, state], [average], "update", decay=user.ema)
    sums = Buf("sums", (4,), "float64", "state")
    tape.emit("advance", [value, state, sums, *([tape.count] if tape.count else [])], [state, sums], "advance", count=batch)
    return merge(drop_dead(tape.steps), fused), weights


def _key(step: Step) -> tuple[Any, ...]:
    """Steps of one key run alike."""
    return step.op, *((buf.shape, buf.dtype) for buf in (*step.ins, *step.outs)), tuple(sorted(step.attrs.items()))


def _bound(item: Planned, layout: str) -> Sequence[Any]:
    """The launches of a planned step."""
    ins, outs = ([_Array(numel(buf.shape), numpy_dtype(buf.dtype)) for buf in bufs] for bufs in (item.step.ins, item.step.outs))
    packed = _Array(item.packed[2], numpy_dtype(item.packed[0].dtype)) if item.packed else None
    scratch = _Array(item.how.scratch_bytes, np.uint8) if item.scratch else None
    call = bare_call(item.step, layout, item.how.tile)
    return item.how.impl.bind(replace(call, ins=tuple(ins), outs=tuple(outs), packed=packed, scratch=scratch))


def _of_row(row: Row, arch: str, recorded: Callable[..., tuple[list[Step], Buf]]) -> Iterator[Use]:
    """What networks launch in a row on an architecture; a step that has been met before is left out."""
    known: dict[str, tuple[Row, Callable[[Step], Resolution]]] = {}
    for user in USERS:
        if user.dwconv not in known:
            chosen = row if user.dwconv == "auto" else with_dwconv(row, user.dwconv)
            # Ranks add up by another library, or through the host: no kernel of this package.
            chosen = replace(chosen, fallbacks=(*chosen.fallbacks, ("ranks", {"all_reduce": Impl(lambda call: [])})))
            known[user.dwconv] = chosen, _remembering(resolver(chosen, H200, capability_of(arch)))
        (chosen, resolve), seen = known[user.dwconv], set()
        for batch in user.batches if user.layers else ():
            for training in (True, False) if user.trained else (False,):
                recordings = [recorded(user, batch, training, fused) for fused in (tuple(chosen.ops), ())]
                if [_key(step) for step in recordings[0][0]] == [_key(step) for step in recordings[1][0]]:
                    del recordings[1]  # nothing was fused
                for steps, weights in recordings:
                    for item in lower(steps, row.layout, resolve, weights, row.store).steps:
                        key = _key(item.step)
                        if key not in seen:
                            seen.add(key)
                            yield from (Use(user, row, arch, item.step.op, launch) for launch in _bound(item, row.layout))
        if user.name == "gemm":
            step = Step("gemm", (Buf("a", (1024, 512), row.store), Buf("b", (1024, 512), row.store)), (Buf("c", (1024, 1024), row.store),))
            how = resolve(step)
            scratch = Buf("scratch", (how.scratch_bytes,), "uint8") if how.scratch_bytes else None
            yield from (Use(user, row, arch, "gemm", launch) for launch in _bound(Planned(step, how, scratch), row.layout))


def _remembering(resolve: Callable[[Step], Resolution]) -> Callable[[Step], Resolution]:
    """`resolve`, asked once for all steps that run alike."""
    known: dict[Any, Resolution] = {}

    def remembered(step: Step) -> Resolution:
        key = _key(step)
        if key not in known:
            known[key] = resolve(step)
        return known[key]

    return remembered


@cache
def uses() -> tuple[Use, ...]:
    """Every launch of `USERS`: by row, architecture and user in order; a user's steps of one shape once in each row."""
    recorded = cache(_record)
    found: list[Use] = []
    for row in MODES.values():
        for arch in _architectures(row):
            with as_if_on(arch):
                found += _of_row(row, arch, recorded)
                if row.mode == "im2col":
                    found += _kernel_matrices(row, arch)
                if (row.mode, row.precision, arch) == ("tensorcore", "bf16", "90a"):
                    found += _hopper_ladder(row, arch)
    return tuple(found)


def _architectures(row: Row) -> tuple[str, ...]:
    """The architectures that a row is planned for, Hopper's first; none for a row of the host."""
    return () if row.device != "gpu" else ("90a", "80") if row.mode == "tensorcore" else ("90a", "75")


def _kernel_matrices(row: Row, arch: str) -> list[Use]:
    """What `nbcnn.classify.gpu` launches; its arrays and kernels are those of the fp32 rows."""
    classify = next(user for user in USERS if user.name == "classify")
    f, d, i, h = (_Array(2**20, kind) for kind in (np.float32, np.float64, np.int32, np.uint16))
    offsets, halves = _Array(45, np.int64), (h, f, 1024)
    pairs = (f, offsets, i, d, f, f)
    made = [
        ("rows", rows.launch_place_rows(f, i, f, 1024, 1024, 1024)),
        ("rows", rows.launch_moments(f, i, d, d, d, 1024, 1024, 1024, 64)),
        ("rows", rows.launch_standardise(f, i, f, f, 1024, 1024, 1024)),
        ("rows", rows.launch_norms(f, d, f, f, 1024, 1024)),
        ("rows", rows.launch_copy(f, f, 1024, 256, to=(1024, 0))),
        ("rows", rows.launch_isolate(f, 1024, 1000)),
        ("mirror", mirror.launch_apart(f, f, d, 1024, 1024)),
        ("mirror", mirror.launch_add_values(f, f, 1024, 1024, 1024)),
        ("mirror", mirror.launch_add_transpose(f, 1024, 1024)),
        ("mirror", mirror.launch_weigh(f, f, f, 1024, 1024, 1024, True)),
        ("process", process.launch_blur(f, i, 1024, (16, 8, 8), 1024)),
        ("process", process.launch_signed_root(f, i, 1024, 1024, 1024)),
        ("process", process.launch_centred(f, i, f, f, 1024, 1024, 1024)),
        ("process", process.launch_channel_products(f, d, 1024, 16, 64)),
        ("process", process.launch_whiten(f, f, f, i, 1024, 16, 64, 1024)),
        ("process", process.launch_unit_rows(f, i, f, 1024, 1024, 1024)),
        ("gemm", launch_gemm_nt(f, f, f, 1024, 1024, 1024)),
        ("rbf", launch_rbf(f, f, f, 1024, 1024, 0.1)),
        ("smo", smo.launch_smo((*pairs, i, f), 45, 10_048, 10.0, 1e-3, 20_000)),
        ("smo", smo.launch_refresh(pairs, 45, 10_048)),
        ("votes", launch_product(f, f, f, 1024, 45, 1024, (1024, 1024, 45))),
    ]
    if arch == "90a":
        made += [("rows", rows.launch_halves(f, h, 64.0, 2**20)), ("rbf", launch_gram(halves, halves, f, (1024, 1024, 1024), 1024, 0.1, 1.0, 132))]
    means = next(user for user in USERS if user.name == "k-means")
    products = [
        ("gemm", launch_gemm_nt(f, f, f, 1024, 1024, 112)),
        ("winners", launch_keep_winner(f, 1024, 1024)),
        ("draw", draw.launch_draw_windows(_Array(2**20, np.uint8), i, f, f, f, 1024, (3, 32, 32), (6, 6), 112)),
        ("draw", draw.launch_draw_windows(f, i, f, f, f, 1024, (96, 13, 13), (3, 3), 864)),
        ("draw", draw.launch_normal_contrast(f, 1024, 108, 112, 1e-4)),
        ("rows", rows.launch_moments(f, i, d, d, d, 1024, 112, 112, 64)),
        ("rows", rows.launch_norms(f, d, f, f, 1024, 112)),
        ("rows", rows.launch_copy(f, f, 1024, 112, to=(112, 0))),
        ("process", process.launch_centred(f, i, f, f, 1024, 112, 112)),
        ("process", process.launch_channel_products(f, d, 1024, 112, 1)),
        ("process", process.launch_unit_rows(f, i, f, 1024, 112, 112)),
    ]
    return [Use(classify, row, arch, op, launch) for op, launch in made] + [Use(means, row, arch, op, launch) for op, launch in products]


def _hopper_ladder(row: Row, arch: str) -> list[Use]:
    """The steps of `nbcnn.ops.conv.hopper_ladder`, on 3×3 filters of 64 channels."""
    ladder = next(user for user in USERS if user.name == "ladder --hopper")
    images, filters, bias = (1, 64, 8, 8), (64, 64, 3, 3), (64,)
    arrays = (_Array(numel(images), np.uint16), _Array(numel(filters), np.uint16), _Array(64, np.float32))
    found = []
    for each in hopper_ladder.STEPS:
        count = 3 if each.op == "conv_relu_fprop" else 2
        shapes = (images, filters, bias)[:count]
        call = Call(each.op, arrays[:count], (_Array(numel(images), np.uint16),), shapes, (images,), {"stride": 1, "pad": 1}, "NHWC")
        packed = _Array(pack(call).size, np.uint16)
        found += [Use(ladder, row, arch, each.op, launch) for launch in each.impl.bind(replace(call, packed=packed))]
    return found


def files() -> dict[str, str]:
    """The file of every module of `nbcnn.ops`."""
    root = Path(package.__file__).parent
    inside = [path.relative_to(root.parents[1]) for path in sorted(root.rglob("*.py"))]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path.as_posix() for path in inside}


def kernels() -> set[Kernel]:
    """Every kernel of `nbcnn.ops`: functions under a decorator `jit` that does not make a device function.

    A module may hand functions to `jit` under names of their own (elementwise.py): whoever plans their ops finds them.
    """
    root = Path(package.__file__).parents[2]
    return {(module, name) for module, file in files().items() for name in kernels_of(ast.parse((root / file).read_text()), "")}


def kernels_of(node: ast.AST, outside: str) -> Iterator[str]:
    """Qualified names of the kernels in a part of a module; `outside`: what stands before them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if any(_makes_kernel(decorator) for decorator in child.decorator_list):
                yield outside + child.name
            yield from kernels_of(child, f"{outside}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from kernels_of(child, f"{outside}{child.name}.")
        else:
            yield from kernels_of(child, outside)


def _makes_kernel(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func).rpartition(".")[2] != "jit":
        return False
    return not any(keyword.arg == "device" for keyword in decorator.keywords)
