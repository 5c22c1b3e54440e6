"""This module defines the fused layers, and the rules by which they replace plain layers.

`fuse` rewrites a list of named layers, `fuse_nodes` a graph of them: wherever the plain layers of a rule follow each other, one fused layer takes
their place, if the row of the op table has its ops. In a graph they follow each other where nobody else reads what is between them. A fused layer is
an ordinary layer: its parameters and its name are those of
the convolution inside, its reference is the composition of its parts, and it records them one by one where a shape does
not fit (an odd image cannot be pooled in a convolution's epilogue).

    Conv2d, ReLU, MaxPool2d      ConvReLUPool    writes the pooled output and the argmax of each window, two bits
    Conv2d, ReLU                 ConvReLU
    Conv2d, EvoNormS0 or B0      ConvEvoNorm     writes the normalised output, and the convolution's own for the gradients
    Conv2d, BatchNorm2d, ReLU    ConvBatchNorm   in inference the norm is folded into filters and bias; in training the norm takes the ReLU
    Conv2d, BatchNorm2d          ConvBatchNorm   likewise
    BatchNorm2d, ReLU            BatchNormReLU   the gradient makes the ReLU's input once more; ReLU6, HardSwish, Swish, GELU likewise
    Conv2d, BatchNorm2d, GELU    ConvBatchNormGELU   the convolution, then a BatchNormGELU; ReLU6, HardSwish and Swish likewise
    BatchNorm2d, Add, ReLU       BatchNormAddReLU    of two values; with a Conv2d before the norm ConvBatchNormAddReLU
    Residual, ReLU               ResidualReLU    of a body that ends in a BatchNorm2d, which then adds the residual's input and applies the ReLU
    Linear, ReLU                 LinearReLU      a 1×1 ConvReLU of 1×1 images
    Linear, Sigmoid              LinearSigmoid
    Linear, Swish                LinearSwish     in inference alone: the gradient of a Swish reads the linear layer's output
    Upsample2d, Conv2d, MSE      UpConvMSE       neither the doubled image nor the network's output is ever stored
    Upsample2d, Conv2d, ReLU     UpConvReLU
    Upsample2d, Conv2d           UpConv
    DepthwiseConv1d              DepthwiseTogether   both gradients from one load of x and dy; StateSpaceConv1d likewise
    PointwiseConv1d, GLU         GatedPointwise  stores the gated series, and at the end of a Residual's body adds its input on the way
    Add, ReLU                    AddReLU         of two values; one step of the backward pass masks the gradient for both
    Residual, LastStep           LastOfResidual  the layers at the body's end that treat every hour by itself compute the last hour only

The body of a Residual is fused as a list of its own.

In the backward pass a fused layer multiplies its input's gradient by the ReLU mask of the layer that made that input (`Buf.after_relu`): the
gradient arrives there masked, and the pass that plain layers need for it vanishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from nbcnn.nn.activations import GELU, HardSwish, ReLU, ReLU6, Sigmoid, Swish
from nbcnn.nn.fuse_norms import (
    BatchNormAddReLU,
    BatchNormGELU,
    BatchNormHardSwish,
    BatchNormReLU,
    BatchNormReLU6,
    BatchNormSwish,
    ConvBatchNorm,
    ConvBatchNormAddReLU,
    ConvBatchNormGELU,
    ConvBatchNormHardSwish,
    ConvBatchNormReLU6,
    ConvBatchNormSwish,
    ResidualReLU,
    ends_in_norm,
    exact,
    takes_norm,
)
from nbcnn.nn.fuse_series import DepthwiseTogether, GatedPointwise, LastOfResidual, ends_hourly, few_taps, gates
from nbcnn.nn.joins import Add, Joined
from nbcnn.nn.layer import Built, Param, known
from nbcnn.nn.layers import Conv2d, Linear, Residual, add_gradient, add_input
from nbcnn.nn.losses import MSE
from nbcnn.nn.norms import BatchNorm2d, EvoNormB0, EvoNormS0
from nbcnn.nn.resampling import MaxPool2d, Upsample2d
from nbcnn.nn.series_layers import GLU, DepthwiseConv1d, LastStep, PointwiseConv1d, StateSpaceConv1d
from nbcnn.plan.graph import Buf, Named, Node, ShapeError, Tape, Wired, chain, named, trace

FEW_TAPS = 31
"""C·R·S up to which a pooled layer's wgrad reads the pooled gradient itself; beyond, unpooling it once serves wgrad and dgrad."""


