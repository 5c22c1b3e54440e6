"""Convolution in NumPy, twice: a form that lets BLAS do the work, and a plain definition to test it against.

    fprop  y[n,k,p,q]  = b[k] + Σ_{c,r,s} w[k,c,r,s] · x[n,c,h,w]
    dgrad  dx[n,c,h,w] = Σ_{k,r,s} w[k,c,r,s] · dy[n,k,p,q]
    wgrad  dw[k,c,r,s] = Σ_{n,p,q} dy[n,k,p,q] · x[n,c,h,w],  db[k] = Σ_{n,p,q} dy[n,k,p,q]

where always h = p·stride + r − pad and w = q·stride + s − pad, and terms outside the image are zero.

`conv_fprop`, `conv_dgrad`, `conv_wgrad` are the `cpu` row in float32 and the reference of every other row in float64.
They copy windows into columns (im2col) or add columns into windows (col2im) around one matrix product, a few images at
a time. The copy is the part that BLAS does not do; it grows with C·R·S. At stride 1 a convolution read backwards is a
convolution again, with the filters flipped and C and K exchanged, so each pass takes the form that moves less.
Source: Chellapilla, Puri, Simard, "High performance convolutional neural networks for document processing", 2006.

    conv_fprop        x (N,C,H,W), w (K,C,R,S)[, b (K)] -> y (N,K,P,Q)                        stride, pad
    conv_dgrad        dy (N,K,P,Q), w (K,C,R,S) -> dx (N,C,H,W)                               stride, pad
    conv_wgrad        x (N,C,H,W), dy (N,K,P,Q) -> dw (K,C,R,S)[, db (K)]                     stride, pad
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from nbcnn.ops.kernel.call import host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

WORKSPACE_BYTES = 4 << 20
"""Columns that exist at a time: few enough to stay in a core's part of the last-level cache, enough for long matrix products.

With 16 MiB the three passes of a ResNet-18 took 7 % longer (batch 8, one thread, L2 of 1 MiB, L3 of 32 MiB)."""
ADDING = 2
"""What adding an element of columns into its window costs, in copies of an element of a window into columns: it reads two numbers for one."""
SMALL = 64
"""Gradients of outputs of at most so many pixels are one product for all images: a product per image would read all filters again for few columns.

