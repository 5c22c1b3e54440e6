"""EvoNorm in NumPy, of any floating dtype; formulas in the package's docstring. Images are (N,C,H,W), parameters (C).

    evonorm_s0_fprop  x (N,C,H,W), gamma, beta, v (C) -> y, shift, std (N·groups)                groups, eps
    evonorm_s0_grads  dy, x, gamma, v, shift, std -> dx, dgamma, dbeta, dv                      groups
    evonorm_b0_fprop  x, gamma, beta, v, running -> y, shift, std (N·C), batch_shift, batch_std (C), running (in place)
                                                                                                eps, momentum
    evonorm_b0_infer  x, gamma, beta, v, running -> y                                           eps
    evonorm_b0_grads  dy, x, gamma, v, shift, std, batch_shift, batch_std -> dx, dgamma, dbeta, dv

The same with the statistics of all ranks (b0_ranks.py):

    evonorm_b0_statistics  x -> shift, std (N·C), parts (ranks·4·C)                              eps, ranks, rank, images
    evonorm_b0_together    x, gamma, beta, v, running, std, parts -> y, batch_shift, batch_std, running (in place)  eps, momentum, ranks
    evonorm_b0_sums        dy, x, gamma, v, std, batch_std -> own (N·C), batch (C), dgamma, dbeta, dv
    evonorm_b0_dgrad       dy, x, gamma, v, shift, std, batch_shift, batch_std, own, batch -> dx
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from nbcnn.ops.kernel.call import host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.ops.norms.plane import deviation
from nbcnn.plan.op import Op

Array = np.ndarray


BLOCK = 1 << 16
"""Elements of images that EvoNorm-S0 computes at a time: the arrays between its passes stay in a second-level cache."""


def _blocks(x: Array) -> Iterator[slice]:
    """Slices of images x, each of about `BLOCK` elements."""
    size = max(1, BLOCK // max(1, x[0].size))
    return (slice(start, start + size) for start in range(0, len(x), size))


def evonorm_s0_fprop(x: Array, gamma: Array, beta: Array, v: Array, y: Array, shift: Array, std: Array, *, groups: int, eps: float) -> None:
    """y = γ·x·σ(v·x)/s + β, and the statistics shift, std (N·groups) that the gradients want."""
    for images in _blocks(x):
        part = x[images]
        own = slice(images.start * groups, images.start * groups + len(part) * groups)
        centred, offset = _centred(_grouped(part, groups))
        shift[own] = offset.reshape(-1)
        std[own] = deviation(np.square(centred, out=centred).mean(2) + eps).reshape(-1)
        sigma, _ = _sigmoid(_wide(v) * part)
        sigma *= part
        sigma *= _wide(gamma) / _spread(std[own], part)
        np.add(sigma, _wide(beta), out=y[images])


def evonorm_s0_grads(
    dy: Array, x: Array, gamma: Array, v: Array, shift: Array, std: Array, dx: Array, dgamma: Array, dbeta: Array, dv: Array, *, groups: int
) -> None:
    """dx, dgamma, dbeta, dv from dy and what the forward pass read and kept."""
    for each in (dgamma, dbeta, dv):
        each.fill(0)
    for images in _blocks(x):
        part, arriving = x[images], dy[images]
        own = slice(images.start * groups, images.start * groups + len(part) * groups)
        s, z = _spread(std[own], part), _wide(v) * part
        sigma, slope = _sigmoid(z)
        slope *= sigma
        dbeta += arriving.sum((0, 2, 3))
        # p = dy·x·σ/s: its sum over pixels gives dγ and, times γ/s, the gradient of the deviation.
        p = arriving * part
        p /= s
        q = p * part
        q *= slope
        dv += gamma * q.sum((0, 2, 3))
        p *= sigma
        dgamma += p.sum((0, 2, 3))
        pull = _grouped(p.sum((2, 3)) * (gamma / s[:, :, 0, 0]), groups).sum(2)
        centred = _grouped(part, groups)
        centred = centred - centred[:, :, :1]
        centred -= shift[own].reshape(len(part), groups, 1)
        centred *= (pull / std[own].reshape(pull.shape))[:, :, None] / centred.shape[2]
        z *= slope
        z += sigma
        z *= arriving
        z *= _wide(gamma) / s
        np.subtract(z, centred.reshape(part.shape), out=dx[images])


def evonorm_b0_fprop(
    x: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, shift: Array, std: Array, batch_shift: Array, batch_std: Array,
    running_out: Array, *, eps: float, momentum: float,
) -> None:  # fmt: skip
    """y = γ·x/d + β with the batch's variance; statistics of planes (N·C) and channels (C); running in place.

    running ← (1 − momentum)·running + momentum·(unbiased variance of the batch).
    """
    centred, offset = _centred(x.reshape(*x.shape[:2], -1))
    shift[...] = offset.reshape(-1)
    std[...] = deviation(np.square(centred).mean(2) + eps).reshape(-1)
    channels = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
    centred, offset = _centred(channels)
    variance, m = np.square(centred).mean(1), channels.shape[1]
    batch_shift[...] = offset[:, 0]
    batch_std[...] = deviation(variance + eps)
    running_out[...] = (1 - momentum) * running + momentum * variance * (m / max(m - 1, 1))
    _normalise(x, gamma, beta, v, std, batch_std, y)


def evonorm_b0_infer(x: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, *, eps: float) -> None:
    """y = γ·x/d + β with the running variance instead of the batch's; an image's own stays its own."""
    centred, _ = _centred(x.reshape(*x.shape[:2], -1))
    _normalise(x, gamma, beta, v, deviation(np.square(centred).mean(2) + eps), deviation(running + eps), y)


def evonorm_b0_statistics(x: Array, shift: Array, std: Array, parts: Array, *, eps: float, ranks: int, rank: int, images: int) -> None:
    """Statistics of planes (N·C); of this rank's part of the batch in its row of parts (ranks,4,C), 0 in the others (b0_ranks.py)."""
    centred, offset = _centred(x.reshape(*x.shape[:2], -1))
    shift[...] = offset.reshape(-1)
    std[...] = deviation(np.square(centred).mean(2) + eps).reshape(-1)
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
    batch_std[...] = deviation(variance + eps)
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
    return mask, np.maximum(reach, batch), _wide(gamma) * dy


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
    """σ(z) and 1 − σ(z), neither by subtraction from 1.

    Two more exponentials take a fifth of the time of `np.where` by the sign of z, whose branches a CPU cannot predict.
    """
    t = np.abs(z)
    np.exp(np.negative(t, out=t), out=t)
    t += 1
    sigma, rest = np.minimum(z, 0), np.maximum(z, 0)
    np.exp(sigma, out=sigma)
    np.exp(np.negative(rest, out=rest), out=rest)
    sigma /= t
    rest /= t
    return sigma, rest