@dataclass(frozen=True)
class _Fused:
    """`parts`: the plain layers with their names, in order."""

    parts: tuple[Named, ...]
    ops: ClassVar[tuple[str, ...]]

    @property
    def conv(self) -> Any:
        """The convolution (or linear layer) inside."""
        return next(layer for _, layer in self.parts if isinstance(layer, Conv2d | Linear))

    @property
    def scope(self) -> str:
        """The convolution's name, which is the prefix of the parameters' names."""
        return next(name for name, layer in self.parts if isinstance(layer, Conv2d | Linear))

    def params(self) -> dict[str, Param]:
        return self.conv.params()

    def _weights(self, tape: Tape) -> tuple[Buf, Buf]:
        params = self.params()
        return tape.param(self.scope, "weight", params["weight"].shape), tape.param(self.scope, "bias", params["bias"].shape)

    def _grads(self, tape: Tape) -> list[Buf]:
        return [tape.grad(buf) for buf in self._weights(tape)]


def _unmasked(tape: Tape, dy: Buf, y: Buf, scope: str) -> Buf:
    """dy where y > 0, else 0: a step is recorded only if the following layer has not masked dy already."""
    if dy.masked:
        return dy
    dz = tape.temp(f"{scope}.dz", y.shape, masked=True)
    tape.emit("relu_dgrad", [dy, y], [dz], scope)
    return dz


def _dgrad(tape: Tape, op: str, dy: Buf, w: Buf, x: Buf, scope: str, **attrs: int) -> Buf:
    """Record x's gradient by `op`, masked by the ReLU that x came out of, if any."""
    dx = tape.temp(f"{scope}.dx", x.shape, masked=x.after_relu)
    if x.after_relu:
        tape.emit(f"{op}_relu", [dy, w, x], [dx], scope, **attrs)
    else:
        tape.emit(op, [dy, w], [dx], scope, **attrs)
    return dx


@dataclass(frozen=True)
class ConvReLU(_Fused):
    """relu(conv(x) + b) in one launch."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = ("conv_relu_fprop", "conv_dgrad_relu")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, (w, b) = self.conv.shape(x, scope), self._weights(tape)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y = tape.temp(f"{scope}.y", shape.y_shape, after_relu=True)
        tape.emit("conv_relu_fprop", [x, w, b], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dz = _unmasked(tape, dy, y, scope)
            tape.emit("conv_wgrad", [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, "conv_dgrad", dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class LinearReLU(_Fused):
    """relu(x wᵀ + b) in one launch."""

    kind: ClassVar[str] = "linear"
    ops: ClassVar[tuple[str, ...]] = ConvReLU.ops
    activation: ClassVar[str] = "relu"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        linear, (w, b) = self.conv, self._weights(tape)
        if x.shape[1:] != (linear.in_features,):
            raise ShapeError(f"{scope} takes (N, {linear.in_features}), got {x.shape}; Flatten makes vectors of images")
        n, k, c = x.shape[0], linear.out_features, known(linear)
        pixels, filters, attrs = x.reshaped((n, c, 1, 1)), w.reshaped((k, c, 1, 1)), {"stride": 1, "pad": 0}
        y = tape.temp(f"{scope}.y", (n, k, 1, 1), after_relu=self.activation == "relu")
        tape.emit(f"conv_{self.activation}_fprop", [pixels, filters, b], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dz = self._before(tape, dy.reshaped(y.shape), y, scope)
            dw, db = self._grads(tape)
            tape.emit("conv_wgrad", [pixels, dz], [dw.reshaped(filters.shape), db], scope, **attrs)
            return _dgrad(tape, "conv_dgrad", dz, filters, pixels, scope, **attrs).reshaped(x.shape)

        return y.reshaped((n, k)), backward

    def _before(self, tape: Tape, dy: Buf, y: Buf, scope: str) -> Buf:
        """Record the gradient of the activation's input."""
        return _unmasked(tape, dy, y, scope)


