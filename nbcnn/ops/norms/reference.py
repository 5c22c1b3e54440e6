"""EvoNorm in NumPy, of any floating dtype; formulas in the package's docstring. Images are (N,C,H,W), parameters (C)."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def evonorm_s0_fprop(x: Array, gamma: Array, beta: Array, v: Array, y: Array, shift: Array, std: Array, *, groups: int, eps: float) -> None:
    """y = γ·x·σ(v·x)/s + β, and the statistics shift, std (N·groups) that the gradients want."""
    centred, offset = _centred(_grouped(x, groups))
    shift[...] = offset.reshape(-1)
    std[...] = np.sqrt(np.square(centred).mean(2) + eps).reshape(-1)
    sigma, _ = _sigmoid(_wide(v) * x)
    y[...] = _wide(gamma) * x * sigma / _spread(std, x) + _wide(beta)


def evonorm_s0_grads(
    dy: Array, x: Array, gamma: Array, v: Array, shift: Array, std: Array, dx: Array, dgamma: Array, dbeta: Array, dv: Array, *, groups: int
) -> None:
    """dx, dgamma, dbeta, dv from dy and what the forward pass read and kept."""
    s, (sigma, rest) = _spread(std, x), _sigmoid(_wide(v) * x)
    slope, h = sigma * rest, _wide(gamma) * dy
    dbeta[...] = dy.sum((0, 2, 3))
    dgamma[...] = (dy * x * sigma / s).sum((0, 2, 3))
    dv[...] = (h / s * x * x * slope).sum((0, 2, 3))
    centred = _grouped(x, groups)
    centred = centred - centred[:, :, :1] - shift.reshape(len(x), groups, 1)
    pull = _grouped(h * x * sigma / (s * s), groups).sum(2, keepdims=True) / centred.shape[2]
    dx[...] = h / s * (sigma + _wide(v) * x * slope) - (pull * centred).reshape(x.shape) / s


def evonorm_b0_fprop(
    x: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, shift: Array, std: Array, batch_shift: Array, batch_std: Array,
    running_out: Array, *, eps: float, momentum: float,
) -> None:  # fmt: skip
    """y = γ·x/d + β with the batch's variance; statistics of planes (N·C) and channels (C); running in place.

    running ← (1 − momentum)·running + momentum·(unbiased variance of the batch).
    """
    centred, offset = _centred(x.reshape(*x.shape[:2], -1))
    shift[...] = offset.reshape(-1)
    std[...] = np.sqrt(np.square(centred).mean(2) + eps).reshape(-1)
    channels = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
    centred, offset = _centred(channels)
    variance, m = np.square(centred).mean(1), channels.shape[1]
    batch_shift[...] = offset[:, 0]
    batch_std[...] = np.sqrt(variance + eps)
    running_out[...] = (1 - momentum) * running + momentum * variance * (m / max(m - 1, 1))
    _normalise(x, gamma, beta, v, std, batch_std, y)


def evonorm_b0_infer(x: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, *, eps: float) -> None:
    """y = γ·x/d + β with the running variance in the place of the batch's; an image's own is still its own."""
    centred, _ = _centred(x.reshape(*x.shape[:2], -1))
    _normalise(x, gamma, beta, v, np.sqrt(np.square(centred).mean(2) + eps), np.sqrt(running + eps), y)


def evonorm_b0_statistics(x: Array, shift: Array, std: Array, parts: Array, *, eps: float, ranks: int, rank: int, images: int) -> None:
    """Statistics of planes (N·C); of this rank's part of the batch in its row of parts (ranks,4,C), 0 in the others (b0_ranks.py)."""
    centred, offset = _centred(x.reshape(*x.shape[:2], -1))
    shift[...] = offset.reshape(-1)
    std[...] = np.sqrt(np.square(centred).mean(2) + eps).reshape(-1)
    channels = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
    centred, offset = _centred(channels)
    rows = parts.reshape(ranks, 4, -1)
    rows[...] = 0
    rows[rank] = np.full(x.shape[1], images), channels[:, 0], offset[:, 0], np.square(centred).mean(1)


def evonorm_b0_together(
    x: Array, gamma: Array, beta: Array, v: Array, running: Array, std: Array, parts: Array, y: Array, batch_shift: Array, batch_std: Array,
    running_out: Array, *, eps: float, momentum: float, ranks: int,
) -> None:  # fmt: skip
    """y, the channels' statistics and running as evonorm_b0_fprop, of the batch that all ranks' rows of `parts` make."""
    images, first, offset, own = parts.reshape(ranks, 4, -1).transpose(1, 0, 2)
    count = images.sum(0)
    means = first - first[0] + offset
    mean = (images * means).sum(0) / count
    variance, m = (images * (own + np.square(means - mean))).sum(0) / count, count * (x.shape[2] * x.shape[3])
    batch_shift[...] = mean + (first[0] - x[0, :, 0, 0])
    batch_std[...] = np.sqrt(variance + eps)
    running_out[...] = (1 - momentum) * running + momentum * variance * (m / np.maximum(m - 1, 1))
    _normalise(x, gamma, beta, v, std, batch_std, y)