Outputs are a product per image at any size: BLAS rounds differently for another number of columns, and an image has the same output in any batch."""

Pads = tuple[int, int]
"""Zero rows and columns around an image; negative where a convolution read backwards skips the border."""


def conv_fprop(x: np.ndarray, w: np.ndarray, *rest: np.ndarray, stride: int, pad: int) -> None:
    """y = conv(x, w) + b: `conv_fprop(x, w, b, y, ...)`, or `conv_fprop(x, w, y, ...)` without bias.

    x (N,C,H,W), w (K,C,R,S), b (K), y (N,K,P,Q), each image C-contiguous, all of one floating dtype.
    """
    *bias, y = rest
    K, C, *window = w.shape
    # Whatever the batch, so that an image has the same output in any.
    if stride == 1 and ADDING * K < C and window != [1, 1]:
        _columns_to_windows(x, _flipped(w), y, 1, _flipped_pads(w, pad), joined=False)
    else:
        _windows_to_columns(x, w, y, stride, (pad, pad), joined=False)
    for b in bias:
        y += b[:, None, None]


def conv_dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, stride: int, pad: int) -> None:
    """dx from dy (N,K,P,Q) and w (K,C,R,S); dx (N,C,H,W), each image C-contiguous, all of one floating dtype."""
    (K, C, *window), outputs = w.shape, dy.size // len(w)
    # Elements moved for each tap: windows of dy and the flipped filters, or columns that are added into dx.
    if stride == 1 and window != [1, 1] and K * outputs + ADDING * K * C <= ADDING * C * outputs:
        _windows_to_columns(dy, _flipped(w), dx, 1, _flipped_pads(w, pad), joined=True)
    else:
        _columns_to_windows(dy, w, dx, stride, (pad, pad), joined=True)


def conv_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *db: np.ndarray, stride: int, pad: int) -> None:
    """dw and db: `conv_wgrad(x, dy, dw, db, ...)`, or `conv_wgrad(x, dy, dw, ...)` without bias.

    x (N,C,H,W), dy (N,K,P,Q), dw (K,C,R,S), db (K), all of one floating dtype.
    """
    if stride == 1 and len(dw) < dw.shape[1]:
        flipped = _flipped(dw)
        _columns_times_columns(dy, x, flipped, 1, _flipped_pads(dw, pad))
        dw[...] = _flipped(flipped)
    else:
        _columns_times_columns(x, dy, dw, stride, (pad, pad))
    for target in db:
        np.sum(dy, axis=(0, 2, 3), out=target)


def _flipped(w: np.ndarray) -> np.ndarray:
    """(K,C,R,S) filters as the (C,K,R,S) filters that read the same convolution backwards: flipped, by 180 degrees."""
    return np.ascontiguousarray(w[:, :, ::-1, ::-1].swapaxes(0, 1))


def _flipped_pads(w: np.ndarray, pad: int) -> Pads:
    return w.shape[2] - 1 - pad, w.shape[3] - 1 - pad


def _windows_to_columns(x: np.ndarray, w: np.ndarray, y: np.ndarray, stride: int, pads: Pads, *, joined: bool) -> None:
    """y = conv(x, w) by copying the windows of x: (K, C·R·S) times (C·R·S, P·Q) for each image, or times (C·R·S, n·P·Q) for n small ones if
    `joined`."""
    (K, C, R, S), (P, Q) = w.shape, y.shape[2:]
    joined = joined and P * Q <= SMALL
    filters = w.reshape(K, C * R * S)
    if _pointwise((R, S), stride, pads) and not joined:
        np.matmul(filters, x.reshape(len(x), C, P * Q), out=y.reshape(len(x), K, P * Q))
        return
    chunks = _chunks(len(x), C * R * S * P * Q * x.itemsize)
    space = np.zeros(chunks[0].stop * C * R * S * P * Q, x.dtype)
    for images in chunks:
        part, result = x[images], y[images]
        n = len(part)
        if joined and P * Q == 1:
            # A row of windows for each image: the product is y as it stands.
            columns = _windows(space, part, (n, C, R, S, P, Q), (0, 1, 2, 3, 4, 5), stride, pads)
            np.matmul(columns.reshape(n, C * R * S), filters.T, out=result.reshape(n, K))
        elif joined:
            columns = _windows(space, part, (C, R, S, n, P, Q), (3, 0, 1, 2, 4, 5), stride, pads)
            result[...] = (filters @ columns.reshape(C * R * S, n * P * Q)).reshape(K, n, P, Q).swapaxes(0, 1)
        else:
            columns = _windows(space, part, (n, C, R, S, P, Q), (0, 1, 2, 3, 4, 5), stride, pads)
            np.matmul(filters, columns.reshape(n, C * R * S, P * Q), out=result.reshape(n, K, P * Q))


def _windows(space: np.ndarray, x: np.ndarray, shape: tuple[int, ...], order: tuple[int, ...], stride: int, pads: Pads) -> np.ndarray:
    """The windows of images x as an array of this `shape` in `space`; `order` are its axes as (n, C, R, S, P, Q).

    The zeros of the border are in `space` from the start: every chunk overwrites the same elements, except a shorter last one.
    """
    columns = space[: math.prod(shape)].reshape(shape)
    if columns.size < space.size:
        columns.fill(0)
    seen = columns.transpose(order)
    R, S, P, Q = seen.shape[2:]
    for r, s, outputs, inside in _taps((R, S), (P, Q), x.shape[2:], stride, pads):
        seen[:, :, r, s, *outputs] = x[:, :, *inside]
    return columns


def _pointwise(window: tuple[int, int], stride: int, pads: Pads) -> bool:
    """Whether the windows of an image are its pixels."""
    return window == (1, 1) and stride == 1 and pads == (0, 0)


def _columns_to_windows(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, stride: int, pads: Pads, *, joined: bool) -> None:
    """dx = the transpose of conv(·, w) at dy: (C·R·S, K) times (K, P·Q) for each image, or times (K, n·P·Q) for n small ones if
    `joined`, added into windows of dx."""
    (K, C, R, S), (P, Q) = w.shape, dy.shape[2:]
    joined = joined and P * Q <= SMALL
    filters = w.reshape(K, C * R * S)
    pointwise = _pointwise((R, S), stride, pads)
    if pointwise and not joined:
        np.matmul(filters.T, dy.reshape(len(dy), K, P * Q), out=dx.reshape(len(dy), C, P * Q))
        return
    chunks = _chunks(len(dy), C * R * S * P * Q * dy.itemsize)
    space = np.empty(chunks[0].stop * C * R * S * P * Q, dy.dtype)
    for images in chunks:
        part, result = dy[images], dx[images]
        n = len(part)
        columns = space[: n * C * R * S * P * Q]
        if joined and P * Q == 1:
            columns = np.matmul(part.reshape(n, K), filters, out=columns.reshape(n, C * R * S)).reshape(n, C, R, S, P, Q)
        elif joined:
            gradient = part.swapaxes(0, 1).reshape(K, n * P * Q)
            columns = np.matmul(filters.T, gradient, out=columns.reshape(C * R * S, n * P * Q)).reshape(C, R, S, n, P, Q).transpose(3, 0, 1, 2, 4, 5)
        else:
            columns = np.matmul(filters.T, part.reshape(n, K, P * Q), out=columns.reshape(n, C * R * S, P * Q)).reshape(n, C, R, S, P, Q)
        if pointwise:
            result[...] = columns[:, :, 0, 0]
            continue
        result.fill(0)
        for r, s, outputs, seen in _taps((R, S), (P, Q), dx.shape[2:], stride, pads):
            result[:, :, *seen] += columns[:, :, r, s, *outputs]


def _columns_times_columns(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, stride: int, pads: Pads) -> None:
    """dw by copying the windows of x: (K, n·P·Q) times (n·P·Q, C·R·S), summed over chunks of n images."""
    (K, C, R, S), (P, Q) = dw.shape, dy.shape[2:]
    chunks = _chunks(len(x), C * R * S * P * Q * x.itemsize)
    space = np.zeros(chunks[0].stop * C * R * S * P * Q, x.dtype)
    total = part = dw.reshape(K, C * R * S)
    for images in chunks:
        gradient = dy[images].swapaxes(0, 1)
        count = gradient.shape[1]
        columns = _windows(space, x[images], (C, R, S, count, P, Q), (3, 0, 1, 2, 4, 5), stride, pads)
        np.matmul(gradient.reshape(K, count * P * Q), columns.reshape(C * R * S, count * P * Q).T, out=part)
        if part is not total:
            total += part
        elif len(chunks) > 1:
            part = np.empty_like(total)


def _chunks(count: int, image_bytes: int) -> list[slice]:
    """Slices that cover `count` images, as many at a time as fit the workspace (at least one); only the last may be shorter."""
    size = max(1, min(count, WORKSPACE_BYTES // image_bytes))
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _taps(
    window: tuple[int, int], out: tuple[int, ...], image: tuple[int, ...], stride: int, pads: Pads
) -> Iterator[tuple[int, int, tuple[slice, slice], tuple[slice, slice]]]:
    """For each tap: r, s, the outputs (rows, columns) that meet the image there, and the image elements they meet."""
    for r in range(window[0]):
        p, h = _meeting(out[0], image[0], r, stride, pads[0])
        for s in range(window[1]):
            q, w = _meeting(out[1], image[1], s, stride, pads[1])
            yield r, s, (p, q), (h, w)


def _meeting(out: int, size: int, tap: int, stride: int, pad: int) -> tuple[slice, slice]:
    """Along one axis: outputs o in [0, out) with o·stride + tap − pad in [0, size), and those image positions."""
    first = max(0, -((tap - pad) // stride))
    stop = max(first, min(out, (size - 1 + pad - tap) // stride + 1))
    start = first * stride + tap - pad
    return slice(first, stop), slice(start, start + (stop - first) * stride, stride) if stop > first else slice(0, 0)


def direct_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, *, stride: int, pad: int) -> np.ndarray:
    """The definition of y, one tap at a time; only tests use it."""
    windows = _padded(x, pad)
    R, S = w.shape[2:]
    P, Q = (windows.shape[2] - R) // stride + 1, (windows.shape[3] - S) // stride + 1
    y = np.zeros((len(x), len(w), P, Q), x.dtype) + b[:, None, None]
    for r in range(R):
        for s in range(S):
            seen = windows[:, :, r : r + P * stride : stride, s : s + Q * stride : stride][:, :, :P, :Q]
            y += np.einsum("ncpq,kc->nkpq", seen, w[:, :, r, s])
    return y


def direct_dgrad(dy: np.ndarray, w: np.ndarray, x_shape: tuple[int, ...], *, stride: int, pad: int) -> np.ndarray:
    """The definition of dx (of shape `x_shape`), one tap at a time; only tests use it."""
    padded = _padded(np.zeros(x_shape, dy.dtype), pad)
    P, Q = dy.shape[2:]
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            target = padded[:, :, r : r + P * stride : stride, s : s + Q * stride : stride]
            target[:, :, :P, :Q] += np.einsum("nkpq,kc->ncpq", dy, w[:, :, r, s])
    return padded[:, :, pad : pad + x_shape[2], pad : pad + x_shape[3]]


def direct_wgrad(x: np.ndarray, dy: np.ndarray, w_shape: tuple[int, ...], *, stride: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition of dw (of shape `w_shape`) and db, one tap at a time; only tests use it."""
    windows = _padded(x, pad)
    P, Q = dy.shape[2:]
    dw = np.empty(w_shape, x.dtype)
    for r in range(w_shape[2]):
        for s in range(w_shape[3]):
            seen = windows[:, :, r : r + P * stride : stride, s : s + Q * stride : stride][:, :, :P, :Q]
            dw[:, :, r, s] = np.einsum("nkpq,ncpq->kc", dy, seen)
    return dw, np.einsum("nkpq->k", dy)