@dataclass(frozen=True)
class LinearSigmoid(LinearReLU):
    """sigmoid(x wᵀ + b) in one launch."""

    ops: ClassVar[tuple[str, ...]] = ("conv_sigmoid_fprop", "conv_dgrad_relu")
    activation: ClassVar[str] = "sigmoid"

    def _before(self, tape: Tape, dy: Buf, y: Buf, scope: str) -> Buf:
        dz = tape.temp(f"{scope}.dz", y.shape)
        tape.emit("sigmoid_dgrad", [dy, y], [dz], scope)
        return dz


@dataclass(frozen=True)
class LinearSwish(LinearReLU):
    """swish(x wᵀ + b) in one launch, in inference; in training the plain layers, because swish_dgrad reads x wᵀ + b."""

    ops: ClassVar[tuple[str, ...]] = ("conv_swish_fprop", "conv_dgrad_relu")
    activation: ClassVar[str] = "swish"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return trace(tape, self.parts, x) if tape.training else super().build(tape, x, scope)


@dataclass(frozen=True)
class ConvEvoNorm(_Fused):
    """EvoNorm-S0 or -B0 of conv(x) + b. In inference the convolution's own output is never stored.

    In training it is kept: both norms' gradients read it, and it cannot be read off y, because γ·x·σ(v·x) takes most values twice (B0 the
    same below its least deviation). So training keeps x, the convolution's output and y, as the plain layers do.

    A B0 whose statistics are taken over all ranks stays a layer of its own: the ranks add their sums in the middle of it.
    """

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = (
        "conv_evonorm_s0_fprop",
        "conv_evonorm_s0_infer",
        "conv_evonorm_b0_fprop",
        "conv_evonorm_b0_infer",
        "conv_dgrad_relu",
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        (_, conv), (name, norm) = self.parts
        if tape.sync is not None and isinstance(norm, EvoNormB0):
            return trace(tape, self.parts, x)
        shape, (w, b) = conv.shape(x, scope), self._weights(tape)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y, z = tape.temp(f"{name}.y", shape.y_shape), tape.temp(f"{scope}.y", shape.y_shape)
        emit, norm_backward = norm.record(tape, z, y, name)

        def op(of_norm: str, ins: list[Buf], outs: list[Buf], **more: Any) -> None:
            if tape.training:
                tape.emit(f"conv_{of_norm}", [x, w, b, *ins[1:]], [outs[0], z, *outs[1:]], scope, **attrs, **more)
            else:
                tape.emit(f"conv_{of_norm.replace('fprop', 'infer')}", [x, w, b, *ins[1:]], outs[:1], scope, **attrs, **more)

        emit(op)

        def backward(dy: Buf) -> Buf:
            dz = norm_backward(dy)
            tape.emit("conv_wgrad", [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, "conv_dgrad", dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class ConvReLUPool(_Fused):
    """2×2 maxpool of relu(conv(x) + b); keeps the pooled output and a 2-bit index, never what was pooled."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = ("conv_relu_pool_fprop", "unpool", "conv_dgrad_relu", "conv_pool_wgrad")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, (w, b) = self.conv.shape(x, scope), self._weights(tape)
        if shape.P % 2 or shape.Q % 2:
            return trace(tape, self.parts, x)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y = tape.temp(f"{scope}.y", (shape.N, shape.K, shape.P // 2, shape.Q // 2), after_relu=True)
        index = tape.temp(f"{scope}.index", (shape.N, -(-shape.K // 4), shape.P // 2, shape.Q // 2), "uint8")
        tape.emit("conv_relu_pool_fprop", [x, w, b], [y, index], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dp = _unmasked(tape, dy, y, scope)
            dz = tape.temp(f"{scope}.dz", shape.y_shape)
            tape.emit("unpool", [dp, index], [dz], scope)  # dead if nobody wants dx and wgrad reads dp
            if shape.C * shape.R * shape.S <= FEW_TAPS:
                tape.emit("conv_pool_wgrad", [x, dp, index], self._grads(tape), scope, **attrs)
            else:
                tape.emit("conv_wgrad", [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, "conv_dgrad", dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class UpConv(_Fused):
    """conv 3×3 of the image doubled by nearest neighbour, without the doubled image."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = ("upconv_fprop", "upconv_dgrad", "upconv_dgrad_relu", "upconv_wgrad")
    relu: ClassVar[bool] = False

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        w, b = self._weights(tape)
        y = tape.temp(f"{scope}.y", self.conv.shape(x, scope, doubled=True).y_shape, after_relu=self.relu)
        tape.emit("upconv_relu_fprop" if self.relu else "upconv_fprop", [x, w, b], [y], scope)

        def backward(dy: Buf) -> Buf:
            dz = _unmasked(tape, dy, y, scope) if self.relu else dy
            tape.emit("upconv_wgrad", [x, dz], self._grads(tape), scope)
            return _dgrad(tape, "upconv_dgrad", dz, w, x, scope)

        return y, backward


@dataclass(frozen=True)
class UpConvReLU(UpConv):
    """relu of `UpConv`."""

    ops: ClassVar[tuple[str, ...]] = ("upconv_relu_fprop", "upconv_dgrad", "upconv_dgrad_relu", "upconv_wgrad")
    relu: ClassVar[bool] = True


@dataclass(frozen=True)
class UpConvMSE(_Fused):
    """The mean squared error of `UpConv`, a loss: its output exists only as the gradient of that error."""

    kind: ClassVar[str] = "mse"
    needs_labels: ClassVar[bool] = False
    ops: ClassVar[tuple[str, ...]] = ("upconv_mse_fprop", "upconv_dgrad", "upconv_dgrad_relu", "upconv_wgrad")

    def build(self, tape: Tape, x: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        w, b = self._weights(tape)
        doubled = self.conv.shape(x, self.scope, doubled=True).y_shape
        if doubled != target.shape:
            raise ShapeError(f"{scope}: the network makes {doubled}, the target is {target.shape}")
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", doubled)
        tape.emit("upconv_mse_fprop", [x, w, b, target], [value, dy], self.scope)
        if not tape.training:
            return value, dy
        tape.emit("upconv_wgrad", [x, dy], self._grads(tape), self.scope)
        return value, _dgrad(tape, "upconv_dgrad", dy, w, x, self.scope)


@dataclass(frozen=True)
class AddReLU:
    """relu(a + b) in one launch; of more than two values the plain layers. `parts`: the two layers with their names."""

    parts: tuple[Named, ...]
    kind: ClassVar[str] = "add"
    joins: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]] = ("add_relu",)

    @property
    def scope(self) -> str:
        """The name of the sum."""
        return self.parts[0][0]

    def params(self) -> dict[str, Param]:
        return {}

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        (name, add), (after, relu) = self.parts
        if len(xs) != 2 or xs[0].shape != xs[1].shape:
            total, add_backward = add.build(tape, xs, name)
            y, relu_backward = relu.build(tape, total, after)
            return y, lambda dy: add_backward(relu_backward(dy))
        y = tape.temp(f"{scope}.y", xs[0].shape, after_relu=True)
        tape.emit("add_relu", xs, [y], scope)

        def backward(dy: Buf) -> list[Buf]:
            dz = _unmasked(tape, dy, y, scope)
            # The mask is y's: as the gradient of a and of b it is not called masked.
            return [replace(dz, base=dz.root, masked=False)] * 2

        return y, backward


@dataclass(frozen=True)
class FusedResidual:
    """A Residual with the layers of its body fused; they keep their names."""

    body: tuple[Named, ...]
    inner: dict[str, Param]
    kind: ClassVar[str] = "residual"

    def params(self) -> dict[str, Param]:
        return self.inner

    def named_body(self, scope: str) -> list[Named]:
        """The layers of the body with their names."""
        return list(self.body)

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        *before, (name, last) = self.body
        if not isinstance(last, GatedPointwise) or not last.takes(x):
            return add_input(tape, self.body, x, scope)
        inner, before_backward = trace(tape, before, x)
        y, backward = last.build(tape, inner, name, plus=x)
        return y, lambda dy: add_gradient(tape, before_backward(backward(dy)), dy, scope)


def _always(parts: Sequence[Any]) -> bool:
    return True


def _plain(parts: Sequence[Any]) -> bool:
    """Whether the convolution (or linear layer) has a bias and is not general, and pooling, where there is any, takes 2×2 windows."""
    conv, *_, last = parts
    pools = not isinstance(last, MaxPool2d) or (last.kernel_size, last.stride or last.kernel_size, last.padding) == (2, 2, 0)
    return conv.bias and pools and not getattr(conv, "general", False)


def _folds(parts: Sequence[Any]) -> bool:
    """Whether the image is doubled and a 3×3 convolution keeps its size: the algebra of the folded form holds for these alone."""
    up, conv, *_ = parts
    return up.scale_factor == 2 and conv.bias and not conv.general and conv.kernel_size in (3, (3, 3)) and (conv.stride, conv.padding) == (1, 1)


@dataclass(frozen=True)
class Rule:
    """`kinds` in a row become `fused`, if `fits` says that their settings allow it."""

    kinds: tuple[type, ...]
    fused: Any
    fits: Callable[[Sequence[Any]], bool]


RULES = (
    Rule((Conv2d, ReLU, MaxPool2d), ConvReLUPool, _plain),
    Rule((Upsample2d, Conv2d, MSE), UpConvMSE, _folds),
    Rule((Upsample2d, Conv2d, ReLU), UpConvReLU, _folds),
    Rule((Upsample2d, Conv2d), UpConv, _folds),
    Rule((Conv2d, ReLU), ConvReLU, _plain),
    Rule((Conv2d, EvoNormS0), ConvEvoNorm, _plain),
    Rule((Conv2d, EvoNormB0), ConvEvoNorm, _plain),
    Rule((Conv2d, BatchNorm2d, Add, ReLU), ConvBatchNormAddReLU, takes_norm),
    Rule((Conv2d, BatchNorm2d, ReLU), ConvBatchNorm, takes_norm),
    Rule((Conv2d, BatchNorm2d, GELU), ConvBatchNormGELU, exact),
    Rule((Conv2d, BatchNorm2d, ReLU6), ConvBatchNormReLU6, takes_norm),
    Rule((Conv2d, BatchNorm2d, HardSwish), ConvBatchNormHardSwish, takes_norm),
    Rule((Conv2d, BatchNorm2d, Swish), ConvBatchNormSwish, takes_norm),
    Rule((Conv2d, BatchNorm2d), ConvBatchNorm, takes_norm),
    Rule((BatchNorm2d, Add, ReLU), BatchNormAddReLU, _always),
    Rule((BatchNorm2d, ReLU), BatchNormReLU, _always),
    Rule((BatchNorm2d, GELU), BatchNormGELU, exact),
    Rule((BatchNorm2d, ReLU6), BatchNormReLU6, _always),
    Rule((BatchNorm2d, HardSwish), BatchNormHardSwish, _always),
    Rule((BatchNorm2d, Swish), BatchNormSwish, _always),
    Rule((Residual, ReLU), ResidualReLU, ends_in_norm),
    Rule((FusedResidual, ReLU), ResidualReLU, ends_in_norm),
    Rule((Linear, ReLU), LinearReLU, _plain),
    Rule((Linear, Sigmoid), LinearSigmoid, _plain),
    Rule((Linear, Swish), LinearSwish, _plain),
    Rule((Add, ReLU), AddReLU, _always),
    Rule((Residual, LastStep), LastOfResidual, ends_hourly),
    Rule((FusedResidual, LastStep), LastOfResidual, ends_hourly),
    Rule((PointwiseConv1d, GLU), GatedPointwise, gates),
    Rule((DepthwiseConv1d,), DepthwiseTogether, few_taps),
    Rule((StateSpaceConv1d,), DepthwiseTogether, few_taps),
)
"""The rules, tried in this order at every position of the list."""


def _inside(name: str, layer: Any, ops: Container[str]) -> Any:
    """A Residual with its body fused, if there is something to fuse; any other layer as it is."""
    if type(layer) is not Residual:
        return layer
    plain = named(layer.body, f"{name}.")
    body = fuse(plain, ops)
    return layer if body == plain else FusedResidual(tuple(body), layer.params())


def fuse(layers: Sequence[Named], ops: Container[str]) -> list[Named]:
    """A list of `layers` with the fused layers whose ops are all among `ops`."""
    return [(node.name, node.layer) for node in fuse_nodes(chain(layers), ops).nodes]


def fuse_nodes(wired: Wired, ops: Container[str]) -> Wired:
    """`wired` with the fused layers whose ops are all among `ops`.

    Each stands where the first of its parts stood; one that reads further values on its way, where the last stood, when they have been made.
    """
    nodes = [node._replace(layer=_inside(node.name, node.layer, ops)) for node in wired.nodes]
    readers = Counter(at for node in nodes for at in node.reads) + Counter(wired.outputs)
    reader, place = {at: node for node in nodes for at in node.reads}, {node.writes: at for at, node in enumerate(nodes)}
    made, gone = dict[int, Node](), set[int]()
    for at, node in enumerate(nodes):
        if node.writes in gone:
            continue
        made[at] = node
        for rule in RULES:
            parts = _following(node, rule.kinds, readers, reader, gone)
            if parts and rule.fits([part.layer for part in parts]) and all(op in ops for op in rule.fused.ops):
                layer = rule.fused(tuple((part.name, part.layer) for part in parts))
                others = [each for before, part in pairwise(parts) for each in part.reads if each != before.writes]
                name = parts[-1].name if rule.fused is UpConvMSE else layer.scope
                del made[at]
                made[place[parts[-1].writes] if others else at] = Node(name, layer, (*node.reads, *others), parts[-1].writes)
                gone |= {part.writes for part in parts}
                break
    return replace(wired, nodes=tuple(made[at] for at in sorted(made)))


def _following(node: Node, kinds: Sequence[type], readers: Counter[int], reader: dict[int, Node], gone: set[int]) -> list[Node]:
    """`node` and the nodes that follow, if their layers are of these `kinds`: each is the only reader of what the one before it writes; else none.

    Behind the first, a sum of two values may be among them (`Add`), whose other value the fused layer reads, too; and nobody else reads two.
    """
    parts = [node]
    while type(parts[-1].layer) is kinds[len(parts) - 1]:
        if len(parts) == len(kinds):
            return parts
        after = reader.get(parts[-1].writes)
        if readers[parts[-1].writes] != 1 or after is None or after.writes in gone or len(after.reads) > (2 if type(after.layer) is Add else 1):
            break
        parts.append(after)
    return []