HOST = {
    Op("evonorm_s0", "fprop"): host(evonorm_s0_fprop),
    Op("evonorm_s0", "grads"): host(evonorm_s0_grads),
    Op("evonorm_b0", "fprop"): host(evonorm_b0_fprop),
    Op("evonorm_b0", "infer"): host(evonorm_b0_infer),
    Op("evonorm_b0", "grads"): host(evonorm_b0_grads),
    Op("evonorm_b0", "statistics"): host(evonorm_b0_statistics),
    Op("evonorm_b0", "together"): host(evonorm_b0_together),
    Op("evonorm_b0", "sums"): host(evonorm_b0_sums),
    Op("evonorm_b0", "dgrad"): host(evonorm_b0_dgrad),
}
GRADIENTS = {
    Op("evonorm_s0", "grads"): Gradient(Op("evonorm_s0", "fprop"), lambda ins, outs, v: (v, ins[0], ins[1], ins[3], *outs[1:]), beside=(1, 1, 1)),
    Op("evonorm_b0", "grads"): Gradient(Op("evonorm_b0", "fprop"), lambda ins, outs, v: (v, ins[0], ins[1], ins[3], *outs[1:5]), beside=(1, 1, 1)),
}

NORMS = (
    ((1, 1, 5, 7), 1, "normal"),
    ((2, 4, 3, 4), 2, "normal"),
    ((1, 6, 3, 3), 3, "normal"),
    ((3, 3, 1, 1), 3, "normal"),
    ((1, 34, 2, 1), 1, "normal"),
    ((1, 34, 1, 2), 17, "normal"),
    ((2, 2, 3, 5), 1, "constant planes"),
    ((2, 2, 3, 5), 2, "offset 2000"),
)
"""(N,C,H,W), groups, values: one pixel; a group wider than a warp; more channels than a warp; a variance of zero; one far from the mean."""

QUADS = (((3, 8, 3, 4), 4, "normal"), ((2, 8, 4, 9), 1, "offset 2000"), ((2, 4, 2, 2), 4, "constant planes"), ((16, 64, 28, 28), 32, "normal"))
"""Images that kernels can hold in registers (`evonorm.held`), too many threads for the simulator."""


