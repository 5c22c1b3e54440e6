"""References of the fused convolutions: each is the composition of the plain ops that it replaces.

    conv_relu_fprop        y = relu(conv(x, w) + b); likewise of every activation, conv_NAME_fprop with its parameters
    conv_relu_pool_fprop   y = maxpool 2×2 of relu(conv(x, w) + b), index = where each maximum was (2 bits)
    unpool                 dx = dy at the place that index says, zero elsewhere
    conv_dgrad_relu        dx = dgrad(dy, w) where x > 0, else 0: x is what the layer read, the output of a ReLU
    conv_dgrad_add_relu    dx = dgrad(dy, w) + more where x > 0, else 0: more is a second gradient of x (wgmma alone; `nbcnn.plan.sums`)
    conv_pool_wgrad        dw, db of conv from the gradient behind a pooling layer: wgrad(x, unpool(dy, index))
    upconv_fprop           y = conv 3×3 pad 1 (upsample 2×(x), w) + b
    upconv_relu_fprop      y = relu(upconv(x, w) + b); likewise of every activation, upconv_NAME_fprop with its parameters
    upconv_mse_fprop       loss = mean((upconv(x, w) + b − target)²) and its gradient dy; y itself is not kept
    upconv_dgrad           dx from dy (N,K,2H,2W), back through the upsampling
    upconv_dgrad_relu      the same where x > 0
    upconv_wgrad           dw, db from x (N,C,H,W) and dy (N,K,2H,2W)

The pooled index packs four channels into a byte: channel 4·k+j of index (N, ⌈K/4⌉, P/2, Q/2) is bits 2j and 2j+1 of its
byte k, with value 2·row + column inside the window. Ties, and windows without a positive element, give the first place.

Their signatures; images NHWC only:

    conv_relu_fprop       x, w, b -> y                                                        stride, pad
    conv_relu_pool_fprop  x, w, b -> y (N,K,P/2,Q/2), index (N,K/4,P/2,Q/2) uint8             stride, pad
    unpool                dy (N,K,P,Q), index -> dx (N,K,2P,2Q)
    conv_dgrad_relu       dy, w, x -> dx                                                      stride, pad
    conv_dgrad_add_relu   dy, w, x, more -> dx                                                stride, pad
    conv_pool_wgrad       x, dy (N,K,P/2,Q/2), index -> dw, db                                stride, pad
    upconv_fprop          x (N,C,H,W), w (K,C,3,3), b -> y (N,K,2H,2W)                        upconv_relu_fprop likewise
    upconv_mse_fprop      x, w, b, target (N,K,2H,2W) -> loss () float64, dy (N,K,2H,2W)
    upconv_dgrad          dy (N,K,2H,2W), w -> dx (N,C,H,W)                                   upconv_dgrad_relu  dy, w, x -> dx
    upconv_wgrad          x, dy -> dw, db
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.table import ACTIVATIONS, activated_convs
from nbcnn.ops.conv.reference import conv_dgrad, conv_fprop, conv_wgrad
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.plan.op import Add, Loss, Map, Mask, Op, Pool, Unpool
from nbcnn.plan.shapes import ConvShape, numel


def activated(activation: Activation) -> dict[Op, Callable[..., None]]:
    """The references of conv_NAME_fprop and upconv_NAME_fprop."""

    def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, *, stride: int, pad: int, **parameters: float) -> None:
        """y (N,K,P,Q) = f(conv(x, w) + b)."""
        conv_fprop(x, w, b, y, stride=stride, pad=pad)
        activation.fprop(y.copy(), y, **parameters)

    def of_doubled(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, **parameters: float) -> None:
        """y (N,K,2H,2W) = f(upconv(x, w) + b)."""
        upconv_fprop(x, w, b, y)
        activation.fprop(y.copy(), y, **parameters)

    made = dict(zip(activated_convs(activation.name), (reference, of_doubled), strict=True))
    for op, each in made.items():
        each.__name__ = str(op)
    return made


ACTIVATED = {op: reference for each in ACTIVATIONS.values() for op, reference in activated(each).items()}
"""The convolutions with an activation in their epilogue (activations/table.py)."""


def conv_relu_pool_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, index: np.ndarray, *, stride: int, pad: int) -> None:
    """y (N,K,P/2,Q/2) and index (N,⌈K/4⌉,P/2,Q/2) uint8 of relu(conv(x, w) + b), whose P and Q must be even."""
    n, k, p, q = y.shape
    a = np.empty((n, k, 2 * p, 2 * q), x.dtype)
    ACTIVATED[Op("conv", "fprop", after=(Map("relu"),))](x, w, b, a, stride=stride, pad=pad)
    windows = _windows(a)
    place = windows.argmax(4)
    y[...] = np.take_along_axis(windows, place[..., None], 4)[..., 0]
    index[...] = pack_index(place)


def unpool(dy: np.ndarray, index: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,K,2P,2Q) = dy (N,K,P,Q) at the place in each 2×2 window that index (N,⌈K/4⌉,P,Q) says, else 0."""
    n, k, p, q = dy.shape
    windows = np.where(unpack_index(index, k)[..., None] == np.arange(4), dy[..., None], 0)
    dx[...] = windows.reshape(n, k, p, q, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(dx.shape)


def conv_dgrad_relu(dy: np.ndarray, w: np.ndarray, x: np.ndarray, dx: np.ndarray, *, stride: int, pad: int) -> None:
    """dx (N,C,H,W) = dgrad(dy, w) where x > 0, else 0."""
    conv_dgrad(dy, w, dx, stride=stride, pad=pad)
    dx *= x > 0


def conv_dgrad_add_relu(dy: np.ndarray, w: np.ndarray, x: np.ndarray, more: np.ndarray, dx: np.ndarray, *, stride: int, pad: int) -> None:
    """dx (N,C,H,W) = dgrad(dy, w) + more where x > 0, else 0."""
    conv_dgrad(dy, w, dx, stride=stride, pad=pad)
    dx += more
    dx *= x > 0


def conv_pool_wgrad(x: np.ndarray, dy: np.ndarray, index: np.ndarray, dw: np.ndarray, db: np.ndarray, *, stride: int, pad: int) -> None:
    """dw, db from x and the gradient dy (N,K,P/2,Q/2) behind the pooling."""
    n, k, p, q = dy.shape
    dz = np.empty((n, k, 2 * p, 2 * q), dy.dtype)
    unpool(dy, index, dz)
    conv_wgrad(x, dz, dw, db, stride=stride, pad=pad)


def upconv_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,K,2H,2W) = conv 3×3 pad 1 of the doubled x, plus b."""
    conv_fprop(_doubled(x), w, b, y, stride=1, pad=1)


def upconv_mse_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, target: np.ndarray, loss: np.ndarray, dy: np.ndarray) -> None:
    """loss () float64 = mean((y − target)²), dy (N,K,2H,2W) = 2·(y − target)/size."""
    upconv_fprop(x, w, b, dy)
    dy -= target
    loss[...] = np.square(dy, dtype=np.float64).mean()
    dy *= 2 / dy.size


def upconv_dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,H,W) from dy (N,K,2H,2W): the convolution's gradient, summed over each 2×2 block."""
    n, c, h, width = dx.shape
    large = np.empty((n, c, 2 * h, 2 * width), dx.dtype)
    conv_dgrad(dy, w, large, stride=1, pad=1)
    np.sum(_windows(large), 4, out=dx)


