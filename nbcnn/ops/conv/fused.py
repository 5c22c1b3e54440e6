"""References of the fused convolutions: each is the composition of the plain ops that it replaces.

    conv_relu_fprop        y = relu(conv(x, w) + b)
    conv_sigmoid_fprop     y = sigmoid(conv(x, w) + b)
    conv_swish_fprop       y = swish(conv(x, w) + b)
    conv_relu_pool_fprop   y = maxpool 2×2 of relu(conv(x, w) + b), index = where each maximum was (2 bits)
    unpool                 dx = dy at the place that index says, zero elsewhere
    conv_dgrad_relu        dx = dgrad(dy, w) where x > 0, else 0: x is what the layer read, the output of a ReLU
    conv_pool_wgrad        dw, db of conv from the gradient behind a pooling layer: wgrad(x, unpool(dy, index))
    upconv_fprop           y = conv 3×3 pad 1 (upsample 2×(x), w) + b
    upconv_relu_fprop      y = relu(upconv(x, w) + b)
    upconv_mse_fprop       loss = mean((upconv(x, w) + b − target)²) and its gradient dy; y itself is not kept
    upconv_dgrad           dx from dy (N,K,2H,2W), back through the upsampling
    upconv_dgrad_relu      the same where x > 0
    upconv_wgrad           dw, db from x (N,C,H,W) and dy (N,K,2H,2W)
    dwconv1d_bwd           dx, dw (, dd) of a depthwise convolution of series in one pass (its reference stands with the others)

The pooled index packs four channels into a byte: channel 4·k+j of index (N, ⌈K/4⌉, P/2, Q/2) is bits 2j and 2j+1 of its
byte k, with value 2·row + column inside the window. Ties, and windows without a positive element, give the first place.
"""

from __future__ import annotations

import numpy as np

from nbcnn.ops.activations.sigmoid import sigmoid_fprop
from nbcnn.ops.activations.swish import swish_fprop
from nbcnn.ops.conv.reference import conv_dgrad, conv_fprop, conv_wgrad
from nbcnn.ops.series.dwconv1d.reference import dwconv1d_bwd


def conv_relu_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, *, stride: int, pad: int) -> None:
    """y (N,K,P,Q) = relu(conv(x, w) + b)."""
    conv_fprop(x, w, b, y, stride=stride, pad=pad)
    np.maximum(y, 0, out=y)


def conv_sigmoid_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, *, stride: int, pad: int) -> None:
    """y (N,K,P,Q) = sigmoid(conv(x, w) + b)."""
    conv_fprop(x, w, b, y, stride=stride, pad=pad)
    sigmoid_fprop(y, y)


def conv_swish_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, *, stride: int, pad: int) -> None:
    """y (N,K,P,Q) = swish(conv(x, w) + b)."""
    conv_fprop(x, w, b, y, stride=stride, pad=pad)
    swish_fprop(y, y)


def conv_relu_pool_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, index: np.ndarray, *, stride: int, pad: int) -> None:
    """y (N,K,P/2,Q/2) and index (N,⌈K/4⌉,P/2,Q/2) uint8 of relu(conv(x, w) + b), whose P and Q must be even."""
    n, k, p, q = y.shape
    a = np.empty((n, k, 2 * p, 2 * q), x.dtype)
    conv_relu_fprop(x, w, b, a, stride=stride, pad=pad)
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


def conv_pool_wgrad(x: np.ndarray, dy: np.ndarray, index: np.ndarray, dw: np.ndarray, db: np.ndarray, *, stride: int, pad: int) -> None:
    """dw, db from x and the gradient dy (N,K,P/2,Q/2) behind the pooling."""
    n, k, p, q = dy.shape
    dz = np.empty((n, k, 2 * p, 2 * q), dy.dtype)
    unpool(dy, index, dz)
    conv_wgrad(x, dz, dw, db, stride=stride, pad=pad)


def upconv_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,K,2H,2W) = conv 3×3 pad 1 of the doubled x, plus b."""
    conv_fprop(_doubled(x), w, b, y, stride=1, pad=1)


def upconv_relu_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = relu(upconv(x, w) + b)."""
    upconv_fprop(x, w, b, y)
    np.maximum(y, 0, out=y)


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
    """As `upconv_dgrad` where x > 0, else 0."""
    upconv_dgrad(dy, w, dx)
    dx *= x > 0


def upconv_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, db: np.ndarray) -> None:
    """dw (K,C,3,3), db (K) from x (N,C,H,W) and dy (N,K,2H,2W)."""
    conv_wgrad(_doubled(x), dy, dw, db, stride=1, pad=1)


def pack_index(place: np.ndarray) -> np.ndarray:
    """(N,K,P,Q) places 0..3 as (N,⌈K/4⌉,P,Q) uint8, four channels a byte."""
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


REFERENCES = {
    function.__name__: function
    for function in (
        conv_relu_fprop,
        conv_sigmoid_fprop,
        conv_swish_fprop,
        conv_relu_pool_fprop,
        unpool,
        conv_dgrad_relu,
        conv_pool_wgrad,
        upconv_fprop,
        upconv_relu_fprop,
        upconv_mse_fprop,
        upconv_dgrad,
        upconv_dgrad_relu,
        upconv_wgrad,
        dwconv1d_bwd,
    )
}
"""Reference of each fused op, by name. The `cpu` row does not have them: NumPy gains nothing from fusing."""
