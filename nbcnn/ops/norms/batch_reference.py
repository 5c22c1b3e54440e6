"""The references of batch normalisation in NumPy: the ops of batch.py, where their formulas and operands stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.norms.plane import inverse_deviation
from nbcnn.plan.op import Map, Op, undone

Array = np.ndarray


def batchnorm_fprop(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, mean: Array, rstd: Array,
    running_mean_out: Array, running_var_out: Array, *, eps: float, momentum: float,
) -> None:  # fmt: skip
    """y = weight·(x − mean)·rstd + bias with the batch's statistics, which are kept; running statistics in place."""
    keep_statistics(x, (mean, rstd), (running_mean, running_var), (running_mean_out, running_var_out), eps, momentum)
    _normal(x, mean, rstd, weight, bias, y)


def keep_statistics(
    x: Array, kept: tuple[Array, Array], running: tuple[Array, Array], outs: tuple[Array, Array], eps: float, momentum: float
) -> None:  # fmt: skip
    """mean and rstd of x to `kept`; the running statistics, moved towards its, to `outs`."""
    _keep(*_moments(x), x.size // x.shape[1], kept, running, outs, eps, momentum)


def batchnorm_apply(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, y: Array) -> None:
    """y = weight·(x − mean)·rstd + bias."""
    _normal(x, mean, rstd, weight, bias, y)


def batchnorm_infer(x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *, eps: float) -> None:
    """y = weight·(x − running_mean)/√(running_var + eps) + bias."""
    _normal(x, running_mean, 1 / np.sqrt(running_var + eps), weight, bias, y)


def batchnorm_grads(
    dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, dx: Array, dweight: Array, dbias: Array
) -> None:  # fmt: skip
    """dx, dweight, dbias from dy and what the forward pass read and kept."""
    sums = np.empty(2 * x.shape[1], x.dtype)
    batchnorm_sums(dy, x, weight, bias, mean, rstd, sums, dweight, dbias)
    batchnorm_dgrad(dy, x, weight, bias, mean, rstd, sums, dx)


def activated(each: Activation, summed: bool) -> dict[Op, Callable[..., None]]:
    """The references of a norm with an activation behind it; `summed`: with that of its gradient of which another op makes the sums."""

    def fprop(
        x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *outs: Array, eps: float, momentum: float
    ) -> None:  # fmt: skip
        """y = f(`batchnorm_fprop`)."""
        batchnorm_fprop(x, weight, bias, running_mean, running_var, y, *outs, eps=eps, momentum=momentum)
        each.fprop(y, y)

    def infer(x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, y: Array, *, eps: float) -> None:
        """y = f(`batchnorm_infer`)."""
        batchnorm_infer(x, weight, bias, running_mean, running_var, y, eps=eps)
        each.fprop(y, y)

    def apply(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, y: Array) -> None:
        """y = f(`batchnorm_apply`)."""
        batchnorm_apply(x, weight, bias, mean, rstd, y)
        each.fprop(y, y)

    def grads(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, dx: Array, dweight: Array, dbias: Array) -> None:
        """`batchnorm_grads` of the gradient of f's input."""
        batchnorm_grads(behind(each, dy, x, weight, bias, mean, rstd), x, weight, bias, mean, rstd, dx, dweight, dbias)

    def dgrad(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, sums: Array, dx: Array) -> None:
        """`batchnorm_dgrad` of the gradient of f's input."""
        batchnorm_dgrad(behind(each, dy, x, weight, bias, mean, rstd), x, weight, bias, mean, rstd, sums, dx)

    after = (Map(each.name),)
    made: dict[Op, Callable[..., None]] = {
        Op("batchnorm", "fprop", after=after): fprop,
        Op("batchnorm", "infer", after=after): infer,
        Op("batchnorm", "apply", after=after): apply,
        Op("batchnorm", "grads", before=undone(after)): grads,
    }
    return made | ({Op("batchnorm", "dgrad", before=undone(after)): dgrad} if summed else {})


def behind(each: Activation, dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array) -> Array:
    """The gradient of the input of the activation that stands behind a norm, whose own input is x."""
    saved, passed = np.empty_like(x), np.empty_like(dy)
    _normal(x, mean, rstd, weight, bias, saved)
    if each.reads == "y":
        each.fprop(saved, saved)
    each.dgrad(dy, saved, passed)
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
    rows[rank] = (np.full(x.shape[1], images), *_moments(x))


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
        part, arriving = x[:, c], dy[:, c]
        dbias[c] = _sums(arriving)
        centred = part - _wide(mean[c], part)
        centred *= arriving
        dweight[c] = _sums(centred) * rstd[c]
    sums[...] = np.concatenate([dbias, dweight])


def batchnorm_dgrad(dy: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, sums: Array, dx: Array) -> None:
    """dx from the sums of `batchnorm_sums`, which count for as many images as x has."""
    dbias, dweight = sums.reshape(2, -1) / (x.size // x.shape[1])
    scale, slope = weight * rstd, rstd * dweight
    for c in _blocks(x):
        part = x[:, c]
        made = part - _wide(mean[c], part)
        made *= _wide(slope[c], part)
        np.subtract(dy[:, c], made, out=made)
        made -= _wide(dbias[c], part)
        np.multiply(made, _wide(scale[c], part), out=dx[:, c])


def _moments(x: Array) -> tuple[Array, Array]:
    """The mean and the biased variance of every channel."""
    middle, variance, count = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], x.dtype), x.size // x.shape[1]
    for c in _blocks(x):
        part = x[:, c]
        first = part[0, :, 0, 0]
        away = part - _wide(first, part)
        offset = _sums(away) / count
        away -= _wide(offset, part)
        middle[c], variance[c] = first + offset, _sums(np.square(away, out=away)) / count
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
        part = x[:, c]
        made = part - _wide(mean[c], part)
        made *= _wide(scale[c], part)
        np.add(made, _wide(bias[c], part), out=y[:, c])


SMALL = 256
"""Images of at most so many pixels take a number per channel repeated for each pixel: NumPy's innermost loop is then an image, not a channel."""


def _wide(per_channel: Array, x: Array) -> Array:
    """A number per channel in a shape that broadcasts to images x: (C,1,1), or (C,H,W) for small images."""
    pixels = x.shape[2] * x.shape[3]
    return per_channel[:, None, None] if pixels > SMALL else np.repeat(per_channel, pixels).reshape(x.shape[1:])


def _sums(x: Array) -> Array:
    """The sum of each channel of images x."""
    pixels = x.shape[2] * x.shape[3]
    made: Array = x.sum((0, 2, 3)) if pixels > SMALL else x.sum(0).reshape(-1, pixels).sum(1)
    return made
