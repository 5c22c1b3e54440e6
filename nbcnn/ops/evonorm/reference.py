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


def evonorm_b0_grads(
    dy: Array, x: Array, gamma: Array, v: Array, shift: Array, std: Array, batch_shift: Array, batch_std: Array,
    dx: Array, dgamma: Array, dbeta: Array, dv: Array,
) -> None:  # fmt: skip
    """dx, dgamma, dbeta, dv from dy and what the forward pass read and kept."""
    own, batch = _spread(std, x), _wide(batch_std)
    reach = _wide(v) * x + own
    mask = reach > batch
    d = np.where(mask, reach, batch)
    h = _wide(gamma) * dy
    q = -h * x / (d * d)
    dbeta[...] = dy.sum((0, 2, 3))
    dgamma[...] = (dy * x / d).sum((0, 2, 3))
    dv[...] = (mask * q * x).sum((0, 2, 3))
    plane = (mask * q).sum((2, 3), keepdims=True) / (x.shape[2] * x.shape[3])
    whole = (~mask * q).sum((0, 2, 3), keepdims=True) / (x.size // x.shape[1])
    to_plane = x - x[:, :, :1, :1] - _spread(shift, x)
    to_batch = x - x[:1, :, :1, :1] - _wide(batch_shift)
    dx[...] = np.where(mask, h * own / (d * d), h / d) + plane * to_plane / own + whole * to_batch / batch


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