def _padded(x: np.ndarray, pad: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))


HOST = {Op("conv", "fprop"): host(conv_fprop), Op("conv", "dgrad"): host(conv_dgrad), Op("conv", "wgrad"): host(conv_wgrad)}


GRADIENTS = {
    Op("conv", "dgrad"): Gradient(Op("conv", "fprop"), lambda ins, outs, v: (v, ins[1])),
    Op("conv", "wgrad"): Gradient(Op("conv", "fprop"), lambda ins, outs, v: (ins[0], v), of=(1,)),
}

MEAN_CONVS = (
    ConvShape(1, 1, 5, 7, 1, 3, 3, 1, 1),
    ConvShape(2, 3, 7, 5, 5, 3, 3, 1, 1),
    ConvShape(1, 5, 6, 9, 7, 3, 3, 2, 1),
    ConvShape(2, 4, 8, 8, 6, 5, 3, 1, 2),
    ConvShape(1, 3, 9, 9, 20, 3, 3, 1, 1),
    ConvShape(1, 20, 5, 6, 3, 3, 3, 1, 1),
    ConvShape(2, 8, 7, 7, 12, 1, 1, 1, 0),
    ConvShape(1, 2, 11, 10, 3, 4, 4, 3, 0),
    ConvShape(3, 9, 1, 1, 5, 1, 1, 1, 0),
    ConvShape(1, 16, 4, 4, 16, 3, 3, 1, 3),
    ConvShape(1, 2, 9, 9, 2, 8, 8, 1, 0),
)
REAL_CONVS = (
    ConvShape(4, 3, 32, 32, 256, 3, 3, 1, 1),
    ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
    ConvShape(4, 128, 8, 8, 128, 3, 3, 1, 1),
    ConvShape(4, 128, 16, 16, 256, 3, 3, 1, 1),
    ConvShape(4, 256, 32, 32, 3, 3, 3, 1, 1),
)


