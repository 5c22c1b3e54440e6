"""The references of batch normalisation in NumPy: the ops of batch.py, where their formulas and operands stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.table import activated_norms
from nbcnn.ops.norms.plane import inverse_deviation
from nbcnn.plan.op import Map, Op, undone

Array = np.ndarray


def batchnorm_fprop(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, mean: Array, rstd: Array,
    running_mean_out: Array, running_var_out: Array, *, eps: float, momentum: float,
) -> None:  # fmt: skip
    """y = weight·(x − mean)·rstd + bias with the batch's statistics, which are kept; running statistics in place."""
    for c in _blocks(x):
        middle, variance, centred = _moments(x[:, c])
        running, outs = (running_mean[c], running_var[c]), (running_mean_out[c], running_var_out[c])
        _keep(middle, variance, x.size // x.shape[1], (mean[c], rstd[c]), running, outs, eps, momentum)
        _scaled(centred, weight[c] * rstd[c], bias[c], y[:, c])


def keep_statistics(
    x: Array, kept: tuple[Array, Array], running: tuple[Array, Array], outs: tuple[Array, Array], eps: float, momentum: float
) -> None:  # fmt: skip
    """mean and rstd of x to `kept`; the running statistics, moved towards its, to `outs`."""
    _keep(*_all_moments(x), x.size // x.shape[1], kept, running, outs, eps, momentum)


def batchnorm_apply(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, y: Array) -> None:
    """y = weight·(x − mean)·rstd + bias."""
    _normal(x, mean, rstd, weight, bias, y)


def batchnorm_infer(x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *, eps: float) -> None:
    """y = weight·(x − running_mean)/√(running_var + eps) + bias."""
    _normal(x, running_mean, 1 / np.sqrt(running_var + eps), weight, bias, y)


def batchnorm_grads(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, *operands: Array) -> None:
    """dx, dweight, dbias from dy and what the forward pass read and kept; operands: [more, which is added to dx,] dx, dweight, dbias."""
    *more, dx, dweight, dbias = operands
    count = x.size // x.shape[1]
    for c in _blocks(x):
        centred = _centred(x[:, c], mean[c])
        dweight[c], dbias[c] = _sums(centred, dy[:, c]) * rstd[c], _sums(dy[:, c])
        _pulled(centred, dy[:, c], weight[c] * rstd[c], rstd[c] * dweight[c] / count, dbias[c] / count, dx[:, c], *(each[:, c] for each in more))


def activated(each: Activation) -> dict[Op, Callable[..., None]]:
    """The references of a norm with an activation behind it, whose parameters are further attributes."""

    def fprop(
        x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *outs: Array, eps: float, momentum: float,
        **parameters: float,
    ) -> None:  # fmt: skip
        """y = f(`batchnorm_fprop`)."""
        batchnorm_fprop(x, weight, bias, running_mean, running_var, y, *outs, eps=eps, momentum=momentum)
        each.fprop(y, y, **parameters)

    def infer(
        x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *, eps: float, **parameters: float
    ) -> None:  # fmt: skip
        """y = f(`batchnorm_infer`)."""
        batchnorm_infer(x, weight, bias, running_mean, running_var, y, eps=eps)
        each.fprop(y, y, **parameters)

    def apply(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, y: Array, **parameters: float) -> None:
        """y = f(`batchnorm_apply`)."""
        batchnorm_apply(x, weight, bias, mean, rstd, y)
        each.fprop(y, y, **parameters)

    def grads(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, *operands: Array, **parameters: float) -> None:
        """`batchnorm_grads` of the gradient of f's input."""
        batchnorm_grads(behind(each, dy, x, weight, bias, mean, rstd, **parameters), x, weight, bias, mean, rstd, *operands)

    return dict(zip(activated_norms(each.name), (fprop, infer, apply, grads), strict=True))


def activated_dgrad(each: Activation) -> dict[Op, Callable[..., None]]:
    """The reference of the gradient of a norm with an activation behind it of which another op makes the sums."""

    def dgrad(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, sums: Array, *operands: Array) -> None:
        """`batchnorm_dgrad` of the gradient of f's input."""
        batchnorm_dgrad(behind(each, dy, x, weight, bias, mean, rstd), x, weight, bias, mean, rstd, sums, *operands)

    return {Op("batchnorm", "dgrad", before=undone((Map(each.name),))): dgrad}


def behind(each: Activation, dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, **parameters: float) -> Array:
    """The gradient of the input of the activation that stands behind a norm, whose own input is x."""
    saved, passed = np.empty_like(x), np.empty_like(dy)
    _normal(x, mean, rstd, weight, bias, saved)
    if each.reads == "y":
        each.fprop(saved, saved, **parameters)
    each.dgrad(dy, saved, passed, **parameters)
    return passed


def batchnorm_add_relu_fprop(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, other: Array, y: Array, mean: Array, rstd: Array,
    running_mean_out: Array, running_var_out: Array, *, eps: float, momentum: float,
) -> None:  # fmt: skip
    """relu of `batchnorm_fprop` plus other."""
    outs = (y, mean, rstd, running_mean_out, running_var_out)
    batchnorm_fprop(x, weight, bias, running_mean, running_var, *outs, eps=eps, momentum=momentum)
    np.maximum(y + other, 0, out=y)


def batchnorm_add_relu_infer(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, other: Array, y: Array, *, eps: float
) -> None:  # fmt: skip
    """relu of `batchnorm_infer` plus other."""
    batchnorm_infer(x, weight, bias, running_mean, running_var, y, eps=eps)
    np.maximum(y + other, 0, out=y)


def batchnorm_add_relu_apply(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, other: Array, y: Array) -> None:
    """relu of `batchnorm_apply` plus other."""
    batchnorm_apply(x, weight, bias, mean, rstd, y)
    np.maximum(y + other, 0, out=y)


def batchnorm_add_relu_grads(dy: Array, x: Array, y: Array, weight: Array, mean: Array, rstd: Array, *operands: Array) -> None:
    """dother = dy, 0 where y ≤ 0, and `batchnorm_grads` of it; operands: [more, which is added to dy,] dx, dother, dweight, dbias."""
    *more, dx, dother, dweight, dbias = operands
    dother[...] = np.where(y <= 0, 0, dy + more[0] if more else dy)
    batchnorm_grads(dother, x, weight, weight, mean, rstd, dx, dweight, dbias)


def batchnorm_statistics(x: Array, parts: Array, *, ranks: int, rank: int, images: int) -> None:
    """(images, mean, variance) of this rank's images in its row of parts (ranks,3,C), 0 in the others."""
    rows = parts.reshape(ranks, 3, -1)
    rows[...] = 0
    rows[rank] = (np.full(x.shape[1], images), *_all_moments(x))


def batchnorm_together(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, parts: Array, y: Array, mean: Array, rstd: Array,
    running_mean_out: Array, running_var_out: Array, *, eps: float, momentum: float, ranks: int,
) -> None:  # fmt: skip
    """`batchnorm_fprop` with the statistics of the batch that all ranks' rows of `parts` make."""
    images, means, variances = parts.reshape(ranks, 3, -1).transpose(1, 0, 2)
    count = images.sum(0)
    middle = means[0] + (images * (means - means[0])).sum(0) / count
    variance, m = (images * (variances + np.square(means - middle))).sum(0) / count, count * (x.shape[2] * x.shape[3])
    _keep(middle, variance, m, (mean, rstd), (running_mean, running_var), (running_mean_out, running_var_out), eps, momentum)
    _normal(x, mean, rstd, weight, bias, y)


def batchnorm_sums(
    dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, sums: Array, dweight: Array, dbias: Array
) -> None:  # fmt: skip
    """sums = dbias, dweight of the rank's own images."""
    for c in _blocks(x):
        dweight[c], dbias[c] = _sums(_centred(x[:, c], mean[c]), dy[:, c]) * rstd[c], _sums(dy[:, c])
    sums[...] = np.concatenate([dbias, dweight])


def batchnorm_dgrad(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, sums: Array, *operands: Array) -> None:
    """dx from the sums of `batchnorm_sums`, which count for as many images as x has; operands: [more, which is added to dx,] dx."""
    *more, dx = operands
    dbias, dweight = sums.reshape(2, -1) / (x.size // x.shape[1])
    for c in _blocks(x):
        pulls = weight[c] * rstd[c], rstd[c] * dweight[c], dbias[c]
        _pulled(_centred(x[:, c], mean[c]), dy[:, c], *pulls, dx[:, c], *(each[:, c] for each in more))


def _pulled(centred: Array, dy: Array, scale: Array, slope: Array, middle: Array, dx: Array, *more: Array) -> None:
    """dx = (dy − slope·centred − middle)·scale, plus more; centred is written over."""
    centred *= _wide(slope, dy)
    np.subtract(dy, centred, out=centred)
    centred -= _wide(middle, dy)
    np.multiply(centred, _wide(scale, dy), out=dx)
    for each in more:
        dx += each


def _centred(x: Array, mean: Array) -> Array:
    """x − mean."""
    made: Array = x - _wide(mean, x)
    return made


def _moments(x: Array) -> tuple[Array, Array, Array]:
    """The mean and the biased variance of every channel, and x without the mean.

    The mean is rounded to x's type; the mean of what is left takes that error out of the variance."""
    count = x.size // x.shape[1]
    middle = (_sums(x) / count).astype(x.dtype)
    centred = _centred(x, middle)
    return middle, np.maximum(_sums(centred, centred) / count - np.square(_sums(centred) / count), 0), centred


def _all_moments(x: Array) -> tuple[Array, Array]:
    """The mean and the biased variance of every channel of images x, in blocks."""
    middle, variance = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], x.dtype)
    for c in _blocks(x):
        middle[c], variance[c], _ = _moments(x[:, c])
    return middle, variance


BLOCK = 1 << 17
"""Elements of all images that are computed at a time: what is made of them on the way stays in a second-level cache."""


def _blocks(x: Array) -> Iterator[slice]:
    """Slices of the channels of images x, each of about `BLOCK` elements."""
    size = max(1, BLOCK // max(1, x.size // x.shape[1]))
    return (slice(start, start + size) for start in range(0, x.shape[1], size))


def _keep(
    middle: Array, variance: Array, m: Any, kept: tuple[Array, Array], running: tuple[Array, Array], outs: tuple[Array, Array], eps: float,
    momentum: float,
) -> None:  # fmt: skip
    """The statistics of the batch to `kept`; `running`, moved towards them, to `outs`."""
    kept[0][...], kept[1][...] = middle, inverse_deviation(variance + eps)
    outs[0][...] = (1 - momentum) * running[0] + momentum * middle
    outs[1][...] = (1 - momentum) * running[1] + momentum * variance * (m / np.maximum(m - 1, 1))


def _normal(x: Array, mean: Array, rstd: Array, weight: Array, bias: Array, y: Array) -> None:
    """y = (x − mean)·weight·rstd + bias."""
    scale = weight * rstd
    for c in _blocks(x):
        _scaled(_centred(x[:, c], mean[c]), scale[c], bias[c], y[:, c])


def _scaled(centred: Array, scale: Array, bias: Array, y: Array) -> None:
    """y = centred·scale + bias; centred is written over."""
    centred *= _wide(scale, y)
    np.add(centred, _wide(bias, y), out=y)


SMALL = 256
"""Images of at most so many pixels take a number per channel repeated for each pixel: NumPy's innermost loop is then an image, not a channel."""


def _wide(per_channel: Array, x: Array) -> Array:
    """A number per channel in a shape that broadcasts to images x: (C,1,1), or (C,H,W) for small images."""
    pixels = x.shape[2] * x.shape[3]
    return per_channel[:, None, None] if pixels > SMALL else np.repeat(per_channel, pixels).reshape(x.shape[1:])


def _sums(x: Array, y: Array | None = None) -> Array:
    """The sum of each channel of images x, or of x·y, in float64 where images are large: read once, and no product is stored."""
    (n, channels), pixels = x.shape[:2], x.shape[2] * x.shape[3]
    if pixels > SMALL:
        rows = x.reshape(n, channels, pixels)
        # A product with ones: BLAS adds in many partial sums, in a third of the time of NumPy's sum.
        made = np.vecdot(rows, np.ones(pixels, x.dtype) if y is None else y.reshape(rows.shape))
        return np.asarray(made.sum(0, dtype=np.float64))
    flat = x.reshape(n, channels * pixels)
    made = flat.sum(0) if y is None else np.einsum("nk,nk->k", flat, y.reshape(flat.shape))
    return np.asarray(made.reshape(channels, pixels).sum(1))