def evonorm_b0_sums(
    dy: Array, x: Array, gamma: Array, v: Array, std: Array, batch_std: Array, own: Array, batch: Array, dgamma: Array, dbeta: Array, dv: Array
) -> None:
    """own (N·C) = Σ_hw M·q, batch (C) = Σ_nhw (1−M)·q, and the parameters' gradients."""
    mask, d, h = _branches(dy, x, gamma, v, std, batch_std)
    q = -h * x / (d * d)
    own[...] = (mask * q).sum((2, 3)).reshape(-1)
    batch[...] = (~mask * q).sum((0, 2, 3))
    dbeta[...] = dy.sum((0, 2, 3))
    dgamma[...] = (dy * x / d).sum((0, 2, 3))
    dv[...] = (mask * q * x).sum((0, 2, 3))


def evonorm_b0_dgrad(
    dy: Array, x: Array, gamma: Array, v: Array, shift: Array, std: Array, batch_shift: Array, batch_std: Array, own: Array, batch: Array, dx: Array
) -> None:
    """dx from the sums of evonorm_b0_sums; `batch` counts for as many images as x has."""
    mask, d, h = _branches(dy, x, gamma, v, std, batch_std)
    s, s_batch, pixels = _spread(std, x), _wide(batch_std), x.shape[2] * x.shape[3]
    to_plane = x - x[:, :, :1, :1] - _spread(shift, x)
    to_batch = x - x[:1, :, :1, :1] - _wide(batch_shift)
    pulls = _spread(own, x) / pixels * to_plane / s + _wide(batch) / (len(x) * pixels) * to_batch / s_batch
    dx[...] = np.where(mask, h * s / (d * d), h / d) + pulls


def evonorm_b0_grads(
    dy: Array, x: Array, gamma: Array, v: Array, shift: Array, std: Array, batch_shift: Array, batch_std: Array,
    dx: Array, dgamma: Array, dbeta: Array, dv: Array,
) -> None:  # fmt: skip
    """dx, dgamma, dbeta, dv from dy and what the forward pass read and kept."""
    own, batch = np.empty_like(std), np.empty_like(batch_std)
    evonorm_b0_sums(dy, x, gamma, v, std, batch_std, own, batch, dgamma, dbeta, dv)
    evonorm_b0_dgrad(dy, x, gamma, v, shift, std, batch_shift, batch_std, own, batch, dx)


def _branches(dy: Array, x: Array, gamma: Array, v: Array, std: Array, batch_std: Array) -> tuple[Array, Array, Array]:
    """Where an image's own deviation decides, d, and h = γ·dy."""
    reach, batch = _wide(v) * x + _spread(std, x), _wide(batch_std)
    mask = reach > batch
    return mask, np.where(mask, reach, batch), _wide(gamma) * dy


def _normalise(x: Array, gamma: Array, beta: Array, v: Array, std: Array, batch_std: Array, y: Array) -> None:
    d = np.maximum(_wide(batch_std), _wide(v) * x + _spread(std, x))
    y[...] = _wide(gamma) * x / d + _wide(beta)


def _wide(per_channel: Array) -> Array:
    return per_channel[:, None, None]


def _spread(statistic: Array, x: Array) -> Array:
    """A statistic of every group (or plane) of x, flat, as (N,C,1,1)."""
    n, c = x.shape[:2]
    each = statistic.reshape(n, -1)
    return np.repeat(each, c // each.shape[1], 1)[:, :, None, None]


def _grouped(x: Array, groups: int) -> Array:
    """(N,C,H,W) as (N, groups, elements of a group)."""
    return x.reshape(len(x), groups, -1)


def _centred(x: Array) -> tuple[Array, Array]:
    """x minus its mean along the last axis, and the mean's distance from the first element (…, 1)."""
    from_first = x - x[..., :1]
    shift = from_first.mean(-1, keepdims=True)
    return from_first - shift, shift


def _sigmoid(z: Array) -> tuple[Array, Array]:
    """σ(z) and 1 − σ(z), neither by subtraction from 1."""
    e = np.exp(-np.abs(z))
    t = 1 / (1 + e)
    return np.where(z < 0, e, 1) * t, np.where(z < 0, 1, e) * t