def norm_cases(norms: Sequence[tuple[tuple[int, ...], int, str]] = NORMS) -> Iterator[Case]:
    """The EvoNorm ops on images of such shapes, groups and values."""
    for shape, groups, values in norms:
        n, c, h, w = shape
        x, dy = normal(40, *shape), normal(41, *shape)
        if values == "constant planes":
            x[...] = x[:, :, :1, :1]
        if values == "offset 2000":
            x += 2000
        gamma, beta, v = 1 + 0.3 * normal(42, c), normal(43, c), np.random.default_rng(44).uniform(0.6, 1.4, c).astype(np.float32)
        running, label = normal(45, c) ** 2, f"{'×'.join(map(str, shape))} {groups} groups, {values}"
        y, channel = np.empty_like(x), ((c,), "float32")
        kept = np.empty((2, n * groups), np.float32)
        terms, image = max(n * h * w, h * w * (c // groups)), (shape, "float32")
        evonorm_s0_fprop(x, gamma, beta, v, y, *kept, groups=groups, eps=1e-5)
        outs = (image, *(((n * groups,), "float32"),) * 2)
        yield Case(Op("evonorm_s0", "fprop"), label, (x, gamma, beta, v), outs, {"groups": groups, "eps": 1e-5}, terms)
        yield Case(Op("evonorm_s0", "grads"), label, (dy, x, gamma, v, *kept), (image, *(channel,) * 3), {"groups": groups}, terms)
        label, terms = f"{'×'.join(map(str, shape))} {values}", n * h * w
        planes, channels = np.empty((2, n * c), np.float32), np.empty((3, c), np.float32)
        evonorm_b0_fprop(x, gamma, beta, v, running, y, *planes, *channels, eps=1e-3, momentum=0.1)
        b0_outs = (image, *(((n * c,), "float32"),) * 2, *(channel,) * 2, 4)
        yield Case(Op("evonorm_b0", "fprop"), label, (x, gamma, beta, v, running), b0_outs, {"eps": 1e-3, "momentum": 0.1}, terms)
        yield Case(Op("evonorm_b0", "infer"), label, (x, gamma, beta, v, running), (image,), {"eps": 1e-3}, h * w)
        yield Case(Op("evonorm_b0", "grads"), label, (dy, x, gamma, v, *planes, *channels[:2]), (image, *(channel,) * 3), {}, terms)
        yield from _ranks_cases(label, (dy, x, gamma, beta, v, running), planes, channels[:2], terms)


def _ranks_cases(label: str, ins: Sequence[np.ndarray], planes: np.ndarray, channels: np.ndarray, terms: int) -> Iterator[Case]:
    """The ops that share EvoNorm-B0's statistics, as rank 1 of 3; the others have 2 and no images."""
    dy, x, gamma, beta, v, running = ins
    n, c, *_ = x.shape
    image, plane, channel, parts = ((s, "float32") for s in (x.shape, (n * c,), (c,), (12 * c,)))
    yield Case(Op("evonorm_b0", "statistics"), label, (x,), (plane, plane, parts), {"eps": 1e-3, "ranks": 3, "rank": 1, "images": n}, terms)
    rows = np.zeros((3, 4, c), np.float32)
    rows[:, 0] = [[2], [n], [0]]
    rows[:, 1], rows[:, 2], rows[:, 3] = x[0, :, 0, 0] + normal(46, 3, c), normal(47, 3, c), normal(48, 3, c) ** 2
    kept = {"eps": 1e-3, "momentum": 0.1, "ranks": 3}
    yield Case(
        Op("evonorm_b0", "together"), label, (x, gamma, beta, v, running, planes[1], rows.reshape(-1)), (image, channel, channel, 4), kept, terms
    )
    own, batch, *grads = np.empty(n * c, np.float32), *np.empty((4, c), np.float32)
    evonorm_b0_sums(dy, x, gamma, v, planes[1], channels[1], own, batch, *grads)
    # A sum errs by roundings of its terms: where they cancel, as three pixels may, that is more of what is left.
    mask, d, h = _branches(dy, x, gamma, v, planes[1], channels[1])
    cancelled = float(np.linalg.norm((~mask * np.abs(h * x / (d * d))).sum((0, 2, 3))) / (np.linalg.norm(batch) or 1))
    yield Case(
        Op("evonorm_b0", "sums"),
        label,
        (dy, x, gamma, v, planes[1], channels[1]),
        (plane, *(channel,) * 4),
        {},
        math.ceil(terms * max(cancelled, 1.0) ** 2),
    )
    yield Case(Op("evonorm_b0", "dgrad"), label, (dy, x, gamma, v, *planes, *channels, own, batch), (image,), {}, terms)


def cases() -> Iterator[Case]:
    """Shapes small enough for the simulator: planes of one pixel, of one value, and far from zero.

    An offset of 2000 leaves σ(v·x) no slope in either precision; there the statistics must keep what x has left of its digits.
    """
    yield from norm_cases(NORMS)


def real_cases() -> Iterator[Case]:
    """Shapes that kernels hold in registers."""
    yield from norm_cases(QUADS)