def upconv_dgrad_relu(dy: np.ndarray, w: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = that of `upconv_dgrad` where x > 0, else 0."""
    upconv_dgrad(dy, w, dx)
    dx *= x > 0


def upconv_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, db: np.ndarray) -> None:
    """dw (K,C,3,3), db (K) from x (N,C,H,W) and dy (N,K,2H,2W)."""
    conv_wgrad(_doubled(x), dy, dw, db, stride=1, pad=1)


def pack_index(place: np.ndarray) -> np.ndarray:
    """(N,K,P,Q) places 0..3 as (N,⌈K/4⌉,P,Q) uint8, four channels per byte."""
    n, k, p, q = place.shape
    padded = np.zeros((n, -(-k // 4) * 4, p, q), np.uint8)
    padded[:, :k] = place
    return (padded.reshape(n, -1, 4, p, q) << np.array([0, 2, 4, 6], np.uint8)[:, None, None]).sum(2, dtype=np.uint8)


def unpack_index(index: np.ndarray, channels: int) -> np.ndarray:
    """The places (N,channels,P,Q) that `pack_index` packed."""
    n, _, p, q = index.shape
    places = (index[:, :, None] >> np.array([0, 2, 4, 6], np.uint8)[:, None, None]) & 3
    return places.reshape(n, -1, p, q)[:, :channels]


def _windows(a: np.ndarray) -> np.ndarray:
    """(N,C,2P,2Q) as (N,C,P,Q,4): the 2×2 windows, in (h, w) order."""
    n, c, h, w = a.shape
    return a.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)


def _doubled(x: np.ndarray) -> np.ndarray:
    return np.repeat(np.repeat(x, 2, 2), 2, 3)


REFERENCES = ACTIVATED | {
    Op("conv", "fprop", after=(Map("relu"), Pool())): conv_relu_pool_fprop,
    Op("unpool"): unpool,
    Op("conv", "dgrad", after=(Mask("relu"),)): conv_dgrad_relu,
    Op("conv", "dgrad", after=(Add(), Mask("relu"))): conv_dgrad_add_relu,
    Op("conv", "wgrad", before=(Unpool(),)): conv_pool_wgrad,
    Op("upconv", "fprop"): upconv_fprop,
    Op("upconv", "fprop", after=(Loss("mse"),)): upconv_mse_fprop,
    Op("upconv", "dgrad"): upconv_dgrad,
    Op("upconv", "dgrad", after=(Mask("relu"),)): upconv_dgrad_relu,
    Op("upconv", "wgrad"): upconv_wgrad,
}
"""Reference of each fused op, by name. The `cpu` row does not have them: NumPy gains nothing from fusing."""
GRADIENTS = {
    Op("upconv", "dgrad"): Gradient(Op("upconv", "fprop"), lambda ins, outs, v: (v, ins[1])),
    Op("upconv", "wgrad"): Gradient(Op("upconv", "fprop"), lambda ins, outs, v: (ins[0], v), of=(1,), beside=(0,)),
}

MEAN_FUSED = (
    ConvShape(1, 3, 6, 10, 4, 3, 3, 1, 1),
    ConvShape(2, 5, 8, 6, 7, 3, 3, 1, 1),
    ConvShape(1, 16, 4, 4, 20, 3, 3, 1, 1),
    ConvShape(2, 24, 8, 8, 16, 3, 3, 1, 1),
)
REAL_POOLED = (ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1), ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1))
MEAN_UP = (ConvShape(1, 1, 3, 5, 2, 3, 3, 1, 1), ConvShape(2, 7, 4, 3, 3, 3, 3, 1, 1), ConvShape(1, 20, 4, 4, 12, 3, 3, 1, 1))
REAL_UP = (ConvShape(4, 128, 8, 8, 256, 3, 3, 1, 1), ConvShape(4, 256, 16, 16, 3, 3, 3, 1, 1))


def _whole(seed: int, spread: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-spread, spread + 1, shape).astype(np.float32)


def _few(seed: int, *shape: int) -> np.ndarray:
    """−1, 0 or 1, mostly 0, so that a long sum stays below 256 and is exact in bfloat16."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-1, 2, shape) * (rng.random(shape) < 0.1)).astype(np.float32)


def label(shape: ConvShape) -> str:
    return f"{shape.C}→{shape.K} {shape.H}×{shape.W} s{shape.stride} p{shape.pad} n{shape.N}"


def pooled_cases(shape: ConvShape) -> Iterator[Case]:
    """conv+ReLU+pool and what follows it backwards: small integers, which every precision multiplies and adds exactly. Ties are then real ties, and
    the index must agree bit for bit."""
    attrs = {"stride": shape.stride, "pad": shape.pad}
    n, k, p, q = shape.y_shape
    small, packed = (n, k, p // 2, q // 2), (n, -(-k // 4), p // 2, q // 2)
    x, w, b = _whole(1, 2, *shape.x_shape), _few(2, *shape.w_shape), _whole(3, 2, k)
    dy, index = normal(4, *small), np.random.default_rng(5).integers(0, 256, packed).astype(np.uint8)
    if k % 4:
        index[:, -1] &= (1 << 2 * (k % 4)) - 1
    dw, db = (shape.w_shape, "float32"), ((k,), "float32")
    yield Case(
        Op("conv", "fprop", after=(Map("relu"), Pool())),
        label(shape),
        (x, w, b),
        ((small, "float32"), (packed, "uint8")),
        attrs,
        shape.gemm("fprop")[2],
    )
    yield Case(Op("unpool"), label(shape), (dy, index), ((shape.y_shape, "float32"),))
    yield Case(Op("conv", "wgrad", before=(Unpool(),)), label(shape), (normal(6, *shape.x_shape), dy, index), (dw, db), attrs, shape.gemm("wgrad")[2])


def relu_cases(shape: ConvShape) -> Iterator[Case]:
    """conv+ReLU, and the dgrad of a layer whose input came out of a ReLU."""
    attrs = {"stride": shape.stride, "pad": shape.pad}
    x, w, b, dy = normal(7, *shape.x_shape), normal(8, *shape.w_shape), normal(9, shape.K), normal(10, *shape.y_shape)
    yield Case(Op("conv", "fprop", after=(Map("relu"),)), label(shape), (x, w, b), ((shape.y_shape, "float32"),), attrs, shape.gemm("fprop")[2])
    yield Case(
        Op("conv", "dgrad", after=(Mask("relu"),)),
        label(shape),
        (dy, w, np.maximum(x, 0)),
        ((shape.x_shape, "float32"),),
        attrs,
        shape.gemm("dgrad")[2],
    )


def activated_cases(shape: ConvShape, names: Iterable[str] = ("elu",)) -> Iterator[Case]:
    """Convolutions with other activations in their epilogue; ELU has a parameter."""
    ins = (normal(7, *shape.x_shape), normal(8, *shape.w_shape), normal(9, shape.K))
    for name in names:
        attrs = {"stride": shape.stride, "pad": shape.pad, **ACTIVATIONS[name].parameters}
        yield Case(Op("conv", "fprop", after=(Map(name),)), label(shape), ins, ((shape.y_shape, "float32"),), attrs, shape.gemm("fprop")[2])


def second_cases(shape: ConvShape) -> Iterator[Case]:
    """The dgrad of such a layer with a second gradient of its input."""
    x, w, dy, more = (normal(11 + at, *each) for at, each in enumerate((shape.x_shape, shape.w_shape, shape.y_shape, shape.x_shape)))
    attrs = {"stride": shape.stride, "pad": shape.pad}
    ins = (dy, w, np.maximum(x, 0), more)
    yield Case(Op("conv", "dgrad", after=(Add(), Mask("relu"))), label(shape), ins, ((shape.x_shape, "float32"),), attrs, shape.gemm("dgrad")[2])


def linear_cases(n: int, c: int, k: int) -> Iterator[Case]:
    """A linear layer with every activation, as a 1×1 convolution of 1×1 images."""
    shape, attrs = ConvShape(n, c, 1, 1, k, 1, 1, 1, 0), {"stride": 1, "pad": 0}
    ins = (normal(16, *shape.x_shape), normal(17, *shape.w_shape), normal(18, k))
    for each in ACTIVATIONS.values():
        yield Case(Op("conv", "fprop", after=(Map(each.name),)), label(shape), ins, ((shape.y_shape, "float32"),), attrs | dict(each.parameters), c)


def up_activated_cases(shape: ConvShape, names: Iterable[str] = ("elu",)) -> Iterator[Case]:
    """Upsampling folded into a 3×3 convolution with an activation in its epilogue."""
    ins = (np.maximum(normal(11, *shape.x_shape), 0), normal(12, *shape.w_shape), normal(13, shape.K))
    y = (((shape.N, shape.K, 2 * shape.H, 2 * shape.W), "float32"),)
    for name in names:
        yield Case(Op("upconv", "fprop", after=(Map(name),)), label(shape), ins, y, dict(ACTIVATIONS[name].parameters), 9 * shape.C)


def up_cases(shape: ConvShape) -> Iterator[Case]:
    """Upsampling folded into a 3×3 convolution; `shape` has the image before the upsampling."""
    n, c, h, w_ = shape.x_shape
    large = (n, shape.K, 2 * h, 2 * w_)
    x, w, b = np.maximum(normal(11, *shape.x_shape), 0), normal(12, *shape.w_shape), normal(13, shape.K)
    dy, target = normal(14, *large), normal(15, *large)
    terms = {"fprop": 9 * c, "dgrad": 16 * shape.K, "wgrad": 4 * n * h * w_}
    y, dx = ((large, "float32"),), ((shape.x_shape, "float32"),)
    yield Case(Op("upconv", "fprop"), label(shape), (x, w, b), y, {}, terms["fprop"])
    yield from up_activated_cases(shape, ("relu",))
    yield Case(
        Op("upconv", "fprop", after=(Loss("mse"),)), label(shape), (x, w, b, target), (((), "float64"), *y), {}, max(terms["fprop"], numel(large))
    )
    yield Case(Op("upconv", "dgrad"), label(shape), (dy, w), dx, {}, terms["dgrad"])
    yield Case(Op("upconv", "dgrad", after=(Mask("relu"),)), label(shape), (dy, w, x), dx, {}, terms["dgrad"])
    yield Case(Op("upconv", "wgrad"), label(shape), (x, dy), ((shape.w_shape, "float32"), ((shape.K,), "float32")), {}, terms["wgrad"])


def cases() -> Iterator[Case]:
    """Every fused op on shapes small enough for the simulator."""
    for shape in MEAN_FUSED:
        yield from pooled_cases(shape)
        yield from relu_cases(shape)
        yield from activated_cases(shape)
    yield from relu_cases(ConvShape(1, 5, 7, 9, 6, 3, 3, 2, 1))
    yield from second_cases(ConvShape(2, 8, 8, 8, 64, 3, 3, 1, 1))
    yield from linear_cases(3, 5, 6)
    yield from activated_cases(ConvShape(2, 40, 1, 1, 12, 1, 1, 1, 0), ("sigmoid", "leaky_relu"))
    for shape in MEAN_UP:
        yield from up_cases(shape)
        yield from up_activated_cases(shape)
    yield from up_activated_cases(ConvShape(1, 3, 2, 3, 4, 3, 3, 1, 1), ACTIVATIONS)


def real_cases() -> Iterator[Case]:
    """The autoencoder's fused layers, batch 4."""
    for shape in REAL_POOLED:
        yield from pooled_cases(shape)
        yield from relu_cases(shape)
    for shape in REAL_UP:
        yield from up_cases(shape)