def conv_cases(shape: ConvShape) -> Iterator[Case]:
    """The three passes of one convolution, fprop and wgrad with and without a bias."""
    x, w, b, dy = normal(1, *shape.x_shape), normal(2, *shape.w_shape), normal(3, shape.K), normal(4, *shape.y_shape)
    attrs = {"stride": shape.stride, "pad": shape.pad}
    label = f"{shape.C}→{shape.K} {shape.H}×{shape.W} {shape.R}×{shape.S} s{shape.stride} p{shape.pad} n{shape.N}"
    y, dw, db = (shape.y_shape, "float32"), (shape.w_shape, "float32"), ((shape.K,), "float32")
    terms = {path: shape.gemm(path)[2] for path in ("fprop", "dgrad", "wgrad")}
    yield Case(Op("conv", "fprop"), label, (x, w, b), (y,), attrs, terms["fprop"])
    yield Case(Op("conv", "fprop"), label + " no bias", (x, w), (y,), attrs, terms["fprop"])
    yield Case(Op("conv", "dgrad"), label, (dy, w), ((shape.x_shape, "float32"),), attrs, terms["dgrad"])
    yield Case(Op("conv", "wgrad"), label, (x, dy), (dw, db), attrs, terms["wgrad"])
    yield Case(Op("conv", "wgrad"), label + " no bias", (x, dy), (dw,), attrs, terms["wgrad"])


def cases() -> Iterator[Case]:
    """Shapes small enough for the simulator."""
    for shape in MEAN_CONVS:
        yield from conv_cases(shape)


def real_cases() -> Iterator[Case]:
    """The autoencoder's convolutions, batch 4."""
    for shape in REAL_CONVS:
        yield from conv_cases(shape)
